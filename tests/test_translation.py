"""Translation: parallel text read as it is, and BLEU that can be compared."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.text import TextSource
from attemper.lab.tasks.translation import TranslationTask, bleu
from attemper.lab.tasks.vocabulary import BEGIN, END, PADDING, UNKNOWN, Vocabulary, join, split
from attemper.tempering.outputs import IGNORED

EN = ["a red dog runs.", "a dog sleeps.", "the red cat runs.", "the cat sleeps.", "a cat (red) runs."]
DE = ["ein roter hund rennt.", "ein hund schläft.", "die rote katze rennt.", "die katze schläft.", "eine katze rennt."]


def write(folder: Path, **parts: list[str]) -> Path:
    """Files named as `part_language`, one sentence per line."""
    for name, lines in parts.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(
        tmp_path, train_en=EN * 4, train_de=DE * 4, val_en=EN[:2], val_de=DE[:2], test_en=EN[2:], test_de=DE[2:]
    )


def translation(folder: Path, options: str = "") -> TranslationTask:
    task = open_task(f"translation:{folder}({options})")
    assert isinstance(task, TranslationTask)
    return task


def parts_of(task: Task, seed: int = 0) -> list[TextSource]:
    parts = [*task.split(seed, 0.3), task.test()]
    assert all(isinstance(part, TextSource) for part in parts)
    return parts  # type: ignore[return-value]


# -------------------------------------------------------------------------------------------------------------- files
def test_a_folder_in_the_layout_of_multi30k_becomes_a_task(folder: Path) -> None:
    task = translation(folder)
    assert isinstance(task, Task)
    train, validation, test = parts_of(task)
    assert (len(train), len(validation), len(test)) == (20, 2, 3)
    assert validation.references == tuple(DE[:2])
    assert test.references == tuple(DE[2:])


def test_source_and_shifted_target_stand_side_by_side(folder: Path) -> None:
    task = translation(folder)
    sample, target = parts_of(task)[0].tokens[1], parts_of(task)[0].targets[1]
    words = task.target.vocabulary
    source, given = sample[: task.shape.source], sample[task.shape.source :]
    assert task.source.vocabulary.decode(source.tolist()) == ["a", "dog", "sleeps", "."]
    assert given[0] == BEGIN
    assert words.decode(given.tolist()) == words.decode(target.tolist()) == ["ein", "hund", "schläft", "."]
    end = target.tolist().index(END)
    assert torch.equal(given[1 : end + 1], target[:end].int())
    assert (target[end + 1 :] == IGNORED).all()
    assert (given[end + 1 :] == PADDING).all()


def test_validation_files_are_the_validation_part_under_every_seed(folder: Path) -> None:
    task = translation(folder)
    for seed, share in ((0, 0.3), (1, 0.5)):
        train, validation = task.split(seed, share)
        assert (len(train), len(validation)) == (20, 2)


def test_without_validation_files_the_split_is_a_function_of_the_seed(folder: Path) -> None:
    for name in ("val.en", "val.de"):
        (folder / name).unlink()
    lines = [f"word number {i}" for i in range(20)]
    write(folder, train_en=lines, train_de=lines)
    first, again, other = (parts_of(translation(folder), seed) for seed in (0, 0, 1))
    assert [len(part) for part in first[:2]] == [14, 6]
    assert set(first[0].references) | set(first[1].references) == set(lines)
    assert first[1].references == again[1].references != other[1].references


def test_without_test_files_a_fixed_part_is_held_out(folder: Path) -> None:
    for name in ("test.en", "test.de"):
        (folder / name).unlink()
    lines = [f"word number {i}" for i in range(20)]
    write(folder, train_en=lines, train_de=lines)
    train, _, test = parts_of(translation(folder))
    assert (len(train), len(test)) == (16, 4)
    assert not set(train.references) & set(test.references)
    assert test.references == parts_of(translation(folder), seed=1)[2].references


def test_the_vocabulary_comes_from_the_training_text_alone(folder: Path) -> None:
    write(folder, val_en=["zebra zebra zebra", "dog"], test_en=["zebra zebra zebra", "dog", "dog"])
    task = translation(folder)
    assert "zebra" not in task.source.vocabulary.words
    test = parts_of(task)[2]
    assert (test.tokens[0, :3] == UNKNOWN).all()


def test_languages_level_and_compressed_files_can_be_chosen(folder: Path) -> None:
    for name in ("train.en", "train.de"):
        file = folder / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    task = translation(folder, "source=de, target=en, level=char")
    assert task.source.vocabulary.decode(parts_of(task)[0].tokens[0, : task.shape.source].tolist()) == list(DE[0])
    assert task.fingerprint == translation(folder, "source=de, target=en").fingerprint


def test_multi30k_test_sets_are_found_and_can_be_chosen(folder: Path) -> None:
    for language in ("en", "de"):
        (folder / f"test.{language}").rename(folder / f"test_2016_flickr.{language}")
    write(folder, test_2017_mscoco_en=EN[:1], test_2017_mscoco_de=DE[:1])
    assert len(translation(folder).test()) == 3
    assert len(translation(folder, "test_file=test_2017_mscoco").test()) == 1
    for language in ("en", "de"):
        (folder / f"test_2016_flickr.{language}").rename(folder / f"test_2018.{language}")
    with pytest.raises(DataError, match=r"has 2 test sets: test_2017_mscoco, test_2018\. Choose one: test_file="):
        translation(folder)


def test_the_fingerprint_follows_contents(folder: Path) -> None:
    before = translation(folder).fingerprint
    assert translation(folder, "level=char").fingerprint == before
    write(folder, test_de=[*DE[2:4], "eine katze schläft."])
    assert translation(folder).fingerprint != before


def test_fewer_pairs_are_the_same_ones_for_everybody(folder: Path) -> None:
    one, other = (parts_of(translation(folder, "train=10, test=2"), seed) for seed in (0, 1))
    assert [len(part) for part in one] == [10, 2, 2]
    assert one[0].references == other[0].references
    assert one[2].references == other[2].references
    with pytest.raises(DataError, match="asks for 30 training pairs, and there are 20"):
        translation(folder, "train=30")


def test_characters_that_unicode_counts_as_line_ends_do_not_shift_the_lines(folder: Path) -> None:
    write(folder, test_en=["a\u2028dog", "a\x0cdog", "a\x85dog"])
    assert len(translation(folder).test()) == 3


# ---------------------------------------------------------------------------------------------------------- bad files
def test_a_missing_side_is_named(folder: Path) -> None:
    (folder / "val.de").unlink()
    with pytest.raises(DataError, match=r"has no 'val\.de' \(nor 'val\.de\.gz'\)\. It has: test\.de, test\.en, train"):
        translation(folder)
    with pytest.raises(DataError, match=r"has no 'train\.fr'"):
        translation(folder, "target=fr")
    with pytest.raises(DataError, match="'nowhere' is not a folder"):
        open_task("translation:nowhere")
    with pytest.raises(DataError, match="source and target are both 'en'"):
        translation(folder, "target=en")


def test_different_numbers_of_lines_are_counted(folder: Path) -> None:
    write(folder, train_de=DE * 4 + ["noch eine katze."])
    with pytest.raises(DataError, match=r"train\.en' has 20 lines and 'train\.de' has 21"):
        translation(folder)


def test_an_empty_file_is_named(folder: Path) -> None:
    (folder / "test.en").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.en' is empty"):
        translation(folder)


def test_lines_that_are_not_utf8_are_named(folder: Path) -> None:
    (folder / "train.de").write_bytes(
        "\n".join(DE * 4).encode().replace("schläft".encode(), "schläft".encode("latin1"))
    )
    with pytest.raises(
        DataError, match=r"8 of 20 lines of '.*train\.de' are not UTF-8: line 2 \(byte 0xe4 after 13 bytes\); line"
    ):
        translation(folder)


def test_a_damaged_archive_is_named(folder: Path) -> None:
    (folder / "train.de").unlink()
    (folder / "train.de.gz").write_bytes(gzip.compress("\n".join(DE * 4).encode())[:30])
    with pytest.raises(DataError, match=r"train\.de\.gz' cannot be read"):
        translation(folder)


def test_training_pairs_that_are_too_long_are_left_out_and_test_sentences_are_cut(folder: Path) -> None:
    task = translation(folder, "length=4")
    train, validation, test = parts_of(task)
    assert (task.shape.source, task.shape.target) == (5, 5)
    assert (len(train), len(validation), len(test)) == (8, 2, 3)  # the second and the fourth of five sentences
    assert test.references == tuple(DE[2:]), "what is compared with is never cut"
    assert len(task.source.vocabulary.decode(test.tokens[0, :5].tolist())) == 4
    lines = verify(f"translation:{folder}(length=4)")
    assert "8 pairs of train.en and train.de, 12 more are left out, since they are empty or too long" in lines[1]
    assert "3 pairs of test.en and test.de, 2 sources are cut to 4 tokens" in lines[3]


def test_nobody_is_asked_to_end_a_translation_that_was_cut(folder: Path) -> None:
    test = parts_of(translation(folder, "length=4"))[2]
    ended = [END in targets for targets in test.targets.tolist()]
    assert ended == [len(split(sentence, "word")) <= 4 for sentence in DE[2:]] == [False, True, True]


def test_a_length_that_leaves_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has 0 training pairs to use, .* are empty or longer than length=2"):
        translation(folder, "length=2")


def test_verify_says_what_was_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", f"translation:{folder}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "22 training samples and 3 test samples of 8 + 6 tokens at most, source and target" in said
    assert "validation: 2 pairs of val.en and val.de; 0.0% of the source tokens are unknown" in said
    (folder / "val.de").unlink()
    assert main(["data", "verify", f"translation:{folder}"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("level=syllable", "level is 'syllable'; it must be word or char"),
        ("length=0", "length is 0; it must be a whole number, at least 1"),
        ("lenght=3", "no option 'lenght'. Did you mean 'length'"),
    ],
)
def test_a_wrong_option_is_refused(folder: Path, options: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        translation(folder, options)


def test_a_missing_sacrebleu_is_named_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)  # what an import finds where there is none
    with pytest.raises(ParameterError, match=r"pip install 'attemper\[text\]'"):
        open_task("numerals")


# --------------------------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize("text", ["A man, 35, sits (alone).", "Was ist das?", "mid-air: 3.5 m!", ""])
def test_words_are_joined_as_they_were_written(text: str) -> None:
    assert join(split(text, "word"), "word") == text
    assert join(split(text, "char"), "char") == text


def test_the_most_frequent_words_are_kept_and_rare_ones_are_unknown() -> None:
    sentences = [["b", "a", "c"], ["a", "b"], ["a", "d", "d"]]
    assert Vocabulary.of(sentences).words[4:] == ("a", "b", "d")
    assert Vocabulary.of(sentences, most=1).words[4:] == ("a",)
    assert Vocabulary.of(sentences).encode(["a", "c"]) == [4, UNKNOWN]


def test_a_language_that_sacrebleu_cannot_split_is_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(**_: Any) -> None:
        raise RuntimeError("Japanese needs\n\n extra dependencies")

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU", lacking)
    with pytest.raises(ParameterError, match="cannot measure 'de': Japanese needs extra dependencies"):
        translation(folder)


def test_bleu_is_sacrebleus() -> None:
    import sacrebleu

    hypotheses, references = ["ein hund rennt schnell weg.", "die katze"], ["ein hund rennt weg.", "die katze schläft."]
    assert bleu(hypotheses, references, "de") == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [references]).score / 100
    )
    assert bleu(references, references) == 1.0


def test_the_loss_and_accuracy_leave_padding_out() -> None:
    task = open_task("numerals")
    inputs, targets = task.shape.example(4)
    logits = torch.randn(4, task.shape.target, task.shape.classes)  # type: ignore[attr-defined]
    real = targets != IGNORED
    by_hand = torch.nn.functional.cross_entropy(logits[real], targets[real], label_smoothing=0.1)
    torch.testing.assert_close(task.loss(logits, targets, 0.1), by_hand)
    assert float(task.right(logits, targets)) == pytest.approx(
        float((logits.argmax(-1) == targets)[real].double().mean())
    )
    assert inputs.shape == (4, task.shape.source + task.shape.target)  # type: ignore[attr-defined]


def test_validation_bleu_is_computed_on_the_first_sentences_and_test_bleu_on_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = translation(folder, "scored=1")
    counts: list[int] = []

    def count(hypotheses: list[str], *_: Any) -> float:
        counts.append(len(hypotheses))
        return 0.0

    monkeypatch.setattr("attemper.lab.tasks.translation.bleu", count)
    model = build_model("seq2seq(depth=1, width=16, heads=2)", task.shape).eval()
    with torch.no_grad():
        for part in parts_of(task):
            task.measure(model, part)
    assert counts == [1, 1, 3]
