"""Masks on any mesh: ranks draw their parts of the masks that one process draws for the whole batch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock

import attemper
import teams
from attemper.errors import MeshError, ParameterError
from attemper.methods.base import Place
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Offsets
from attemper.tempering.mesh import Axis, Position
from attemper.tempering.offsets import AttentionShape, Samples, attention_offsets
from attemper.tempering.standing import offsets, position_of_pass
from mesh_cases import RECIPES, SEED, Case, Outcome, Words, checkpointed, resumed, sequences, written
from mesh_checks import run_all, run_on_gpu, words_of
from teams import team

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYWHERE = ("many", "layerdrop", "dropconnect")
"""The recipes that are tried on meshes of every kind."""
CASES: list[Case] = [
    *(("tensor", model, recipe, {}) for model in ("llama", "vit") for recipe in RECIPES.values()),
    *((kind, "written", RECIPES[name], {}) for kind in ("context", "data", "fsdp") for name in EVERYWHERE),
    ("context", "written", RECIPES["dropkey-heads"], {}),
    ("tensor", "llama", RECIPES["many"], {"later": False}),
    ("tensor", "vit", RECIPES["many"], {"given": True}),
    ("data", "llama", RECIPES["many"], {}),
    ("dtensors", "written", RECIPES["many"], {}),
    ("dtensors", "written", "dropkey(0.2) + layerdrop(0.5)", {}),
    ("dtensors", "written", "dropkey(0.2) + cb", {}),
]
MORE: list[Case] = [
    *((kind, "written", recipe, {}) for kind in ("context", "data", "fsdp") for recipe in RECIPES.values()),
    *((kind, model, RECIPES["many"], {}) for kind in ("data", "fsdp") for model in ("llama", "vit")),
    *(("planned", "llama", RECIPES[name], {}) for name in EVERYWHERE),
    ("tensor", "llama", RECIPES["dropkey"], {"compiled": True}),
    ("tensor", "vit", RECIPES["many"], {"compiled": True}),
    ("data", "vit", RECIPES["many"], {"compiled": True}),
]

SQUARE: list[Case] = [
    *(("both", model, RECIPES["many"], {}) for model in ("llama", "vit")),
    ("both", "llama", RECIPES["many"], {"given": True}),
    ("both", "llama", RECIPES["many"], {"fsdp": False}),
    ("both", "vit", RECIPES["dropconnect"], {"fsdp": False}),
]
"""On four ranks, data × tensor."""


def assert_parts(found: Words, whole: Words) -> None:
    """Every draw is the part of the one process's draw that it says it is."""
    assert found.keys() == whole.keys()
    for key, (at, words) in found.items():
        first, part = whole[key]
        for axis, (begin, base, size) in enumerate(zip(at, first, words.shape, strict=True)):
            part = part.narrow(axis, begin - base, size)
        assert torch.equal(words, part), (key, at)


def assert_same(outcomes: list[Any], whole: Outcome, compiled: bool) -> None:
    """Words to the last bit, the mean of the losses and all gradients to rounding."""
    for outcome in outcomes:
        assert len(outcome) == 3, outcome
        _, gradients, words = outcome
        if not compiled:
            assert_parts(words, whole[2])
        assert gradients.keys() == whole[1].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[1][name], rtol=1e-9, atol=1e-11, msg=name)
    losses = [outcome[0] for outcome in outcomes]
    assert sum(losses) / len(losses) == pytest.approx(whole[0], rel=1e-10)


class Answers:
    """What the ranks of a team said."""

    def __init__(self, cases: list[Case], answers: list[Any]) -> None:
        self.cases = cases
        for answer in answers:
            assert len(answer) == 3, answer
        self.outcomes = [answer[0] for answer in answers]
        self.whole: dict[Any, Outcome] = {pair: outcome for answer in answers for pair, outcome in answer[1].items()}
        self.checks = [answer[2] for answer in answers]

    def assert_same(self, case: Case) -> None:
        _, model, recipe, options = case
        number = self.cases.index(case)
        compiled = options.get("compiled", False)
        assert_same([outcomes[number] for outcomes in self.outcomes], self.whole[model, recipe], compiled)

    def check(self, name: str) -> list[Any]:
        """What a check gave, on every rank."""
        return [each[name] for each in self.checks]


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Answers:
    """One team for all tests, also where several processes run them."""
    base = tmp_path_factory.getbasetemp()
    kept = (base if worker_id == "master" else base.parent) / "mesh-answers.pickle"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(team(2, run_all, CASES)))
        return Answers(CASES, pickle.loads(kept.read_bytes()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_mesh_of_two_equals_one_process(case: Case, answers: Answers) -> None:
    answers.assert_same(case)


@pytest.mark.slow
@pytest.mark.parametrize("way", [checkpointed, resumed], ids=lambda way: way.__name__)
@pytest.mark.parametrize("recipe", RECIPES.values())
@pytest.mark.parametrize("model", ["llama", "vit"])
def test_one_process_computes_the_same_in_other_ways(model: str, recipe: str, way: Any, answers: Answers) -> None:
    assert_same([way(model, recipe)], answers.whole[model, recipe], compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "cases"), [(2, MORE), (4, SQUARE)])
def test_more_meshes_equal_one_process(size: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "PATIENCE", 600.0)
    answers = Answers(cases, team(size, run_all, cases, False))
    for case in cases:
        answers.assert_same(case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mesh_of_one_gpu_equals_the_gpu() -> None:
    (answers,) = team(1, run_on_gpu, [(model, recipe) for model in ("llama", "vit") for recipe in RECIPES.values()])
    for plain, split in answers:
        assert_same([split], plain, compiled=False)


# ------------------------------------------------------------------------------------------- which samples a rank has
def test_a_rank_whose_batch_becomes_smaller_alone_is_told_so(answers: Answers) -> None:
    whole, short = answers.check("uneven")
    assert whole[:2] == [[0], [0]]
    assert short[:2] == [[2], [2]]
    kind, message = short[2]
    assert kind == "MeshError"
    assert "process 0 told of no change" in message
    assert "process 1 has 1" in message
    assert "tempered.samples" in message


def test_ranks_whose_batches_change_together_go_on_or_are_told(answers: Answers) -> None:
    (apart_0, same_0), (apart_1, same_1) = answers.check("apart")
    for found in (apart_0, apart_1):
        assert found[1][0] == "MeshError"
        assert "process 0 has 3, process 1 has 4" in found[1][1]
    assert (same_0, same_1) == ([[0], [0], [0]], [[4], [3], [4]])


def test_whoever_shares_unevenly_can_say_so(answers: Answers) -> None:
    assert answers.check("told") == [[[0], [0], [0]], [[2], [2], [3]]]


def test_a_mesh_can_be_told_by_roles(answers: Answers) -> None:
    assert answers.check("told_by_role") == [[0], [4]]


def test_the_names_of_a_mesh_say_what_its_dimensions_are_for(answers: Answers) -> None:
    for rank, found in enumerate(answers.check("positions")):
        assert found == [
            ([("data", 0, 1), ("tensor", rank, 2)], (rank,)),
            ([("context", 0, 1), ("data", rank, 2)], (0, 1)),
            ([("pipeline", 0, 1), ("data", rank, 2)], (0, 1)),
        ]


def test_norms_that_are_distributed_tell_of_tokens_that_are_split(answers: Answers) -> None:
    assert answers.check("sequence_parallel") == [[True, False]] * 2


def test_a_seed_can_be_drawn_after_a_dtensor(answers: Answers) -> None:
    torch.manual_seed(SEED)
    seed = draw_seed(torch.zeros(2, 3)).item()
    assert answers.check("drawn_after") == [[("Tensor", seed)] * 3] * 2


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_mesh_that_is_not_understood_is_refused_with_the_names_that_are(answers: Answers) -> None:
    for errors in answers.check("unknown_mesh"):
        assert [kind for kind, _ in errors] == ["ParameterError"] * 4
        unnamed, named, role, no_mesh = (message for _, message in errors)
        for message in (unnamed, named):
            assert "tensor, tp, model" in message
        assert "'island'" in named
        assert "'island'" in role
        assert "int" in no_mesh


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixing_tokens", "cb mixes the tokens of a sample"),
        ("local_attention", "which tokens meet here is not known"),
        ("torch_context_parallel", "torch's context_parallel"),
        ("penalties", "penalties cannot be taken"),
        ("learnt", "Use a constant rate"),
        ("plain_parameters", "the model's parameters are plain tensors"),
    ],
)
def test_what_would_be_wrong_on_a_mesh_is_refused_by_name(name: str, said: str, answers: Answers) -> None:
    for kind, message in answers.check(name):
        assert kind == "MeshError", message
        assert said in message


# ------------------------------------------------------------------------------------------------- where a call stands
def named(heads: int | None) -> Any:
    """What is known of an attention whose projections are not."""
    place = Place(0, 1, name="attention")
    return SimpleNamespace(heads=heads, projections=None, place=place, learnt={})


def at(position: Position, heads: int, queries: int, keys: int, causal: bool = False) -> Offsets:
    return attention_offsets(position, named(8), AttentionShape(heads, queries, keys, 4, causal))


def test_a_call_with_all_heads_and_tokens_is_the_same_on_every_rank() -> None:
    mesh = Position((Axis("data", 1, 2), Axis("tensor", 1, 2)))
    assert at(mesh, 8, 5, 5) == Offsets(heads=8)


def test_a_rate_is_learnt_of_some_queries_and_not_of_some_heads() -> None:
    learning = named(8)
    learning.learnt = {"dropkey": None}
    some_queries = attention_offsets(Position((Axis("context", 1, 2),)), learning, AttentionShape(8, 5, 10, 4))
    assert some_queries == Offsets(query=5, heads=8)
    for mesh, shape in (("tensor", AttentionShape(4, 5, 5, 4)), ("context", AttentionShape(4, 10, 10, 4))):
        with pytest.raises(MeshError, match="dropkey learns a rate in 'attention'"):
            attention_offsets(Position((Axis(mesh, 1, 2),)), learning, shape)  # type: ignore[arg-type]


def test_heads_are_counted_over_tensor_ranks_and_queries_over_context_ranks() -> None:
    mesh = Position((Axis("tensor", 1, 2), Axis("context", 2, 4)))
    assert at(mesh, 4, 5, 20) == Offsets(head=4, query=10, heads=8)
    assert at(mesh, 8, 5, 20) == Offsets(head=0, query=10, heads=8)


def test_ranks_that_exchange_tokens_for_heads_count_heads() -> None:
    mesh = Position((Axis("tensor", 1, 2), Axis("context", 3, 4)))
    assert at(mesh, 1, 20, 20) == Offsets(head=7, heads=8)
    assert at(Position((Axis("context", 1, 4),)), 2, 20, 20) == Offsets(head=2, heads=8)


@pytest.mark.parametrize(
    ("mesh", "call", "said"),
    [
        (Position((Axis("tensor", 0, 2),)), (3, 5, 5), "with 3 heads here, and it has 8"),
        (Position((Axis("context", 0, 2),)), (8, 5, 5), "which tokens meet here is not known"),
        (Position((Axis("context", 0, 2),)), (8, 5, 10, True), "is_causal"),
    ],
)
def test_a_call_whose_part_cannot_be_told_is_refused(mesh: Position, call: Any, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        at(mesh, *call)


def test_several_data_axes_count_as_one() -> None:
    mesh = Position((Axis("data", 1, 2), Axis("tensor", 0, 2), Axis("data", 2, 3)))
    assert (mesh.along("data").rank, mesh.along("data").size) == (5, 6)


def test_windows_of_samples_are_counted_by_samples() -> None:
    assert Samples(3, 2).row(2) == 3
    assert Samples(3, 2).row(8) == 12


def test_replicas_of_one_process_have_samples_of_their_own() -> None:
    model = written().train()
    tempered = attemper.apply(model, "dropkey(0.1)")
    model._is_replica = True
    found = [position_of_pass(tempered.control, model, torch.device("cuda", i)).base for i in range(3)]
    assert len(set(found)) == 3
    assert offsets(tempered.control, Position(base=found[1]), 4, None).sample == found[1]


@pytest.mark.parametrize("wrong", [(-1, 1), (0, 0), (True, 1), (0.5, 1)])
def test_samples_must_be_numbers(wrong: Any) -> None:
    tempered = attemper.apply(written(), "dropkey(0.1)")
    with pytest.raises(ParameterError, match="whole number"):
        tempered.samples(*wrong)


def test_one_process_told_which_samples_it_has_draws_what_several_would() -> None:
    model, x = written().train(), sequences()
    tempered = attemper.apply(model, RECIPES["many"])
    whole = words_of(tempered, x)
    for first, count in ((0, 1), (1, 3)):
        tempered.samples(first=first, count=count)
        assert_parts(words_of(tempered, x[first : first + count]), whole)
    tempered.samples(first=None)
    assert_parts(words_of(tempered, x), whole)
