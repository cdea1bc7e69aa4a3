"""Parallel text on disk: two files with one sentence per line, line by line the same in two languages."""

from __future__ import annotations

import gzip
import io
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import UnreadableError
from attemper.files import read_bytes
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed
from attemper.lab.tasks.fingerprint import of_parts

MOST_BYTES = 2**31
"""Of a file of sentences, unpacked; they are held in memory."""
VALIDATION = ("val", "valid", "validation", "dev")
TEST = ("test", "test_2016_flickr", "test2016")
"""Names of parts, in the order in which they are looked for; the second of each kind of test set is Multi30k's."""


@dataclass(frozen=True)
class Corpus:
    """Sentences with their translations.

    name: where they come from, for people.
    """

    name: str
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: list[int]) -> Corpus:
        return Corpus(self.name, tuple(self.source[i] for i in indices), tuple(self.target[i] for i in indices))

    @property
    def fingerprint(self) -> str:
        return of_parts("\n".join(self.source), "\n".join(self.target))


@dataclass(frozen=True)
class Corpora:
    """The parts of a data set; a validation or test part that has no files of its own is None."""

    train: Corpus
    validation: Corpus | None
    test: Corpus | None

    @property
    def fingerprint(self) -> str:
        parts = (self.train, self.validation, self.test)
        return of_parts(*("none" if part is None else part.fingerprint for part in parts))


def read_corpora(folder: Path, source: str, target: str, test_file: str | None = None) -> Corpora:
    """The parts in a folder in the layout of Multi30k: train.en, train.de, val.en, val.de, test_2016_flickr.en …

    source, target: the endings of the files, a dot before them. Each file may be compressed, with .gz behind its name.
    test_file: name of the test set without ending; None: 'test', Multi30k's of 2016, or the one that there is.
    """
    if source == target:
        raise DataError(f"source and target are both '{source}'; they must be two endings, such as en and de.")
    validation = next((part for part in VALIDATION if find_part(folder, part, source, target)), None)
    test = _test_part(folder, source, target) if test_file is None else test_file
    return Corpora(
        read_corpus(folder, "train", source, target),
        None if validation is None else read_corpus(folder, validation, source, target),
        None if test is None else read_corpus(folder, test, source, target),
    )


def _test_part(folder: Path, source: str, target: str) -> str | None:
    """The test set that is meant where none was named."""
    for part in TEST:
        if find_part(folder, part, source, target):
            return part
    others = sorted({each.name.partition(".")[0] for each in folder.glob("test*") if each.is_file()})
    found = [part for part in others if find_part(folder, part, source, target)]
    if len(found) > 1:
        raise DataError(f"'{folder}' has {len(found)} test sets: {', '.join(found)}. Choose one: test_file={found[0]}.")
    return found[0] if found else None


def find_part(folder: Path, part: str, *languages: str) -> list[Path]:
    """The files of a part that are there, in any of the languages."""
    names = [f"{part}.{language}{packed}" for language in languages for packed in ("", ".gz")]
    return [folder / name for name in names if (folder / name).is_file()]


def read_corpus(folder: Path, part: str, source: str, target: str) -> Corpus:
    """One part: both of its files, which must have the same number of lines."""
    files = []
    for language in (source, target):
        found = find_part(folder, part, language)
        if not found:
            there = sorted(each.name for each in folder.iterdir() if each.is_file())
            has = f"It has: {', '.join(there[:12])}{', …' if len(there) > 12 else ''}" if there else "It has no files"
            raise DataError(f"'{folder}' has no '{part}.{language}' (nor '{part}.{language}.gz'). {has}.")
        files.append(found[0])
    texts = [read_lines(file) for file in files]
    if len(texts[0]) != len(texts[1]):
        raise DataError(
            f"'{files[0]}' has {len(texts[0]):,} lines and '{files[1].name}' has {len(texts[1]):,}; line by line they "
            "must be translations of each other."
        )
    return Corpus(f"{files[0].name} and {files[1].name}", texts[0], texts[1])


def read_lines(file: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 file, without spaces round them.

    Only line feeds end a line: other characters that Unicode counts as line ends occur inside of sentences, and would
    shift one side against the other.
    """
    lines = _contents(file).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1].strip():  # behind the last line feed
        lines.pop()
    if not lines:
        raise DataError(f"'{file}' is empty.")
    read, wrong = [], []
    for number, line in enumerate(lines, start=1):
        try:
            read.append(unicodedata.normalize("NFC", line.decode("utf-8").strip()))
        except UnicodeDecodeError as error:
            wrong.append(f"line {number:,} (byte 0x{line[error.start]:02x} after {error.start} bytes)")
    if wrong:
        raise DataError(
            f"{len(wrong):,} of {len(lines):,} lines of '{file}' are not UTF-8: {listed(wrong)}. Convert the file, "
            "such as by iconv -t utf-8."
        )
    return tuple(read)


def _contents(file: Path) -> bytes:
    try:
        data = read_bytes(file, most=MOST_BYTES)
        if file.suffix != ".gz":
            return data
        with gzip.open(io.BytesIO(data)) as packed:
            text = packed.read(MOST_BYTES + 1)
    except UnreadableError as error:
        raise DataError(str(error)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' cannot be read: {error}.") from None
    if len(text) > MOST_BYTES:
        raise DataError(f"'{file}' holds more than {MOST_BYTES:,} bytes of text, which is the most that is read.")
    return text
