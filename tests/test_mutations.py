"""Recipes and plans with mistakes in them, thousands in one process: a line or two for each, and in a moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from damage import told
from mutations import mutated_plans, mutated_recipes, real_plans, real_recipes

MANY = 2000
FEW = 60
LONGEST = 2.0
"""Seconds of processor time: others may be at work on the machine."""
MOST_LINES = 12
"""A message, the place that it points at, and as many for each of a few recipes that do not fit."""

few, many = pytest.param(FEW, id="few"), pytest.param(MANY, marks=pytest.mark.slow, id="many")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to be in, and everything imported that a check needs."""
    folder = tmp_path_factory.mktemp("mutations")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ATTEMPER_DATA", raising=False)
        assert told(["plan", "check"])[0] == 0
        yield folder


def check_words(words: list[str], text: str) -> int:
    begun = time.process_time()
    code, out, err = told(words)  # whatever is raised fails the test here
    spent = time.process_time() - begun
    assert code in (0, 2), text
    assert "Traceback" not in out + err, text
    assert spent < LONGEST, (spent, text[:500])
    assert err.count("\n") <= MOST_LINES, (err, text[:500])
    assert not any(sign != "\n" and not sign.isprintable() for sign in err), (err, text[:500])
    if code == 2:
        assert err.strip(), text
    return code


@pytest.mark.parametrize("count", [few, many])
def test_a_mutated_recipe_is_read_or_refused_in_a_moment(count: int, ready: Path) -> None:
    codes = [check_words(["plan", "check", "--recipes", text], text) for text in mutated_recipes(count)]
    assert 0.7 * count < codes.count(2) < count, "some are still recipes, most are not"


@pytest.mark.parametrize("count", [few, many])
def test_a_mutated_plan_is_read_or_refused_in_a_moment(count: int, ready: Path) -> None:
    codes = []
    for text in mutated_plans(count):
        (ready / "plan.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        codes.append(check_words(["plan", "check", "plan.yaml"], text))
    assert 0.7 * count < codes.count(2) < count, "some are still plans, most are not"
    assert [each.name for each in ready.iterdir()] == ["plan.yaml"], "nothing is written"


def test_what_is_mutated_is_real() -> None:
    recipes, plans = real_recipes(), real_plans()
    assert len(recipes) > 60
    assert len(plans) > 20
    for method in ("dropkey", "blur", "explicit", "graying", "skipless", "arora", "hardmask", "cb", "consistency"):
        assert any(text.startswith(method) for text in recipes), method


ABSURD = {
    "5,000 digits": ("dropkey(0." + "1" * 5000 + ")", "a number has at most 100 characters"),
    "a large number": ("hardmask(0.1, k=99999999999999999999)", "too large for a number"),
    "3,000 brackets": ("dropkey(schedule=" + "[" * 3000, "at most 8 deep"),
    "20,000 characters": ("dropkey(" + " " * 20_000 + "0.1)", "at most 10,000 are read"),
    "a wide blur": ("blur(1.0, w=99999999)", "w must be at most 1023"),
    "a strong penalty": ("explicit(v=1e18, ff=1000000000000000001)", "at most 1e+18"),
    "a million recipes": ("dropkey({" + ", ".join(["0.1"] * 1001) + "})", "at most 1,000 are run"),
    "a grid of grids": ("+".join(["cb({a, b})"] * 400), "stands for billions of recipes"),
    "an escape sequence": ("\x1b[31mdropkey", "'�' cannot stand here"),
    "a size that is a number": ("blur(grid=2d, size=3)", "size must be [rows, columns]"),
    "blocks that are a share": ("skipless(attention, blocks=0.5)", "blocks must be a list of block indices"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_recipe_is_refused_with_the_limit(case: str, ready: Path) -> None:
    recipe, words = ABSURD[case]
    code, _, err = told(["plan", "check", "--recipes", recipe])
    assert code == 2
    assert any(each in err for each in words.split("|")), err
    assert max(map(len, err.splitlines())) < 600


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def plan(task: str = "digits", model: str = "vit-digits", recipes: str = "[cb]") -> str:
    return f"task: {task}\nmodel: {model}\nrecipes: {recipes}\n"


PLANS = {
    "an alias bomb": (f"{BOMB}recipes: *i", "more than 20,000 values"),
    "a plan in itself": ("task: &t [*t]", "contains itself, or is nested too deeply"),
    "3,000 brackets": ("task: " + "[" * 3000, "at most 50 brackets"),
    "3,000 lists": ("- " * 3000, "nested too deeply"),
    "a large file": ("task: digits\n#" + "x" * 300_000, "more than 262,144 bytes"),
    "a date that is none": ("title: 2026-99-99", "is no timestamp"),
    "a number that is none": ("seeds: !!int many", "is no int"),
    "a flag that is none": ("seeds: !!bool many", "is no bool"),
    "a command": ("seeds: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a key that is a list": ("[1, 2]: 3", "a key must be a word"),
    "a million seeds": (f"{plan()}seeds: 1000000", "at most 1,000 seeds"),
    "more seeds": (f"{plan()}seeds: {'9' * 4000}", "at most 1,000 seeds"),
    "a large seed": (f"{plan()}seeds: [{2**63}]", "seeds is"),
    "many recipes": (plan(recipes="\n" + "- cb\n" * 1001), "recipes has 1,001 of them; a plan has at most 1,000"),
    "many runs": (
        plan(recipes="['dropkey({" + ", ".join(f"0.{at:04}" for at in range(1, 61)) + "})']") + "seeds: 1000",
        "stands for 61,000 runs",
    ),
    "many rates": (f"{plan()}lr: [{', '.join(f'{at}e-6' for at in range(1, 200))}]", "at most 100"),
    "many epochs": (f"{plan()}budget: {{epochs: 9999999}}", "epochs is 9999999; it must be at most 1,000,000"),
    "a large batch": (f"{plan()}budget: {{batch_size: 9999999}}", "batch_size is 9999999; it must be at most"),
    "a long title": (f"{plan()}title: {'x' * 2000}", "title has 2,000 characters; it must have at most 1,000"),
    "a wide model": (plan(model="vit-digits(width=65536)"), "weights|memory of this machine"),
    "a deep model": (plan(model="vit-digits(depth=1000000)"), "depth is 1000000; it must be at most 1,000"),
    "large images": (plan("noise(size=100000)"), "size is 100000; it must be at most 8,192"),
    "many images": (plan("noise(train=99999999999)"), "train is 99999999999; it must be at most"),
    "a long model": (plan(model="x" * 5000), "model has 5,000 characters"),
    "a nested model": (plan(model=f"vit-digits(a={'(' * 300})"), "cannot be read"),
    "a wide border": (f"{plan()}budget: {{augment: crop-flip(99999999)}}", "pad is 99999999; it must be"),
}


@pytest.mark.parametrize("case", PLANS)
def test_an_absurd_plan_is_refused_with_the_limit(case: str, ready: Path) -> None:
    text, words = PLANS[case]
    (ready / "plan.yaml").write_text(text)
    assert check_words(["plan", "check", "plan.yaml"], text) == 2
    _, _, err = told(["plan", "check", "plan.yaml"])
    assert any(each in err for each in words.split("|")), err
