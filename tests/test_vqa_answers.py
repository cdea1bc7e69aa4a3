"""Answers to questions: compared and scored as VQAv2's evaluation does it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.lab.tasks.vqa.answers import CONTRACTIONS, AnswerBook, agreement, commonest, normalised, vqa_accuracy

ANSWERS = st.sampled_from(["yes", "no", "2", "two", "a dog", "dog", "The dog.", "isnt", "isn't", "black/white", "x"])


def over_all_subsets(agrees: Sequence[bool]) -> float:
    """The metric as its paper has it: min(agreeing / 3, 1), averaged over all ways to leave one person out."""
    scores = [min(sum(others) / 3, 1.0) for others in itertools.combinations(agrees, len(agrees) - 1)]
    return sum(scores) / len(scores)


@given(st.lists(st.booleans(), min_size=2, max_size=12))
def test_agreement_is_the_mean_over_all_subsets_without_one_person(agrees: list[bool]) -> None:
    assert agreement(sum(agrees), len(agrees)) == pytest.approx(over_all_subsets(agrees), abs=1e-12)


@settings(deadline=None)
@given(ANSWERS, st.lists(ANSWERS, min_size=2, max_size=10))
def test_people_who_do_not_agree_are_compared_in_normal_form_and_others_word_by_word(
    answer: str, people: list[str]
) -> None:
    same = len(set(people)) == 1
    agrees = [each == answer if same else normalised(each) == normalised(answer) for each in people]
    assert vqa_accuracy(answer, people) == pytest.approx(over_all_subsets(agrees), abs=1e-12)


@settings(deadline=None)
@given(st.lists(ANSWERS, min_size=1, max_size=12), st.lists(ANSWERS, min_size=1, max_size=10))
def test_a_book_scores_each_of_its_answers_as_the_metric_does(known: list[str], people: list[str]) -> None:
    book = AnswerBook.of(known)
    found = book.scores(people)
    for number, answer in enumerate(book.answers):
        assert found.get(number, 0.0) == pytest.approx(vqa_accuracy(answer, people), abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("A dog", "dog"),
        ("the  Two an", "2"),
        ("none", "0"),
        ("ten.", "10"),
        ("3.5", "3.5"),
        ("3.", "3"),
        (".5", ".5"),
        ("1,000", "1000"),
        ("yes, sir", "yes sir"),
        ("yes,sir", "yes sir"),
        ("red-blue", "red blue"),
        ("red - blue", "red blue"),
        ("it's 5:30?", "it's 5:30"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("y'alld've", "y'all'd've"),
        ("ow's'at", "'ow's'at"),
        ("somebody'd", "somebodyd"),
        ("its", "its"),
    ],
)
def test_answers_have_the_normal_form_of_the_published_evaluation(answer: str, form: str) -> None:
    assert normalised(answer) == form


def test_contractions_differ_from_what_they_stand_for_by_one_apostrophe() -> None:
    assert len(CONTRACTIONS) > 100
    for short, whole in CONTRACTIONS.items():
        longer, shorter = (whole, short) if len(whole) > len(short) else (short, whole)
        assert any(longer[:at] + longer[at + 1 :] == shorter for at, sign in enumerate(longer) if sign == "'")


def test_the_commonest_answer_is_the_first_of_equals() -> None:
    assert commonest(["b", " a", "a\n", "b", "c"]) == "b"


def test_a_book_has_the_most_frequent_answers_in_an_order_that_does_not_depend_on_the_file() -> None:
    answers = ["b", "a", "a", "c", "b", "d"]
    assert AnswerBook.of(answers, 3).answers == AnswerBook.of(reversed(answers), 3).answers == ("a", "b", "c")
