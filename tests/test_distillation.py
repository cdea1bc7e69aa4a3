"""Learning from a teacher: the loss of the paper, and a teacher that is only asked and never changed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import test_distributed
from attemper.files import WEIGHTS
from attemper.lab.cli import main
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import Source
from attemper.lab.training.data import RunData
from attemper.lab.training.distillation import answer, distillation_loss
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.teacher import open_teacher
from taught import TASK, TEACHER, TINY, TOKEN, saved, spec
from teams import team

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return saved(tmp_path / "teacher.safetensors")


def batch(chosen: RunSpec) -> tuple[Tensor, Tensor]:
    return next(RunData(chosen, open_task(TASK), CPU).epoch(1))


def made(chosen: RunSpec) -> Learner:
    learner = Learner(chosen, open_task(TASK), CPU)
    learner.model.train()
    if "drop" in chosen.recipe:  # two passes are then equal, and so is that of another learner
        learner.tempered.set_rate(0.0)
    return learner


# ------------------------------------------------------------------------------------------------------------ the loss
def soft_by_hand(student: list[float], teacher: list[float], tau: float) -> float:
    """τ² Σ q log(q / p), from its definition."""

    def probabilities(logits: list[float]) -> list[float]:
        powers = [math.exp(each / tau) for each in logits]
        return [each / sum(powers) for each in powers]

    pairs = zip(probabilities(teacher), probabilities(student), strict=True)
    return tau**2 * sum(q * math.log(q / p) for q, p in pairs)


def test_the_soft_loss_is_tau_squared_times_the_divergence_from_the_teacher() -> None:
    student, teacher = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    for tau in (1.0, 3.0):
        expected = sum(soft_by_hand(s, t, tau) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)) / 5
        assert float(distillation_loss(student, teacher, "soft", tau)) == pytest.approx(expected, rel=1e-9)


def test_the_gradient_of_the_soft_loss_is_tau_times_the_difference_of_the_probabilities() -> None:
    student = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 4, dtype=torch.float64)
    distillation_loss(student, teacher, "soft", 3.0).backward()
    expected = 3.0 * ((student / 3).softmax(-1) - (teacher / 3).softmax(-1)) / 5
    assert torch.allclose(student.grad, expected.detach())


def test_the_hard_loss_and_its_gradient_are_those_of_the_teachers_answer_as_label() -> None:
    student = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 4, dtype=torch.float64)
    loss = distillation_loss(student, teacher, "hard")
    loss.backward()
    chosen = [max(range(4), key=row.__getitem__) for row in teacher.tolist()]
    probabilities = student.detach().softmax(-1)
    assert float(loss.detach()) == pytest.approx(-sum(math.log(probabilities[i, c]) for i, c in enumerate(chosen)) / 5)
    assert torch.allclose(student.grad, (probabilities - torch.eye(4, dtype=torch.float64)[chosen]) / 5)


@pytest.mark.parametrize(
    ("recipe", "model", "budget"),
    [
        ("none", TINY, {}),
        ("none", TINY, {"distillation": "soft", "distillation_alpha": 0.3, "temperature": 2.0, "smoothing": 0.1}),
        ("explicit(v=0.5, ff=0.5)", TINY, {"distillation_alpha": 0.25}),
        ("dropkey(0.1) + consistency(1.0)", TINY, {"augment": "crop-flip(1)+mixup"}),
        ("none", TOKEN, {"augment": "crop-flip(1)+cutmix", "distillation_alpha": 0.7}),
        ("cb", TOKEN, {"distillation": "soft"}),
    ],
)
def test_a_step_is_made_with_labels_and_teacher_each_with_its_share(
    recipe: str, model: str, budget: dict[str, Any], weights: str
) -> None:
    chosen = spec(recipe, model=model, teacher_weights=weights, **budget)
    learner, inputs, targets = made(chosen), *batch(chosen)
    total = float(learner.loss(inputs, targets).detach())
    reading = learner.meter.read()

    plain = made(dataclasses.replace(chosen, budget=dataclasses.replace(chosen.budget, **NO_TEACHER)))
    if model == TOKEN:
        plain.model.set_distilled_training(True)
    with torch.no_grad():
        out = plain.network(inputs)
    head, second = out if model == TOKEN else (out, out)
    teacher = open_teacher(chosen.budget, open_task(TASK).shape)(inputs)
    far = torch.nn.functional.cross_entropy(second, teacher.argmax(-1))
    if chosen.budget.distillation == "soft":
        tau = chosen.budget.temperature
        pairs = zip(second.tolist(), teacher.tolist(), strict=True)
        far = torch.tensor(sum(soft_by_hand(s, t, tau) for s, t in pairs) / len(inputs))
    labels = open_task(TASK).loss(head, targets, chosen.budget.smoothing)
    alpha = chosen.budget.distillation_alpha
    expected = float((1 - alpha) * labels + alpha * far)
    assert reading.loss == pytest.approx(expected, rel=1e-4)
    assert total == pytest.approx(expected + reading.penalty, rel=1e-4)
    assert (reading.penalty > 1e-3) == ("explicit" in recipe), "what a recipe adds is counted apart from the teacher"
    assert reading.accuracy == pytest.approx(float(open_task(TASK).right(head, targets)))


NO_TEACHER = {
    "teacher": None,
    "teacher_weights": None,
    "distillation": "hard",
    "distillation_alpha": 0.5,
    "temperature": 3.0,
}


def test_a_distillation_token_learns_from_the_teacher_alone_and_both_heads_are_averaged_in_the_end(
    weights: str,
) -> None:
    learner = made(spec(model=TOKEN, teacher_weights=weights, distillation_alpha=1.0))
    inputs, targets = batch(spec())
    learner.loss(inputs, targets).backward()
    gradients = {name: p.grad for name, p in learner.model.named_parameters()}
    assert gradients["head.weight"] is None or not gradients["head.weight"].any()
    assert gradients["head_dist.weight"].any()
    first, second = learner.model(inputs)
    assert torch.equal(answer((first, second)), second)
    with learner.evaluating() as model:
        assert torch.allclose(model(inputs), (first + second) / 2, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- the teacher
def test_the_teacher_sees_every_batch_as_the_student_does_once_and_stays_what_it_was(weights: str) -> None:
    chosen = spec(
        "dropkey(0.3) + rdrop + explicit(v=0.1)",
        teacher_weights=weights,
        augment="resized-crop+erasing+mixup",
        accumulate=2,
        ema=0.5,
        clip=1.0,
        optimizer="adamw",
        weight_decay=0.5,
    )
    task = open_task(TASK)
    data = RunData(chosen, task, CPU)
    learner = Learner(chosen, task, CPU, data.accumulate)
    learner.model.train()
    assert learner.teacher is not None
    asked: list[Tensor] = []
    given: list[Tensor] = []
    learner.teacher.register_forward_pre_hook(lambda module, args: asked.append(args[0]))
    learner.model.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for inputs, targets in data.epoch(1):
        learner.learn(inputs, targets)
    assert len(given) == 2 * len(asked) > 0, "two passes of the student, one of the teacher"
    assert all(torch.equal(one, given[2 * i]) and torch.equal(one, given[2 * i + 1]) for i, one in enumerate(asked))
    assert not learner.teacher.training
    assert all(p.grad is None and not p.requires_grad for p in learner.teacher.parameters())
    before = load_file(weights)
    assert all(torch.equal(value, before[name]) for name, value in learner.teacher.state_dict().items())
    assert all(row.site.startswith("blocks") for row in learner.tempered.summary())


def test_the_teacher_runs_in_the_precision_of_the_run_and_compiled_where_the_run_is(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    learner = made(spec(teacher_weights=weights, precision="bfloat16", compile=True))
    assert learner.teacher is not None
    assert compiled == [learner.model, learner.teacher]
    seen: list[torch.dtype] = []
    learner.teacher.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.backends.mkldnn.flags(enabled=False):  # not every CPU that says it knows bfloat16 does
        taught = learner.taught(batch(spec())[0])
    assert seen == [torch.bfloat16]
    assert taught is not None
    assert taught.dtype == torch.float32
    assert not taught.requires_grad


def test_the_teacher_is_in_no_checkpoint_and_no_weights(weights: str, tmp_path: Path) -> None:
    run(spec(teacher_weights=weights), open_task(TASK), folder=tmp_path / "run")
    own = set(build_model(TINY, open_task(TASK).shape).state_dict())
    assert set(load_file(tmp_path / "run" / WEIGHTS)) == own
    learner = made(spec(teacher_weights=weights))
    assert set(learner.state()["model"]) == set(learner.weights()) == own
    held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in learner.model.parameters()}


def test_a_teacher_changes_neither_the_initial_weights_nor_what_methods_draw(weights: str) -> None:
    with_teacher, without = spec(teacher_weights=weights, distillation_alpha=0.0), spec(teacher=None)
    results = [
        run(dataclasses.replace(each, recipe="dropkey(0.3)"), open_task(TASK)) for each in (with_teacher, without)
    ]
    assert results[0]["curve"] == results[1]["curve"], "a teacher without a share in the loss is no teacher"
    assert results[0]["key"] != results[1]["key"]


def test_a_run_goes_on_with_its_teacher_after_an_interruption(weights: str, tmp_path: Path) -> None:
    chosen = spec(
        "dropkey(0.2)", teacher_weights=weights, epochs=3, decay="matrices", ema=0.9, repeats=2, augment=AUGMENT
    )

    def interrupt(event: dict[str, Any]) -> None:
        if event["epoch"] == 3 and event["validation"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chosen, open_task(TASK), folder=tmp_path, progress=interrupt)
    resumed, undisturbed = run(chosen, open_task(TASK), folder=tmp_path), run(chosen, open_task(TASK))
    assert resumed["curve"] == undisturbed["curve"]
    assert resumed["test"] == undisturbed["test"]


AUGMENT = "resized-crop(0.5)+mixup"


def test_a_teacher_that_was_trained_with_a_method_that_acts_in_eval_mode_keeps_it(tmp_path: Path) -> None:
    task = open_task(TASK)
    chosen = dataclasses.replace(spec("cb(cb_s)", teacher=None), model=TINY)
    run(chosen, task, folder=tmp_path)
    budget = Budget(teacher=TINY, teacher_weights=str(tmp_path / WEIGHTS))
    teacher = open_teacher(budget, task.shape)
    learner = made(chosen)
    learner.model.load_state_dict(load_file(tmp_path / WEIGHTS))
    inputs, _ = batch(chosen)
    with learner.evaluating() as model:
        assert torch.equal(teacher(inputs), model(inputs))


# -------------------------------------------------------------------------------------------------------------- ranks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_learn_from_a_teacher_as_one_process_does(parallel: str, weights: str) -> None:
    taught = {"teacher": TEACHER, "teacher_weights": weights}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("none", {**taught, "distillation": "soft", "distillation_alpha": 0.8, "decay": "matrices"}),
        ("dropkey(0.1) + consistency(0.7)", {**taught, "accumulate": 2, "batch_size": 9, "ema": 0.5}),
        ("none", {**taught, "augment": "resized-crop+mixup", "repeats": 3, "batch_size": 9, "compile": True}),
    ]
    test_distributed.assert_equal_steps(team(2, test_distributed.steps, parallel, cases), cases)


# ------------------------------------------------------------------------------------------------------- end to end
class Mislabelled:
    """A task with a wrong label on every training image."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        train, held = self.task.split(seed, validation)
        train.targets = (train.targets + 1 + torch.randint(9, train.targets.shape)) % 10
        return train, held


def test_a_student_learns_from_few_images_what_its_teacher_knows(tmp_path: Path) -> None:
    budget = {"epochs": 12, "batch_size": 64, "lr": 5e-3, "warmup_epochs": 1.0}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in budget.items()]
    assert main(["train", "--folder", str(tmp_path), *arguments, "--device", "cpu"]) == 0
    known = json.loads((tmp_path / "result.json").read_text())["test"]["accuracy"]
    assert known > 0.9

    task = Mislabelled(open_task("digits(train=400)"))
    taught = {"teacher": "vit-digits", "teacher_weights": str(tmp_path / WEIGHTS), "distillation_alpha": 1.0}
    few = Budget(epochs=15, batch_size=30, lr=5e-3, warmup_epochs=1, distillation="soft", **taught)
    student = RunSpec(task=task.name, model="vit-digits(depth=2)", recipe="none", seed=0, budget=few)
    result = run(student, task)
    assert result["test"]["accuracy"] > 0.7, "every label that it saw was wrong: this is the teacher's"
    alone = dataclasses.replace(few, **{**NO_TEACHER, "epochs": 5})
    assert run(dataclasses.replace(student, budget=alone), task)["test"]["accuracy"] < 0.3
