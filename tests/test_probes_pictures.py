"""Pictures of attention, and `attemper diagnose` from a folder of images to a page."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from attemper.errors import NoSiteError, ParameterError, UnreadableError
from attemper.files import Weights, read_weights
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.models.registry import build_model
from attemper.lab.models.weights import load_weights
from attemper.lab.report.diagnosis import make_page
from attemper.lab.report.heat import colours
from attemper.lab.report.png import _apart, beside, curves, heat_map, looks_sheet, overlay
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.user_images import read_images
from attemper.lab.training.checkpoint import save_checkpoint
from attemper.probes import Table, query_looks, rollout
from attemper.probes.table import HeadRow, TokenRow
from browser import browsing, chromium
from families import build, family


@pytest.fixture
def model():
    made = build(family("timm-vit")).double().eval()
    for block in made.blocks:
        block.attn.fused_attn = False
    return made


def maps_of(model, x):
    """The attention maps by hand, (heads, N, N) per block."""
    found = []
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        for block in model.blocks:
            q, k, _ = block.attn.qkv(block.norm1(tokens)).view(1, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
            found.append((q @ k.transpose(-2, -1) / 4).softmax(-1)[0])
            tokens = block(tokens)
    return found


def test_a_query_looks_where_its_row_of_the_map_says(model):
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    for query, row in ((None, 0), ((2, 3), 1 + 2 * 4 + 3)):
        looks = query_looks(model, x, query)
        assert [look.block for look in looks] == [0, 1, 2]
        for look, expected in zip(looks, maps_of(model, x), strict=True):
            torch.testing.assert_close(look.weights, expected[:, row, 1:].view(3, 4, 4))


def test_rollout_is_the_product_of_the_averaged_maps(model):
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    product = torch.eye(17, dtype=torch.float64)
    for weights in maps_of(model, x):
        product = (weights.mean(0) + torch.eye(17)) / 2 @ product
    torch.testing.assert_close(rollout(model, x), product[0, 1:].view(4, 4))
    torch.testing.assert_close(rollout(model, x, (0, 1)), product[2, 1:].view(4, 4))


def test_what_cannot_be_drawn_is_refused_with_a_reason(model):
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(NoSiteError, match="no attention of SwinTransformer is over all patches of an image"):
        query_looks(build(family("timm-swin")), x)
    with pytest.raises(NoSiteError, match="has a class token; choose a patch"):
        query_looks(build(family("timm-vit-registers")), x)
    with pytest.raises(ParameterError, match=r"the patch \(4, 0\) is outside of the grid of 4 × 4"):
        query_looks(model, x.double(), (4, 0))
    with pytest.raises(ParameterError, match="a batch of one image; got 2"):
        rollout(model, x.double().expand(2, -1, -1, -1))


def test_class_attention_is_drawn_for_the_class_token():
    looks = query_looks(build(family("timm-cait")), torch.randn(1, 3, 32, 32))
    assert [look.block for look in looks] == [2, 3]
    assert looks[0].weights.shape == (3, 4, 4)


# ----------------------------------------------------------------------------------------------------------- drawings
def luminance(picture):
    return np.asarray(picture.convert("L"), dtype=float)


def test_larger_numbers_are_lighter():
    shades = colours(np.linspace(0, 1, 50)) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(shades) > 0).all()


def test_attention_over_an_image_is_brightest_where_the_weight_is():
    image = torch.full((3, 32, 32), 90, dtype=torch.uint8)
    weights = torch.zeros(4, 4)
    weights[1, 2] = 1.0
    bright = luminance(overlay(image, weights, 160))
    row, column = np.unravel_index(bright.argmax(), bright.shape)
    assert (row // 40, column // 40) == (1, 2)
    assert luminance(overlay(image[:1], weights, 160)).shape == (160, 160), "grey images too"


def test_drawings_hold_what_they_are_given(model):
    grid = heat_map([[0.1, 0.9, None], [0.5, 0.2, float("nan")]], title="Heat", rows=["0", "1"])
    chart = curves({"one": [1.0, 10.0, 1e6], "two": [1.0, None, float("inf")]}, title="κ", y="κ", log=True)
    looks = query_looks(model, torch.randn(1, 3, 32, 32, dtype=torch.float64))
    sheet = looks_sheet(torch.zeros(3, 32, 32, dtype=torch.uint8), looks, title="Looks", side=32)
    assert sheet.height > 3 * 32
    both = beside({"none": sheet, "dropkey(0.1)": sheet})
    assert both.width > 2 * sheet.width
    for picture in (grid, chart, sheet, both, heat_map([], title="Nothing", rows=[])):
        assert len(np.unique(luminance(picture))) > 2
    with_values, empty = np.asarray(grid), np.asarray(heat_map([[None]], title="Heat", rows=["0"]))
    assert len(np.unique(with_values.reshape(-1, 3), axis=0)) > len(np.unique(empty.reshape(-1, 3), axis=0))


def test_names_of_lines_that_end_together_stand_apart_and_inside():
    placed = _apart({"a": 99.0, "b": 99.5, "c": 100.0, "d": 20.0}, 16, 100)
    levels = sorted(placed.values())
    assert all(b - a >= 16 for a, b in itertools.pairwise(levels))
    assert levels[-1] <= 100
    assert placed["d"] == 20


# ------------------------------------------------------------------------------------------------------------- images
@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for at in range(3):
        pixels = rng.integers(0, 255, (40, 30 + at, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{at}.png")
    Image.fromarray(rng.integers(0, 255, (20, 20), dtype=np.uint8)).save(folder / "deep" / "grey.jpg")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:60])
    (folder / "text.jpg").write_text("no image")
    (folder / "notes.txt").write_text("not looked at")
    return folder


def test_images_that_cannot_be_decoded_are_skipped_and_named(photos):
    images = read_images(photos, 16, 10)
    assert images.pixels.shape == (4, 3, 16, 16)
    assert images.names == ("0.png", "1.png", "2.png", "deep/grey.jpg")
    assert images.warning == "2 images could not be decoded and were skipped: broken.png, text.jpg"
    assert len(read_images(photos, 16, 2).names) == 2


def test_a_folder_without_a_single_image_is_an_error(photos, tmp_path):
    for name in ("0.png", "1.png", "2.png", "deep/grey.jpg"):
        (photos / name).unlink()
    with pytest.raises(DataError, match=r"Of 2 images in '.*photos', none can be decoded: broken.png, text.jpg"):
        read_images(photos, 16, 10)
    with pytest.raises(DataError, match="has no image in it"):
        read_images(photos / "deep", 16, 10)
    with pytest.raises(DataError, match="is not a folder"):
        read_images(tmp_path / "nowhere", 16, 10)


# -------------------------------------------------------------------------------------------------------- checkpoints
SHAPE = InputShape(3, 32, 32, 4)
SMALL = "vit-tiny(depth=2, width=24, heads=3, mlp=24)"


def test_weights_come_back_from_every_kind_of_file(tmp_path):
    from safetensors.torch import save_file

    model = build_model(SMALL, SHAPE)
    state = model.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "wrapped.pt")
    save_file(state, tmp_path / "safe.safetensors")
    save_checkpoint(tmp_path, {"best": state, "story": {"epoch": 3}})
    for name in ("plain.pt", "wrapped.pt", "safe.safetensors", "checkpoint.pt"):
        other = build_model(SMALL, SHAPE)
        load_weights(other, read_weights(tmp_path / name), of=SMALL)
        assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items()), name


def test_a_checkpoint_of_another_model_is_refused_and_says_what_differs(tmp_path):
    model, file = build_model(SMALL, SHAPE), Path("other.pt")
    deeper = build_model("vit-tiny(depth=3, width=24, heads=3, mlp=24)", SHAPE).state_dict()
    with pytest.raises(
        ParameterError, match=r"'other.pt' are not those of vit-tiny.*: 'blocks.2.*' is not in the model, and \d+ more"
    ):
        load_weights(model, Weights(file, deeper), of=SMALL)
    wider = build_model("vit-tiny(depth=2, width=48, heads=3, mlp=24)", SHAPE).state_dict()
    with pytest.raises(ParameterError, match=r"'cls_token' is \(1, 1, 48\) and must be \(1, 1, 24\), and \d+ more"):
        load_weights(model, Weights(file, wider), of=SMALL)
    with pytest.raises(ParameterError, match="'cls_token' is missing, and"):
        load_weights(model, Weights(file, {}), of=SMALL)


def test_a_file_that_would_run_code_or_holds_no_weights_is_refused(tmp_path):
    torch.save(build_model(SMALL, SHAPE), tmp_path / "module.pt")
    with pytest.raises(UnreadableError, match="cannot be read as weights"):
        read_weights(tmp_path / "module.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UnreadableError, match="cannot be read as weights"):
        read_weights(tmp_path / "text.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(UnreadableError, match="holds no weights"):
        read_weights(tmp_path / "empty.pt")
    with pytest.raises(UnreadableError, match="There is no file"):
        read_weights(tmp_path / "none.pt")


# ---------------------------------------------------------------------------------------------------- the command line
def test_diagnose_prints_a_table_and_writes_pictures_and_a_page(photos, tmp_path, capsys):
    out, weights = tmp_path / "out", tmp_path / "weights.pt"
    model = build_model(SMALL, SHAPE)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:8] *= 5e4
    torch.save(model.state_dict(), weights)
    words = ["diagnose", SMALL, "--images", str(photos), "--checkpoint", str(weights), "--out", str(out)]
    assert main([*words, "--pictures", "2", "--query", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert f"weights: {weights.parent.name}/weights.pt" in printed
    assert printed.splitlines()[3].split()[:3] == ["block", "head", "entropy"]
    assert "! logit blow-up, 1 of 6 heads (block 1: 0)" in printed
    assert "2 images could not be decoded and were skipped: broken.png, text.jpg" in printed
    for name in ("heat-normalised", "heat-logit-max", "curve-condition", "looks-0", "looks-1", "rollout-1"):
        Image.open(out / f"{name}.png").verify()
    table = json.loads((out / "table.json").read_text())
    assert table["samples"] == 4
    assert len(table["heads"]) == 6
    page = (out / "index.html").read_text()
    for told in ("Findings", "logit blow-up", "Where attention looks", "Image 1: attention rollout", "broken.png"):
        assert told in page


def test_diagnose_shows_jacobians_and_the_push_of_gradients(photos, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["diagnose", SMALL, "--images", str(photos), "--out", str(out), "--size", "8", "--recipe", "dropkey(0.2)"]
    assert main([*words, "--probes", "jacobian", "smoothing", "--pictures", "0", "--jacobian-limit", "1560"]) == 0
    printed = capsys.readouterr().out
    assert "block 1, mlp: the Jacobian of " in printed
    assert "κ leaves out " in printed
    for name in ("curve-jacobian-condition", "curve-jacobian-largest"):
        Image.open(out / f"{name}.png").verify()
    table = json.loads((out / "table.json").read_text())
    assert [row["recipe"] for row in table["smoothing"]] == ["none", "recipe"] * 2
    assert all(row["condition"] > 1 for row in table["jacobians"])
    page = (out / "index.html").read_text()
    for told in ("Jacobians of the branches", "Every Jacobian", "κ leaves out", "Every push"):
        assert told in page
    assert main([*words, "--jacobian-limit", "0"]) == 2
    assert "--jacobian-limit is 0; it must be at least 1" in capsys.readouterr().err


def test_another_run_is_drawn_beside_the_first(photos, tmp_path):
    for name in ("one", "two"):
        torch.save(build_model(SMALL, SHAPE).state_dict(), tmp_path / f"{name}.pt")
    words = [
        "diagnose",
        SMALL,
        "--images",
        str(photos),
        "--checkpoint",
        str(tmp_path / "one.pt"),
        "--probes",
        "entropy",
    ]
    assert main([*words, "--out", str(tmp_path / "alone")]) == 0
    assert main([*words, "--beside", str(tmp_path / "two.pt"), "--out", str(tmp_path / "both")]) == 0
    alone, both = (Image.open(tmp_path / folder / "rollout-0.png") for folder in ("alone", "both"))
    assert both.width > 2 * alone.width
    left, right = (luminance(both)[60:300, x : x + 300] for x in (26, 26 + 336))
    assert not np.array_equal(left, right)


def test_diagnose_as_json_is_json_alone(photos, tmp_path, capsys):
    words = ["diagnose", SMALL, "--images", str(photos), "--out", str(tmp_path / "out"), "--json", "--recipe", "cb"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["skipped"] == ["broken.png", "text.jpg"]
    assert found["heads"][0]["normalised"] > 0


def test_a_model_without_pictures_still_has_its_table(photos, tmp_path, capsys):
    model = "timm:swin_tiny_patch4_window7_224(window_size=4, embed_dim=12, depths=[1, 1], num_heads=[1, 2])"
    words = ["diagnose", model, "--images", str(photos), "--out", str(tmp_path / "out"), "--size", "32"]
    assert main(words) == 0
    assert "note: no pictures: no attention of this model has a class token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["convmixer"], "has no attention that is recognised"),
        ([SMALL, "--query", "here"], "--query is 'here'; it must be 'class', or row and column"),
        ([SMALL, "--query", "9,9"], "outside of the grid of 8 × 8"),
        ([SMALL, "--most", "0"], "--most is 0; it must be at least 1"),
        ([SMALL, "--channels", "2"], "--channels is 2; it must be 1 or 3"),
        ([SMALL, "--checkpoint", "nothing.pt"], "There is no file 'nothing.pt'"),
        ([SMALL, "--probes", "entropi"], "there is no probe 'entropi'. Did you mean 'entropy'?"),
        (["vit-tinny"], "Did you mean 'vit-tiny'?"),
        ([SMALL, "--recipe", "dropkee"], "Did you mean 'dropkey'?"),
    ],
)
def test_mistakes_on_the_command_line_get_a_message_and_code_2(words, told, photos, tmp_path, capsys):
    assert main(["diagnose", *words, "--images", str(photos), "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is written"


def page_of_everything():
    heads = tuple(
        HeadRow(b, f"blocks.{b}.attn", h, 2.0 - h / 9, 0.01 if b == h == 2 else 0.9, 0.2, 3.0, 120.0 * b, 2.0, 2.0)
        for b in range(3)
        for h in range(4)
    )
    places = ("input", "attention", "attention + skip", "output")
    tokens = tuple(TokenRow(b, p, 10.0 ** (b + 1), 9.0 - b, 0.3) for b in range(3) for p in places)
    return Table("<VisionTransformer>", 2, heads, tokens, notes=("a <note>",))


@pytest.mark.skipif(chromium() is None, reason="needs a Chromium")
def test_the_page_is_whole_in_a_browser_in_light_and_dark_and_on_a_phone(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (600, 80), (200, 30, 30)).save(buffer, "PNG")
    path = tmp_path / "page.html"
    path.write_text(make_page(page_of_everything(), title="<Attention>", pictures={"Look": buffer.getvalue()}))
    with browsing(chromium(), tmp_path / "profile") as browser:
        for dark, width in ((False, 1200), (True, 1200), (False, 390)):
            browser.open(path, dark=dark, width=width)
            assert browser.complaints() == []
            assert browser.requests() == [path.resolve().as_uri()] or all(
                url.startswith(("file:", "data:")) for url in browser.requests()
            )
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            assert browser.evaluate("document.querySelector('img').naturalWidth") == 600
            fill = browser.evaluate("getComputedStyle(document.querySelector('rect[fill-opacity]')).fill")
            assert fill not in ("none", "rgb(0, 0, 0)"), "cells have the page's colour"
        assert "logit blow-up" in browser.evaluate("document.body.innerText")
