"""Recipes: text ⇄ methods, and errors that point at the column."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attemper
from attemper.errors import AttemperError, ConflictError, ParameterError, RecipeError, UnknownMethodError
from attemper.methods import DropAttention, DropKey, Method
from attemper.methods.base import Paper
from attemper.methods.registry import methods_by_name
from attemper.recipe import as_methods, parse, render

# Text ⇄ methods.

RATES = st.floats(0, 1, exclude_max=True)


def scheduled():
    schedules = st.sampled_from(["constant", "decreasing", "increasing"]) | st.lists(RATES, max_size=4)
    return {"p": RATES, "schedule": schedules, "match": st.sampled_from(["max", "mean"])}


def dropkeys():
    structured = st.fixed_dictionaries(
        {**scheduled(), "structure": st.sampled_from(["block", "cross"])},
        optional={
            "share": st.sampled_from(["none", "queries", "heads"]),
            "w": st.none() | st.sampled_from([1, 3, 5]),
            "grid": st.none() | st.tuples(st.integers(5, 99), st.integers(5, 99)),
            "prefix": st.none() | st.integers(0, 9),
        },
    )
    plain = st.fixed_dictionaries(scheduled(), optional={"share": st.sampled_from(["none", "queries", "heads"])})
    return (structured | plain).map(lambda parameters: DropKey(**parameters))


def dropattentions():
    rescaling = st.sampled_from([{}, {"rescale": "normalize", "detach": True}, {"rescale": "normalize"}])
    units = st.just({}) | st.builds(lambda w: {"unit": "column", "w": w}, st.integers(1, 50))
    parameters = st.builds(lambda a, b, c: {**a, **b, **c}, st.fixed_dictionaries(scheduled()), rescaling, units)
    return parameters.map(lambda given: DropAttention(**given))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(dropkeys() | dropattentions(), max_size=3))
def test_what_is_rendered_reads_back_the_same(methods):
    text = render(methods)
    assert parse(text) == methods
    assert render(parse(text)) == text
    assert parse(text.replace(" ", "")) == methods
    assert parse(text.replace("(", " (\n\t").replace(",", " , ").replace("=", " = ")) == methods


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("none", []),
        ("  none ", []),
        ("dropkey", [DropKey()]),
        ("dropkey()", [DropKey()]),
        ("dropkey(0.2)", [DropKey(0.2)]),
        ("dropkey(p=0.2)", [DropKey(0.2)]),
        ("dropkey(0)", [DropKey(0.0)]),
        ("dropkey(.5)", [DropKey(0.5)]),
        ("dropkey(1e-3)", [DropKey(0.001)]),
        ("dropkey(+2.5E-01)", [DropKey(0.25)]),
        ("dropkey(0.1,)", [DropKey(0.1)]),
        ("dropkey(0.1, share=heads)", [DropKey(0.1, share="heads")]),
        ("dropkey(share=heads, p=0.2)", [DropKey(0.2, share="heads")]),
        ("dropkey(share=none)", [DropKey()]),
        ("dropkey(schedule=[0.1, 2e-1, 0])", [DropKey(schedule=(0.1, 0.2, 0.0))]),
        ("dropkey(schedule=[])", [DropKey(schedule=())]),
        ("dropkey(structure=block, w=none, grid=[4, 6])", [DropKey(structure="block", grid=(4, 6))]),
        ("dropkey(structure=cross,prefix=1)", [DropKey(structure="cross", prefix=1)]),
        ("dropattention(0.1, rescale=normalize, detach=true)", [DropAttention(0.1, detach=True, rescale="normalize")]),
        ("dropattention(0.1, detach=false)", [DropAttention(0.1)]),
        ("dropkey+dropattention", [DropKey(), DropAttention()]),
        ("\tdropkey ( 0.2 )\n+ dropattention( 0.3 ) ", [DropKey(0.2), DropAttention(0.3)]),
    ],
)
def test_text_is_read(text, methods):
    assert parse(text) == methods


def test_values_keep_their_types():
    (method,) = parse("dropattention(0, unit=column, w=3, rescale=normalize, detach=true)")
    assert type(method.p) is float
    assert type(method.w) is int
    assert method.detach is True


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ([], "none"),
        ([DropKey()], "dropkey(0.1)"),
        ([DropKey(0.2), DropAttention(0.3)], "dropkey(0.2) + dropattention(0.3)"),
        ([DropKey(1e-7, schedule=[0.1, 0])], "dropkey(1e-07, schedule=[0.1, 0.0])"),
        ([DropKey(structure="block", grid=(4, 6), prefix=0)], "dropkey(0.1, structure=block, grid=[4, 6], prefix=0)"),
        (
            [DropAttention(unit="column", w=2, detach=True, rescale="normalize")],
            "dropattention(0.1, unit=column, w=2, rescale=normalize, detach=true)",
        ),
    ],
)
def test_text_is_written_with_what_differs_from_the_defaults(methods, text):
    assert render(methods) == text
    assert " + ".join(map(str, methods)) == (text if methods else "")


def test_a_function_cannot_be_written_in_a_recipe():
    with pytest.raises(ParameterError, match="function cannot be written in a recipe"):
        render([DropKey(schedule=lambda l, L: 0.1)])


# Errors: each with its message, and the caret below the right character.

PARAMETERS = "p, schedule, match, share, structure, w, grid, prefix"
ERRORS = {
    "unknown method": ("dropkye(0.1)", 0, r"unknown method 'dropkye'\. Did you mean 'dropkey'\? Methods: dropkey, "),
    "capitals": ("DropKey(0.1)", 0, "Did you mean 'dropkey'"),
    "unknown second method": ("dropkey + dropatention", 10, "Did you mean 'dropattention'"),
    "nothing near": ("xyz", 0, r"unknown method 'xyz'\. Methods: dropkey"),
    "unknown parameter": ("dropkey(0.1, shedule=constant)", 13, "no parameter 'shedule'. Did you mean 'schedule'"),
    "far parameter": ("dropkey(qqq=1)", 8, rf"dropkey has no parameter 'qqq'\. Parameters: {PARAMETERS}"),
    "positional second": ("dropkey(0.1, heads)", 13, "only the first argument may go without its name"),
    "positional last": ("dropkey(share=heads, 0.1)", 21, "only the first argument may go without its name"),
    "given twice": ("dropkey(w=1, w=3)", 13, "'w' is given twice"),
    "given twice by place": ("dropkey(0.1, p=0.2)", 13, "'p' is given twice"),
    "rate out of range": ("dropkey(0.1) + dropattention(1.5)", 15, r"dropattention: p must be .* got 1\.5"),
    "negative rate": ("dropkey(-0.1)", 0, r"dropkey: p must be a number in \[0, 1\), got -0\.1"),
    "wrong word": ("dropkey(share=all)", 0, "share must be one of none, queries, heads; got 'all'"),
    "word for a rate": ("dropkey(high)", 0, "p must be a number .* got 'high'"),
    "number for a boolean": ("dropattention(detach=1)", 0, "detach must be true or false"),
    "number for a grid": ("dropkey(structure=block, grid=14)", 0, "grid must be"),
    "list with a word": ("dropkey(schedule=[0.1, up])", 0, r"schedule\[1\] must be a number"),
    "not closed": ("dropkey(0.1", 11, r"expected '\)', found the end"),
    "nothing in the bracket": ("dropkey(", 8, "found the end"),
    "list not closed": ("dropkey(schedule=[0.1", 21, r"expected '\]', found the end"),
    "list closed wrongly": ("dropkey(schedule=[0.1)", 21, r"expected '\]', found '\)'"),
    "no comma": ("dropkey(0.1 share=heads)", 12, r"expected '\)', found 'share'"),
    "no value": ("dropkey(p=)", 10, r"expected a number, a word or a list, found '\)'"),
    "empty first argument": ("dropkey(, share=heads)", 8, "expected a number, a word or a list, found ','"),
    "no plus": ("dropkey dropattention", 8, "expected '\\+' or the end, found 'dropattention'"),
    "plus at the end": ("dropkey +", 9, "expected the name of a method"),
    "plus at the start": (" + dropkey", 1, "expected the name of a method"),
    "two plusses": ("dropkey + + dropkey", 10, "expected the name of a method"),
    "number for a method": ("0.1", 0, "expected the name of a method"),
    "none with others": ("dropkey + none", 10, "'none' is the empty recipe and stands alone"),
    "none first": ("none + dropkey", 0, "'none' is the empty recipe and stands alone"),
    "strange character": ("dropkey(0.1) & dropattention", 13, "'&' cannot stand here"),
    "strange quote": ("dropkey(share='heads')", 14, "''' cannot stand here"),
    "number that is none": ("dropkey(0.1.2)", 8, "'0' cannot stand here"),
    "number with letters": ("dropkey(p=1x)", 10, "'1' cannot stand here"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_is_wrong_and_points_at_the_column(name):
    text, column, message = ERRORS[name]
    with pytest.raises(RecipeError, match=message) as caught:
        parse(text)
    first, shown, caret = str(caught.value).rsplit("\n", 2)
    assert first.endswith(f"(column {column + 1})")
    assert shown == f"  {text}"
    assert caret == f"  {' ' * column}^"
    assert isinstance(caught.value, UnknownMethodError) == ("unknown method" in first)


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_the_empty_text_is_refused(text):
    with pytest.raises(RecipeError, match="write 'none' for no method"):
        parse(text)


@pytest.mark.parametrize("text", [None, 0.1, DropKey(), ["dropkey"]], ids=str)
def test_only_text_is_parsed(text):
    with pytest.raises(RecipeError, match="a recipe is a text such as"):
        parse(text)


# Recipes in other forms.


def test_a_recipe_may_be_text_a_method_or_several():
    expected = [DropKey(0.2), DropAttention(0.3)]
    for recipe in ("dropkey(0.2) + dropattention(0.3)", expected, tuple(expected)):
        assert as_methods(recipe) == expected
    assert as_methods(DropKey(0.2)) == [DropKey(0.2)]
    assert as_methods("none") == as_methods([]) == []


@pytest.mark.parametrize("recipe", [["dropkey"], [DropKey(), None], [DropKey], 5, None], ids=str)
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(RecipeError, match="a recipe is text, a method or a sequence of methods"):
        as_methods(recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        "dropkey(0.1) + dropattention + dropkey(0.2)",
        [DropKey(0.1), DropKey(0.1)],
        [DropKey(schedule=lambda l, L: 0.1), DropKey()],
    ],
    ids=["text", "methods", "a schedule that has no text"],
)
def test_the_same_method_twice_is_a_conflict(recipe):
    with pytest.raises(ConflictError, match="'dropkey' stands 2 times"):
        as_methods(recipe)


# Methods of other packages.


@dataclasses.dataclass(frozen=True)
class Calm(Method):
    """A method of another package."""

    name: ClassVar[str] = "calm"
    summary: ClassVar[str] = "does nothing, calmly"
    paper: ClassVar[Paper] = Paper("Calm", "2026")

    strength: float = 1.0
    fast: bool = False


@dataclasses.dataclass(frozen=True)
class Impostor(DropKey):
    """Claims the name of another method."""


@pytest.fixture
def registered(monkeypatch):
    """Puts one object behind the entry point `attemper.methods`."""

    def register(thing):
        class Entry:
            name = "thing"

            def load(self):
                return thing

        def entry_points(*, group):
            return [Entry()] if group == "attemper.methods" else []

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        methods_by_name.cache_clear()

    yield register
    monkeypatch.undo()
    methods_by_name.cache_clear()


def test_a_registered_method_works_in_recipes(registered):
    registered(Calm)
    assert parse("dropkey + calm(2, fast=true)") == [DropKey(), Calm(2, fast=True)]
    assert render([Calm(0.5, fast=True)]) == "calm(0.5, fast=true)"
    assert attemper.list_methods()[:2] == [DropKey, DropAttention]
    assert attemper.list_methods()[-1] is Calm
    with pytest.raises(UnknownMethodError, match=r"Did you mean 'calm'\? Methods: dropkey, .*, calm"):
        parse("clam")
    with pytest.raises(RecipeError, match="Did you mean 'strength'"):
        parse("calm(strenght=1)")


def test_without_registration_it_is_unknown():
    methods_by_name.cache_clear()
    with pytest.raises(UnknownMethodError, match="unknown method 'calm'"):
        parse("calm")


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (int, "entry point 'thing' of attemper.methods is no Method"),
        (Calm(), "entry point 'thing' of attemper.methods is no Method"),
        (Impostor, "names 'dropkey', which exists"),
    ],
    ids=["another class", "an instance", "a name that exists"],
)
def test_a_wrong_registration_is_named(registered, thing, message):
    registered(thing)
    with pytest.raises(AttemperError, match=message):
        parse("dropkey")
