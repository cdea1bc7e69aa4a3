"""Whatever becomes of a file of data, or of what is remembered of it, `data verify` works all the same, or names it."""

from __future__ import annotations

import gzip
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from damage import ANY, JSON, check, told
from shards import offline, picture, write_parquet, write_wds
from sounds import esc50, genres
from test_actions_files import actionformer, npz

QUICK, SLOW = range(3), range(3, 120)


CACHE = ".attemper-cache"


def photos(root: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        (root / "photos" / name).mkdir(parents=True)
        for at in range(6):
            picture(at, label, (12, 10)).save(root / "photos" / name / f"{at}.{['png', 'jpg', 'gif'][at % 3]}")


def recordings(root: Path) -> None:
    esc50(root / "esc", takes=1)


def sounds(root: Path) -> None:
    genres(root / "clips", each=6, rate=8000)
    assert told(["data", "verify", "audio:clips(seconds=1, bands=8)", "--data", str(root)])[0] == 0


def spectrograms(root: Path) -> None:
    mel = np.random.default_rng(0).integers(0, 256, (20, 8, 4)).astype(np.uint8)
    np.savez(root / "mel.npz", mel=mel, labels=np.arange(20) % 2, classes=np.array(["a", "b"]))


def shards(root: Path) -> None:
    write_wds(root / "shards", (5, 4), (3,), info=True)
    assert told(["data", "verify", "wds:shards(size=16)", "--data", str(root)])[0] == 0


def parquet(root: Path) -> None:
    write_parquet(root / "hub", train=(6, 4), test=(3,))
    assert told(["data", "verify", "hf:hub(size=16)", "--data", str(root)])[0] == 0


def sentences(root: Path) -> None:
    folder = root / "text"
    folder.mkdir()
    for part in ("train", "val", "test"):
        lines = "\n".join(f"the dog is {at}" for at in range(8)) + "\n"
        (folder / f"{part}.en").write_text(lines)
        (folder / f"{part}.de.gz").write_bytes(gzip.compress(lines.replace("the", "der").encode()))


SOUNDS = "audio:clips(seconds=1, bands=8)"
CASES: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "photos": (photos, "folder:photos(size=8)", ["photos/*/*"]),
    "sounds": (sounds, SOUNDS, ["clips/*/*.wav"]),
    "sounds, remembered": (sounds, SOUNDS, [f"{CACHE}/*.json", f"{CACHE}/*.stamp", f"{CACHE}/*.mel"]),
    "recordings": (recordings, "esc50:esc(seconds=1, bands=8)", ["esc/meta/esc50.csv"]),
    "spectrograms": (spectrograms, "mel:mel.npz(tokens=2)", ["mel.npz"]),
    "videos": (npz, "actions:data.npz(window=4)", ["data.npz"]),
    "videos in a folder": (actionformer, "actions:data(window=4)", ["data/**/*.npy"]),
    "annotations": (actionformer, "actions:data(window=4)", ["data/**/*.json"]),
    "shards": (shards, "wds:shards(size=16)", ["shards/*.tar"]),
    "shards, described": (shards, "wds:shards(size=16)", ["shards/_info.json"]),
    "shards, remembered": (shards, "wds:shards(size=16)", [f"{CACHE}/*.npy"]),
    "parquet": (parquet, "hf:hub(size=16)", ["hub/**/*.parquet"]),
    "parquet, remembered": (parquet, "hf:hub(size=16)", [f"{CACHE}/*.json"]),
    "sentences": (sentences, "translation:text", ["text/*"]),
}
"""What makes the files, the task, and the files of which one is damaged."""

BESIDE = {"recordings": ["esc50:"], "videos in a folder": ["video '"], "parquet": ["'hub'"]}
"""What may be named in a file's place: of a table that ends early, or where a file became something else."""

few, many = pytest.param(QUICK, id="few"), pytest.param(SLOW, marks=pytest.mark.slow, id="many")


@pytest.mark.parametrize("seeds", [few, many])
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_of_data_is_named_or_harmless(
    case: str, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, task, patterns = CASES[case]
    root, copy = tmp_path / "root", tmp_path / "copy"
    monkeypatch.chdir(tmp_path)
    with offline(tmp_path / "hub-cache"):
        root.mkdir()
        make(root)
        check(["data", "verify", task, "--data", "root"])
        shutil.copytree(root, copy)
        for seed in seeds:
            r = random.Random(f"{case} {seed}")
            path = r.choice(sorted(each for pattern in patterns for each in root.glob(pattern) if each.is_file()))
            r.choice(JSON if path.suffix == ".json" else ANY)(r, path)
            check(["data", "verify", task, "--data", "root"], path.name, *BESIDE.get(case, ()))
            shutil.rmtree(root)
            shutil.copytree(copy, root)
