"""What `attemper predict` does with a model that answers questions about images."""

from __future__ import annotations

import csv
import io
import json as json_module
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ParameterError, UnreadableError
from attemper.lab.cli.predicted_masks import SHOWN
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from attemper.lab.evaluation.trained import TrainedAnswerer

COLUMNS = ("file", "question", "answer", "probability")


@dataclass(frozen=True)
class Asked:
    """A question about an image. number: that of the question in its file, if it has one."""

    file: Path
    name: str
    text: str
    number: int | None = None


@dataclass(frozen=True)
class Answered:
    """An answer with its probability."""

    asked: Asked
    answer: str
    probability: float

    def to_dict(self) -> dict[str, Any]:
        """As an entry of VQAv2's results, with more than these ask for."""
        number = {} if self.asked.number is None else {"question_id": self.asked.number}
        about = {"file": self.asked.name, "question": self.asked.text}
        return {**number, **about, "answer": self.answer, "probability": round(self.probability, 6)}


def asked_of(folder: Path, files: Sequence[Path], question: str | None, questions: Path | None) -> list[Asked]:
    """One question about every image, or the questions of a file."""
    if (question is None) == (questions is None):
        raise ParameterError(
            "Say what is asked about the images: either --question TEXT, of all of them, or --questions FILE, a JSON "
            "file as of VQAv2."
        )
    if questions is not None:
        return _asked_in(questions, folder, files)
    text = (question or "").strip()
    if not text:
        raise ParameterError("--question is empty; it must be a question in words.")
    return [Asked(file, file.relative_to(folder).as_posix(), text) for file in files]


def _asked_in(questions: Path, folder: Path, files: Sequence[Path]) -> list[Asked]:
    """The questions of a file in VQAv2's layout, each about the image whose name ends with its number."""
    from attemper.lab.tasks.faults import Faults
    from attemper.lab.tasks.vqa.v2 import NO_FILE, by_number, read_questions

    faults = Faults()
    images, asked = by_number(files), []
    for number, image, text in read_questions(questions, faults):
        if (file := images.get(image)) is None:
            faults.add(NO_FILE, f"question_id {number}", f"image_id {image}")
        else:
            asked.append(Asked(file, file.relative_to(folder).as_posix(), text, number))
    faults.refuse(f"'{questions}'")
    return asked


def write_answers(
    answerer: TrainedAnswerer, asked: Sequence[Asked], out: Path | None, batch_size: int, *, json: bool
) -> int:
    """Answer every question, write the answers to `out`, and show the first ones."""
    from rich.progress import Progress

    where = console(json=json)
    if out is not None and (out.suffix.lower() not in (".csv", ".json") or out.is_dir()):
        raise ParameterError(f"--out is '{out}'; answers go into a file that ends with .csv or .json.")
    found: list[Answered] = []
    skipped: dict[str, None] = {}
    with Progress(console=where, transient=True, disable=not where.is_terminal) as bar:
        line = bar.add_task("answering", total=len(asked))
        for answered, bad in answers(answerer, asked, batch_size):
            found += answered
            skipped |= dict.fromkeys(bad)
            bar.advance(line, len(answered) + len(bad))
    if not found:
        raise UnreadableError(f"Of {counted(len(skipped), 'image')}, none can be decoded.")
    _show(where, found)
    _tell_unknown(where, answerer, asked)
    if skipped:
        names = [*skipped]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        say(where, f"note: skipped, since they cannot be decoded ({len(names)}): {', '.join(names[:5])}{more}")
    if out is not None:
        _write(out, found)
        say(where, f"Written: {out}")
    if json:
        about = {"run": str(answerer.path.parent), "recipe": answerer.spec.recipe, "skipped": [*skipped]}
        print_json({**about, "answers": [each.to_dict() for each in found]})
    return 0


def answers(
    answerer: TrainedAnswerer, asked: Sequence[Asked], batch_size: int
) -> Iterator[tuple[list[Answered], list[str]]]:
    """Of every batch the answers, and the names of images that cannot be decoded, one for each question."""
    import torch

    from attemper.lab.tasks.vqa.images import squeeze
    from attemper.lab.tasks.vqa.source import encoded
    from attemper.tempering.outputs import logits_of

    inputs, device = answerer.inputs, next(answerer.model.parameters()).device
    for start in range(0, len(asked), batch_size):
        known, bad, pixels = [], [], []
        for each in asked[start : start + batch_size]:
            try:
                pixels.append(squeeze(each.file, inputs.size))
                known.append(each)
            except UnreadableError:
                bad.append(each.name)
        if not known:
            yield [], bad
            continue
        words = torch.stack([encoded(each.text, inputs.vocabulary, inputs.length) for each in known])
        with torch.no_grad():
            x = inputs.to_input(torch.stack(pixels).to(device), words.to(device))
            logits = logits_of(answerer.model(x)).double()
        chances = logits.sigmoid() if inputs.several else logits.softmax(-1)
        best, places = chances.cpu().max(-1)
        pairs = zip(known, places.tolist(), best.tolist(), strict=True)
        yield [Answered(each, inputs.answers[place], chance) for each, place, chance in pairs], bad


def _tell_unknown(where: Any, answerer: TrainedAnswerer, asked: Sequence[Asked]) -> None:
    """A line about words that no training question has."""
    from attemper.lab.tasks.broken import listed
    from attemper.lab.tasks.vqa.source import words_of

    known = answerer.inputs.vocabulary.numbers
    texts = dict.fromkeys(each.text for each in asked)
    unknown = dict.fromkeys(word for text in texts for word in words_of(text) if word not in known)
    if unknown:
        say(where, f"note: the model does not know {counted(len(unknown), 'word')} of the questions: {listed(unknown)}")


def _write(out: Path, found: Sequence[Answered]) -> None:
    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors
    from attemper.lab.study.export import harmless

    if out.suffix.lower() == ".json":
        text = json_module.dumps([each.to_dict() for each in found], ensure_ascii=False, indent=0) + "\n"
    else:
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        for each in found:
            row = (each.asked.name, each.asked.text, each.answer)
            writer.writerow([*map(harmless, row), f"{each.probability:.6f}"])
        text = table.getvalue()
    with folder_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, text)


def _show(where: Any, found: Sequence[Answered]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "question", "answer", box=None, pad_edge=False)
    for each in found[:SHOWN]:
        answer = f"{each.answer} {100 * each.probability:.1f} %"
        table.add_row(escape(each.asked.name), escape(each.asked.text), escape(answer))
    where.print(table)
    if len(found) > SHOWN:
        say(where, f"… and {len(found) - SHOWN:,} more")
