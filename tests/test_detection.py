"""Average precision per step and of segments, against scikit-learn and against an implementation written apart."""

from __future__ import annotations

import numpy as np
import pytest

from attemper.lab.tasks.actions.detection import (
    OVERLAPS,
    MeanPrecision,
    Segments,
    average_precision,
    find_segments,
    per_frame_map,
    segment_map,
    temporal_overlap,
)


# ------------------------------------------------------------------------------------------------------------ per step
@pytest.mark.parametrize("seed", range(20))
def test_per_frame_map_is_scikit_learns_average_precision_per_class(seed: int) -> None:
    from sklearn.metrics import average_precision_score

    draw = np.random.default_rng(seed)
    steps, classes = int(draw.integers(5, 300)), 6
    scores = draw.random((steps, classes))
    if seed % 2:
        scores = scores.round(1)  # many ties
    labels = draw.random((steps, classes)) < draw.random(classes)  # several per step, some rare
    labels[:, 0] = False  # and one that never occurs
    ignored = draw.random(steps) < 0.2
    found = per_frame_map(scores, labels, ignored)
    kept = ~ignored
    for c in range(classes):
        if labels[kept, c].any():
            assert found.classes[c] == pytest.approx(average_precision_score(labels[kept, c], scores[kept, c]))
        else:
            assert found.classes[c] is None
    known = [value for value in found.classes if value is not None]
    assert found.mean == pytest.approx(np.mean(known) if known else None)


def test_ignored_steps_change_nothing_however_they_are_scored_and_labelled() -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.random((50, 3)), draw.random((50, 3)) < 0.3
    ignored = np.arange(50) % 5 == 0
    other_scores, other_labels = scores.copy(), labels.copy()
    other_scores[ignored], other_labels[ignored] = 1.0, True
    assert per_frame_map(scores, labels, ignored) == per_frame_map(other_scores, other_labels, ignored)


def test_nothing_to_find_has_no_average_precision() -> None:
    assert average_precision(np.zeros(3), np.zeros(3, dtype=bool)) is None
    assert MeanPrecision((None, None)).mean is None
    assert MeanPrecision((None, 0.5, 0.25)).mean == 0.375


def test_scores_and_labels_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores are \(3, 2\) and labels \(3, 1\)"):
        per_frame_map(np.zeros((3, 2)), np.zeros((3, 1), dtype=bool))


# ------------------------------------------------------------------------------------------------------------ segments
Row = tuple[float, ...]


def overlap_of(a: Row, b: Row) -> float:
    shared = max(0.0, min(a[2], b[2]) - max(a[1], b[1]))
    union = (a[2] - a[1]) + (b[2] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def precision_by_hand(predictions: list[Row], truth: list[Row], label: int, overlap: float) -> float | None:
    """Prediction by prediction, and the curve point by point: slow, and without anything of ours."""
    real = [row for row in truth if row[3] == label]
    if not real:
        return None
    mine = sorted((row for row in predictions if row[3] == label), key=lambda row: -row[4])  # sorted() is stable
    taken: set[int] = set()
    points = []
    for count, row in enumerate(mine, start=1):
        best, best_overlap = None, overlap
        for index, other in enumerate(real):
            if other[0] == row[0] and index not in taken:
                value = overlap_of(row, other)
                if value > best_overlap or (value == best_overlap and best is None):
                    best, best_overlap = index, value
        if best is not None:
            taken.add(best)
        points.append((len(taken) / len(real), len(taken) / count))
    area, reached = 0.0, 0.0
    for recall, _ in points:
        if recall > reached:
            area += (recall - reached) * max(precision for r, precision in points if r >= recall)
            reached = recall
    return area


def random_case(seed: int) -> tuple[list[Row], list[Row], int]:
    draw = np.random.default_rng(seed)
    classes, videos = int(draw.integers(1, 5)), int(draw.integers(1, 4))

    def rows(count: int, scored: bool) -> list[Row]:
        out: list[Row] = []
        for _ in range(count):
            start = float(draw.integers(0, 12))  # whole numbers: equal overlaps, and overlaps on the threshold
            length = float(draw.choice([0, 1, 2, 3, 5, 10]))  # some without any length
            row: Row = (int(draw.integers(videos)), start, start + length, int(draw.integers(classes)))
            out.append((*row, float(draw.integers(0, 4)) / 4) if scored else row)  # few different scores: ties
        return out

    return rows(int(draw.integers(0, 30)), True), rows(int(draw.integers(0, 12)), False), classes


def test_segment_map_is_that_of_an_independent_implementation_on_200_random_cases() -> None:
    seen = {"ties": 0, "empty classes": 0, "no length": 0, "nothing predicted": 0, "right": 0}
    for seed in range(200):
        predictions, truth, classes = random_case(seed)
        found = segment_map(Segments.of(predictions), Segments.of(truth), classes)
        for overlap in OVERLAPS:
            for label in range(classes):
                expected = precision_by_hand(predictions, truth, label, overlap)
                assert found[overlap].classes[label] == pytest.approx(expected), (seed, overlap, label)
                seen["empty classes"] += expected is None
                seen["right"] += bool(expected)
        seen["ties"] += len({row[4] for row in predictions}) < len(predictions)
        seen["no length"] += any(row[1] == row[2] for row in (*predictions, *truth))
        seen["nothing predicted"] += not predictions
    assert all(count > 3 for count in seen.values()), seen


def test_a_second_prediction_of_the_same_segment_is_wrong() -> None:
    truth = Segments.of([(0, 0, 10, 0)])
    twice = Segments.of([(0, 0, 10, 0, 0.9), (0, 0, 10, 0, 0.8)])
    assert segment_map(twice, truth, 1)[0.5].mean == 1.0  # after full recall nothing is lost any more
    wrong_first = Segments.of([(0, 20, 30, 0, 0.9), (0, 0, 10, 0, 0.8)])
    assert segment_map(wrong_first, truth, 1)[0.5].mean == 0.5
    two = Segments.of([(0, 0, 10, 0), (0, 50, 60, 0)])
    assert segment_map(twice, two, 1)[0.5].mean == 0.5


def test_a_segment_of_another_video_or_class_is_not_found() -> None:
    truth = Segments.of([(0, 0, 10, 0)])
    assert segment_map(Segments.of([(1, 0, 10, 0, 0.9)]), truth, 1)[0.3].mean == 0.0
    assert segment_map(Segments.of([(0, 0, 10, 1, 0.9)]), truth, 2)[0.3].classes == (0.0, None)


def test_what_has_no_length_overlaps_with_nothing_not_even_itself() -> None:
    point = np.array([5.0])
    assert temporal_overlap(point, point, point, point).item() == 0.0


def test_overlap_is_the_shared_part_of_the_whole() -> None:
    start, end = np.array([0.0, 4.0]), np.array([10.0, 6.0])
    table = temporal_overlap(start, end, np.array([5.0]), np.array([10.0]))
    assert table.tolist() == [[0.5], [pytest.approx(1 / 6)]]


# --------------------------------------------------------------------------------------------- from steps to segments
def test_clear_scores_give_back_the_segments_that_they_were_made_of() -> None:
    real = [(3, 9, 0), (20, 24, 1), (30, 31, 0)]
    scores = np.zeros((40, 2))
    for start, end, label in real:
        scores[start:end, label] = 0.95
    found = find_segments(scores)
    assert sorted(row[:3] for row in found) == real
    assert all(score == pytest.approx(0.95) for *_, score in found)
    predictions = Segments.of([(0, *row) for row in found])
    truth = Segments.of([(0, *row) for row in real])
    assert all(each.mean == 1.0 for each in segment_map(predictions, truth, 2).values())


def test_the_candidate_with_the_clearest_border_wins() -> None:
    scores = np.full((30, 1), 0.02)
    scores[8:20] = 0.15  # a shoulder
    scores[10:18] = 0.9
    assert find_segments(scores)[0][:2] == (10, 18)


def test_kept_segments_of_a_class_overlap_by_a_half_at_most() -> None:
    draw = np.random.default_rng(0)
    found = find_segments(draw.random((200, 3)))
    for label in range(3):
        start, end = np.array([row[:2] for row in found if row[2] == label]).T
        table = temporal_overlap(start, end, start, end)
        assert (table[~np.eye(len(start), dtype=bool)] <= 0.5).all()
        assert len(start) > 3


def test_scores_below_every_level_give_no_segment() -> None:
    assert find_segments(np.full((10, 3), 0.05)) == []
