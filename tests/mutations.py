"""Recipes and plans with mistakes in them: what a slip of the finger, a bad merge or an ill will make of real ones."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path

import yaml

import attemper
from attemper.errors import AttemperError
from attemper.lab.study.comparison import DEFAULT_PLAN
from attemper.lab.study.published import SCALES, catalogue

ROOT = Path(__file__).resolve().parents[1]
Mutation = Callable[[random.Random, str], str]


def real_recipes() -> list[str]:
    """Every recipe that the documentation writes, and every method by itself."""
    found = [method.name for method in attemper.list_methods()]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        found += re.findall(r"[`\"]([a-z]+(?:\([^`\"]*\))?(?: \+ [a-z]+(?:\([^`\"]*\))?)*)[`\"]", page.read_text())
    return [text for text in dict.fromkeys(found) if _is_recipe(text)]


def _is_recipe(text: str) -> bool:
    try:
        return bool(attemper.parse(text))
    except AttemperError:
        return False


def real_plans() -> list[str]:
    """The ready plans, those of the published studies and tables, and the embedded one."""
    files = [*sorted((ROOT / "plans").glob("*.yaml")), *sorted((ROOT / "docs" / "results").glob("*.yaml"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts += [
        yaml.safe_dump(table.plan(scale), sort_keys=False) for table in catalogue() if table.can_run for scale in SCALES
    ]
    return [embedded_plan(), *texts]


def embedded_plan() -> str:
    """The one whose data is always there."""
    return yaml.safe_dump(dict(DEFAULT_PLAN), sort_keys=False)


# ------------------------------------------------------------------------------------------------------ any text
STRANGE = [
    *"()[]{}<>=,+-*/:;#&!|%@?\\'\"`~^$ \t\n\r\x00\x07\x1b\x7f\x85\u2028\ufeff",
    *"é∞²٣０½⁇…−×\u202e\u200b\U0001f600\ud800",
    *("\x1b[31m", "..", "--", "\r\n", "%s", "{0}", "$(id)", "none", "null", "true", "nan", "inf", "-inf", "1e999"),
    *("0x10", "1_000", "1:30", "2026-11-16", "\\x00", "../../etc/passwd", "<script>", "__class__", "self"),
]
NUMBERS = [
    *("0", "-0", "-1", "1", "1.0", "2", "3.5", "1e-400", "1e308", "1e309", "-1e309", "9" * 19, "9" * 30, "9" * 5000),
    *("1" + "0" * 18, str(2**31), str(2**63), str(2**64), "0." + "3" * 400, "1e5", "1000000", "1000000000", "+7", "07"),
]


def _place(r: random.Random, text: str) -> int:
    return r.randint(0, len(text))


def change_a_character(r: random.Random, text: str) -> str:
    at = _place(r, text)
    return text[:at] + r.choice([*STRANGE, chr(r.randint(32, 126))]) + text[at + r.randint(0, 1) :]


def leave_out(r: random.Random, text: str) -> str:
    at = _place(r, text)
    return text[:at] + text[at + r.choice([1, 1, 2, 5, 20, 200]) :]


def cut(r: random.Random, text: str) -> str:
    return text[: _place(r, text)]


def repeat(r: random.Random, text: str) -> str:
    begin, end = sorted((_place(r, text), _place(r, text)))
    return text[:begin] + text[begin:end] * r.choice([2, 2, 3, 10, 100]) + text[end:]


def swap_words(r: random.Random, text: str) -> str:
    words = re.split(r"(\W+)", text)
    one, other = r.randrange(len(words)), r.randrange(len(words))
    words[one], words[other] = words[other], words[one]
    return "".join(words)


def take_a_word_twice(r: random.Random, text: str) -> str:
    words = re.split(r"(\W+)", text)
    words[r.randrange(len(words))] = r.choice(words)
    return "".join(words)


def change_a_number(r: random.Random, text: str) -> str:
    places = list(re.finditer(r"[0-9][0-9.e+-]*", text))
    if not places:
        return text + r.choice(NUMBERS)
    found = r.choice(places)
    grown = [found[0] + "0" * r.choice([1, 2, 3, 6, 9, 30]), "-" + found[0], found[0] * 2]
    return text[: found.start()] + r.choice(NUMBERS + grown) + text[found.end() :]


def nest(r: random.Random, text: str) -> str:
    at, depth = _place(r, text), r.choice([1, 2, 10, 100, 3000])
    opening, closing = r.choice(["()", "[]", "{}", ("[", ""), ("(", ""), ("{", ""), ("", "]"), ("- ", ""), ("!", "")])
    return text[:at] + opening * depth + r.choice(["", "0.1", text[at : at + 10]]) + closing * depth + text[at:]


def turn_round(r: random.Random, text: str) -> str:
    return r.choice([text[::-1], text.upper(), text.swapcase(), text.replace(" ", ""), text.replace(" ", "\u00a0")])


def flip_a_bit(r: random.Random, text: str) -> str:
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data:
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)
    return data.decode("utf-8", "surrogateescape")


ANY: list[Mutation] = [
    change_a_character, leave_out, cut, repeat, swap_words, take_a_word_twice, change_a_number, change_a_number,
    nest, turn_round, flip_a_bit,
]  # fmt: skip


# ------------------------------------------------------------------------------------------------- recipes and plans
def long_list(r: random.Random, text: str) -> str:
    values = ", ".join(["0.1"] * r.choice([2, 50, 3000]))
    return r.choice([f"dropkey(schedule=[{values}])", f"{text} + dropattention(schedule=[{values}])", f"[{values}]"])


def grid(r: random.Random, text: str) -> str:
    values = "{" + ", ".join(map(str, range(1, r.choice([2, 12, 1200])))) + "}"
    return re.sub(r"[0-9][0-9.e-]*", lambda _: values, text, count=r.choice([1, 3]))


VALUES = [
    *("true", "false", "none", "all", "[]", "[[]]", "[0, 1]", "[0.5]", "[1, 2, 3]", "[none]", "block", "2d", "heads"),
    *("0.5", "[3, 3]", "[1, 4]", "3", "5", "99999999", "[100000, 100000]"),
]


def set_a_field(r: random.Random, text: str) -> str:
    method = r.choice(attemper.list_methods())
    fields = [field.name for field in dataclasses.fields(method)]
    chosen = r.sample(fields, r.randint(1, min(3, len(fields))))
    given = ", ".join(f"{name}={r.choice(VALUES + NUMBERS)}" for name in chosen)
    return r.choice([f"{method.name}({given})", f"{text} + {method.name}({given})"])


RECIPE: list[Mutation] = [*ANY, long_list, grid, set_a_field, set_a_field]

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{two}'] * 9)}]\n" for one, two in zip("bcdefghi", "abcdefgh", strict=True)
)
SCRAPS = [
    *("- [", "? x", ": y", "<<: *none", "&a", "*a", "!!int abc", "!!python/object/apply:os.system [id]", "!!binary x"),
    *("!!timestamp x", "!!bool maybe", "!!float two", "!!set {a, b}", "!!omap [a: 1]", "!!null x", "%YAML 9.9", "---"),
    *(
        "...",
        "--- !!str",
        "\t- tab",
        "|\n  block",
        ">-\n  folded",
        "{a: {b: {c: 1}}}",
        "[1, [2, [3]]]",
        "~",
        "''",
        '""',
    ),
    *("2026-11-16", "2026-99-99", "12:30:45", "0o17", "0b101", ".inf", "-.inf", ".nan", "1e3", "1e-400", "yes", "no"),
]


def change_a_value(r: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at = r.randrange(len(lines))
    lines[at] = re.sub(r"(:|-) .*", lambda found: f"{found[1]} {r.choice(SCRAPS + NUMBERS + STRANGE)}", lines[at])
    return "".join(lines)


def move_a_line(r: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    line = lines.pop(r.randrange(len(lines)))
    lines.insert(r.randint(0, len(lines)), r.choice(["", " ", "  ", "\t", "- "]) + line)
    return "".join(lines)


def take_a_line_twice(r: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at = r.randrange(len(lines))
    return "".join([*lines[:at], *[lines[at]] * r.choice([2, 3, 2000]), *lines[at + 1 :]])


def put_a_bomb(r: random.Random, text: str) -> str:
    name = r.choice("abcdefghi")
    return r.choice(
        [BOMB + text, BOMB + f"recipes: *{name}\n", f"{text}\n{BOMB}seeds: *{name}\n", f"x: &x [*x]\n{text}"]
    )


def many_of_something(r: random.Random, text: str) -> str:
    many = r.choice([30, 300, 3000])
    return r.choice(
        [
            re.sub(r"(?m)^seeds: .*", f"seeds: [{', '.join(map(str, range(many)))}]", text),
            re.sub(r"(?m)^seeds: .*", f"seeds: {r.choice(NUMBERS)}", text),
            text + "".join(f"- dropkey({at / 10000})\n" for at in range(1, many)),
            re.sub(r"(?m)^title: .*", f"title: {'long ' * many}", text),
            re.sub(r"epochs: .*", f"epochs: {r.choice(NUMBERS)}", text),
            re.sub(r"batch_size: .*", f"batch_size: {r.choice(NUMBERS)}", text),
        ]
    )


def another_recipe(r: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    places = [at for at, line in enumerate(lines) if line.lstrip().startswith("- ")]
    if not places:
        return text
    at = r.choice(places)
    recipe = mutated(r, r.choice(_recipes()), RECIPE).replace("\n", " ")
    lines[at] = lines[at].partition("- ")[0] + f"- {recipe!r}\n"
    return "".join(lines)


PLAN: list[Mutation] = [
    *ANY, change_a_value, change_a_value, move_a_line, take_a_line_twice, put_a_bomb, many_of_something, another_recipe,
    another_recipe,
]  # fmt: skip

_cache: list[str] = []


def _recipes() -> list[str]:
    _cache[:] = _cache or real_recipes()
    return _cache


def mutated(r: random.Random, text: str, mutations: list[Mutation]) -> str:
    """A text after one to four changes."""
    for _ in range(r.choice([1, 1, 1, 2, 3, 4])):
        text = r.choice(mutations)(r, text)
    return text


def mutated_recipes(count: int, seed: int = 0) -> list[str]:
    """The same ones for a seed, on every machine."""
    r = random.Random(f"recipes {seed}")
    return [mutated(r, r.choice(_recipes()), RECIPE) for _ in range(count)]


def mutated_plans(count: int, seed: int = 0) -> list[str]:
    """The same ones for a seed, on every machine. Two of three are made of the plan whose data is always there."""
    r, plans, embedded = random.Random(f"plans {seed}"), real_plans(), embedded_plan()
    return [mutated(r, r.choice([r.choice(plans), embedded, embedded]), PLAN) for _ in range(count)]
