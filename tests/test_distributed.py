"""Several processes train one run: the same step as one process on the whole batch, the same metrics, other masks."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import list_methods, parse
from attemper.errors import ParameterError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import Source
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import Run, choose_device
from attemper.lab.training.ranks import ALONE, Ranks, current, joined
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.validation import evaluate
from attemper.methods.consistency import Consistency
from attemper.methods.kinds import LossTerm, Penalty
from attemper.tempering.outputs import counted_in
from teams import DIED, team

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TASK = "digits(train=200, test=50)"
TINY = "vit-cifar(depth=2, width=16, heads=2, mlp=16)"  # the head of vit-digits starts at zero, and hides the rest

PENALTIES = [
    "none",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff=0.1)",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff1=0.1, conv=0.2, reduction=sum, expectation=exact)",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff2=0.1, reduction=authors, expectation=inverted)",
    "arora(q=0.1, k=0.2, v=0.3, ff=0.4, reduction=authors)",
    "cb(cb_s) + explicit(v=0.5, reduction=sum)",
    "dropkey(0.1) + consistency(0.7)",
    "dropkey(0.1) + consistency(0.7, direction=symmetric) + explicit(v=0.5, reduction=sum)",
    "dropattention(0.1) + rdrop(0.7)",
]


def spec(recipe: str = "none", *, seed: int = 0, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 10, "lr": 3e-3, "warmup_epochs": 1, **budget})
    return RunSpec(task=TASK, model=TINY, recipe=recipe, seed=seed, budget=chosen)


# -------------------------------------------------------------------------------------------------- one step, one batch
def step(chosen: RunSpec, ranks: Ranks, accumulate: int) -> Learner:
    """A learner after one optimiser step, stochastic methods off, in double precision throughout.

    In single precision Adam makes whole steps out of gradients that are nothing but rounding.
    """
    task = open_task(TASK)
    data = RunData(chosen, task, CPU, ranks)
    learner = Learner(chosen, task, CPU, accumulate, ranks, data.share)
    learner.model.train()
    if "drop" in chosen.recipe:
        learner.tempered.set_rate(0.0)
    for _, (inputs, targets) in zip(range(accumulate), data.epoch(1), strict=False):
        learner.learn(inputs.double(), targets)
    return learner


def compare_far(self: Any, first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
    """In place of a divergence, which would be zero for two equal passes, something with a gradient for both."""
    each = (first.sin() * second.exp()).square().mean(-1)
    return each.mean() if counted is None else each[counted].mean()


def steps(parallel: Any, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """How far a step of the team is from one process's own, and what the meters say."""
    torch.set_default_dtype(torch.float64)
    Consistency.compare = compare_far  # type: ignore[method-assign]
    torch.compile = functools.partial(torch.compile, backend="eager")  # what is traced; Inductor would take minutes
    found = []
    with joined(parallel) as ranks:
        for recipe, budget in cases:
            chosen = spec(recipe, **budget)
            accumulate = chosen.budget.accumulate
            together, alone = step(chosen, ranks, accumulate), step(chosen, ALONE, accumulate)
            weights, expected = whole(together), alone.model.state_dict()
            readings = [each.meter.read() for each in (together, alone)]
            found.append(
                {
                    "far": max(float((weights[name] - expected[name]).abs().max()) for name in expected),
                    "moved": max(float((expected[name] - start).abs().max()) for name, start in begun(chosen).items()),
                    "weights": weights,
                    "readings": [(r.loss, r.accuracy, r.penalty) for r in readings],
                }
            )
    return found


def whole(learner: Learner) -> dict[str, Tensor]:
    from attemper.lab.training.parallel import whole as whole_tensor

    return {name: whole_tensor(value.detach()) for name, value in learner.model.state_dict().items()}


def begun(chosen: RunSpec) -> dict[str, Tensor]:
    return dict(Learner(chosen, open_task(TASK), CPU).model.state_dict())


def assert_equal_steps(everybody: list[list[Any]], cases: list[Any]) -> None:
    for number, case in enumerate(cases):
        for rank, found in enumerate(everybody):
            assert found[number]["far"] < 1e-6 < found[number]["moved"], (case, rank, found[number]["far"])
            together, alone = found[number]["readings"]
            assert together == pytest.approx(alone, abs=1e-6), (case, rank)
            for name, value in found[number]["weights"].items():
                assert torch.equal(value, everybody[0][number]["weights"][name]), (case, rank, name)


CASES: list[tuple[str, dict[str, Any]]] = [
    *((recipe, {}) for recipe in PENALTIES),
    ("explicit(v=0.5, reduction=sum)", {"accumulate": 3, "clip": 0.1, "ema": 0.5, "batch_size": 9}),
    ("none", {"augment": "crop-flip(1)+mixup", "smoothing": 0.1, "optimizer": "adamw", "weight_decay": 0.1}),
]

COMPILED: tuple[str, dict[str, Any]] = ("explicit(v=0.5, reduction=sum)", {"compile": True})


def test_every_method_that_adds_to_the_loss_is_among_the_steps() -> None:
    tried = {type(method) for recipe in PENALTIES for method in parse(recipe)}
    assert {method for method in list_methods() if issubclass(method, Penalty | LossTerm)} <= tried


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_of_several_processes_is_that_of_one_on_the_whole_batch(size: int) -> None:
    cases = CASES if size == 4 else [*CASES, COMPILED]
    assert_equal_steps(team(size, steps, None, cases), cases)  # 10 samples on four ranks: 3, 3, 2 and 2


def test_a_step_of_a_sharded_model_is_that_of_one_process_too() -> None:
    cases = [CASES[0], CASES[2], CASES[6], CASES[7], CASES[9], COMPILED]
    assert_equal_steps(team(2, steps, "fsdp", cases), cases)


# ---------------------------------------------------------------------------------------------- batches, masks, metrics
@pytest.mark.parametrize("augment", ["none", "crop-flip(1)+mixup"])
def test_the_parts_of_the_ranks_are_the_batch_that_one_process_would_have(augment: str) -> None:
    chosen = spec(augment=augment)
    alone = RunData(chosen, open_task(TASK), CPU).epoch(2)
    parts = [RunData(chosen, open_task(TASK), CPU, Ranks(rank, 4)).epoch(2) for rank in range(4)]
    for (inputs, targets), *some in zip(alone, *parts, strict=True):
        assert [len(part[0]) for part in some] == [3, 3, 2, 2]
        assert torch.equal(torch.cat([part[0] for part in some]), inputs)
        assert torch.equal(torch.cat([part[1] for part in some]), targets)


def test_a_batch_with_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"A batch has 3 samples, and 4 processes share it"):
        RunData(spec(batch_size=3), open_task(TASK), CPU, Ranks(0, 4))


def draws() -> tuple[Tensor, Tensor, float]:
    """What a rank's model says of the same images, in eval and in training, and its next random number."""
    with joined() as ranks:
        run = Run(spec("dropkey(0.5)"), open_task(TASK), None, None, choose_device("cpu", ranks), None, ranks)
        inputs, _ = next(RunData(spec(), open_task(TASK), CPU).epoch(1))
        run.learner.model.eval()
        calm = run.learner.model(inputs).detach()
        run.learner.model.train()
        return calm, run.learner.model(inputs).detach(), float(torch.rand(()))


def test_ranks_have_the_same_weights_and_draw_different_masks() -> None:
    (calm, wild, number), (calm_too, wild_too, number_too) = team(2, draws)
    assert torch.equal(calm, calm_too)
    assert not torch.allclose(wild, wild_too)
    assert number != number_too


def statistics() -> tuple[list[Tensor], list[Tensor]]:
    """Running statistics after an epoch of a network with batch norms, and their moving average."""
    chosen = spec(ema=0.5, epochs=1, batch_size=20)
    chosen = dataclasses.replace(chosen, model="convmixer(width=8, depth=1, kernel=3)")
    with joined() as ranks:
        run = Run(chosen, open_task(TASK), None, None, choose_device("cpu", ranks), None, ranks)
        run.finish()
        return list(run.learner.model.buffers()), list(run.best.values())


def test_ranks_end_an_epoch_with_the_same_running_statistics() -> None:
    zero, one = team(2, statistics)
    for mine, theirs in zip([*zero[0], *zero[1]], [*one[0], *one[1]], strict=True):
        assert torch.equal(mine, theirs)
    assert any(buffer.dtype.is_floating_point and buffer.abs().sum() > 0 for buffer in zero[0])


class Odd:
    """A task whose metric is no mean over samples, and which only the main rank may measure."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def measure(self, model: Any, source: Source) -> dict[str, float | None]:
        assert current().main
        return {"loss": 1.0, "accuracy": 1 / len(source)}


def metrics() -> list[Any]:
    task = open_task(TASK)
    with joined() as ranks:
        learner = Learner(spec(), task, CPU, 1, ranks)
        alone = Learner(spec(), task, CPU)
        _, validation = task.split(0, 0.3)
        sources = [
            validation.take(torch.arange(samples)) for samples in (59, 3)
        ]  # four ranks: 15, 15, 15, 14; 1, 1, 1, 0
        found = [(evaluate(learner, task, source), evaluate(alone, task, source)) for source in sources]
        return [*found, evaluate(learner, Odd(task), sources[0])]  # type: ignore[arg-type]


def test_metrics_of_uneven_parts_are_those_of_one_process() -> None:
    for *means, odd in team(4, metrics):
        for together, alone in means:
            assert together == pytest.approx(alone, abs=1e-6)
        assert odd == {"loss": 1.0, "accuracy": 1 / 59}


def sentences() -> tuple[float, float, list[float]]:
    """A step on sentences of unequal length, by all ranks and by one, with a comparison and a penalty."""
    torch.set_default_dtype(torch.float64)
    Consistency.compare = compare_far  # type: ignore[method-assign]
    task = open_task("numerals(train=60, test=20)")
    recipe = "dropkey(0.1) + consistency(0.7) + explicit(v=0.5)"
    chosen = dataclasses.replace(spec(recipe), task=task.name, model="seq2seq(width=16, depth=1, heads=2, mlp=16)")
    with joined() as ranks:
        learners = []
        for each in (ranks, ALONE):
            data = RunData(chosen, task, CPU, each)
            learner = Learner(chosen, task, CPU, 1, each, data.share)
            learner.tempered.set_rate(0.0)
            learner.model.train()
            learner.learn(*next(data.epoch(1)))
            learners.append(learner)
        together, alone = (learner.model.state_dict() for learner in learners)
        far = max(float((together[name] - alone[name]).abs().max()) for name in alone)
        words = float(counted_in(next(RunData(chosen, task, CPU, ranks).epoch(1))[1]).sum())  # type: ignore[union-attr]
        return words, far, [learner.meter.read().loss for learner in learners]


def test_of_sentences_every_word_counts_the_same_whichever_rank_has_it() -> None:
    zero, one = team(2, sentences)
    assert zero[0] != one[0], "the ranks have different numbers of words"
    for _, far, (together, alone) in (zero, one):
        assert far < 1e-6
        assert together == pytest.approx(alone, abs=1e-6)


# ------------------------------------------------------------------------------------------------------- who goes wrong
def goes_wrong(how: str) -> Any:
    """Rank 1 leaves while the others wait for it."""
    with joined() as ranks:
        learner = Learner(spec(), open_task(TASK), CPU, 1, ranks)
        if ranks.rank == 1:
            if how == "raises":
                raise ParameterError("the third layer is on fire")
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank == 2 and how == "raises":
            return ranks.from_main(lambda: "never said")
        inputs, targets = open_task(TASK).shape.example(2)
        learner.learn(inputs, targets)
    return None


def test_a_rank_that_fails_stops_the_others_with_its_message() -> None:
    zero, one, two = team(3, goes_wrong, "raises")
    assert one == ("ParameterError", "the third layer is on fire")
    for other in (zero, two):
        assert other == ("RankError", "Rank 1 stopped: ParameterError: the third layer is on fire")


def test_a_rank_that_is_killed_stops_the_others() -> None:
    zero, one, two = team(3, goes_wrong, "dies")
    assert one == DIED
    for kind, text in (zero, two):
        assert kind == "RankError"
        assert "Rank 1 is gone without a word" in text
        assert "pytorch" not in text, "where in torch's sources it was noticed helps nobody"


def hangs() -> None:
    from attemper.lab.training import ranks as module

    module.GRACE = 0.2
    with joined() as ranks:
        if ranks.rank == 1:
            raise ParameterError("on fire")
        signal.pause()


def test_a_rank_that_hears_nothing_is_ended() -> None:
    assert team(2, hangs) == [DIED, ("ParameterError", "on fire")]


def disagrees() -> None:
    with joined() as ranks:
        chosen = spec(seed=ranks.rank)
        Run(chosen, open_task(TASK), None, None, choose_device("cpu", ranks), None, ranks)


def test_ranks_with_different_runs_are_refused() -> None:
    for kind, text in team(2, disagrees):
        assert kind == "RankError"
        assert "Rank 1 has another run or other data than rank 0" in text


def slow_to_answer() -> None:
    with joined() as ranks:
        if ranks.rank == 1:
            signal.sigtimedwait([], 3)
        ranks.sum(torch.ones(()))


def test_waiting_for_a_rank_has_an_end() -> None:
    zero, _ = team(2, slow_to_answer, ATTEMPER_TIMEOUT="1")
    assert zero[0] == "RankError"
    assert "did not answer in time: Timed out waiting" in zero[1]


def test_variables_of_the_launcher_are_read_with_care() -> None:
    with joined(environment={}) as ranks:
        assert ranks is ALONE
        assert current() is ALONE
    with joined(environment={"WORLD_SIZE": "1"}) as ranks:
        assert ranks is ALONE
    both = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}
    with pytest.raises(ParameterError, match="accelerate launch was given --use_fsdp"):
        joined("ddp", both).__enter__()
    for given in ({"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"}):
        with pytest.raises(ParameterError, match=r"The variable \w+ is '\w+'; it must be a whole number"):
            joined(environment=given).__enter__()
    for given in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}):
        with pytest.raises(ParameterError, match=r"The variable (RANK|MASTER_ADDR) is missing, .* torchrun"):
            joined(environment=given).__enter__()


def comes_alone() -> None:
    with joined():
        raise AssertionError("there is nobody to be joined with")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_the_others_never_join_says_so(rank: str) -> None:
    ((kind, text),) = team(1, comes_alone, WORLD_SIZE="2", RANK=rank, ATTEMPER_TIMEOUT="1")
    assert kind == "RankError"
    assert f"Rank {rank} of 2 cannot reach the others at 127.0.0.1:" in text
    assert "All 2 processes must be started within 1 s," in text
