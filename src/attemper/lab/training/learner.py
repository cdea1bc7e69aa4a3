"""A tempered model with everything that changes it: optimiser, moving average, and the step that joins them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import attemper
from attemper.errors import ParameterError
from attemper.lab.tasks.base import Task, output_of
from attemper.lab.tasks.seed_streams import derive, drawing_from
from attemper.lab.training.distillation import answer, distillation_loss, prepare_student
from attemper.lab.training.initial import frozen_norms, initial_model, parameter_scales
from attemper.lab.training.meter import Meter
from attemper.lab.training.parallel import Objective, connect, copy_of, shard, synchronised, without_sync
from attemper.lab.training.ranks import ALONE, Ranks
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.teacher import open_teacher
from attemper.methods.kinds import LossTerm
from attemper.tempering.handle import Tempered
from attemper.tempering.outputs import counted_in, logits_of
from attemper.tempering.records import added_parameters


class Learner:
    """One model under one recipe.

    The initial weights are a function of the seed: the same for every recipe, and on every device.

    accumulate: batches per step of the optimiser.
    ranks: who shares the work. share: the part of every batch that this rank sees.
    """

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        device: torch.device,
        accumulate: int = 1,
        ranks: Ranks = ALONE,
        share: float = 1.0,
    ) -> None:
        self.budget = spec.budget
        self.task = task
        self.device = device
        self.ranks = ranks
        self.share = share
        with drawing_from(derive(spec.seed, "weights")):
            model, self.start = initial_model(spec, task.shape)
            scales = parameter_scales(model, spec.budget.layer_decay)
            self.model = synchronised(model, ranks, device)
            self.tempered = attemper.apply(self.model, spec.recipe)
        refuse_comparisons(self.tempered, task)
        self.tempered.batch_share = share
        if ranks.alone:  # whoever else is there sees nothing of this model's batches
            self.tempered.samples(first=0, count=1)
        self.model.to(device)
        if ranks.sharded:
            shard(self.model, ranks, device)
        self.optimizer = make_optimizer(self.model, self.budget, device, graphs=ranks.alone, scales=scales)
        self.network = self.compiled(self.model)
        self.objective = connect(Objective(self.network, self.loss), ranks, device)
        self.average = Average(self.model, self.budget.ema) if self.budget.ema is not None else None
        self.meter = Meter(self.budget.loss_bound, device)
        self.accumulate = accumulate
        self.waiting = 0
        """Batches whose gradients the optimiser has not seen yet."""
        self.seeds: list[Tensor] = []
        """Of the passes of the last batch, if they drew any. A captured step has them in memory of its own."""
        self.teacher: nn.Module | None = None
        """Whole on every rank, and no part of the model: nothing tempers, trains, averages or stores it."""
        if self.budget.teacher is not None:
            prepare_student(self.model)
            self.teacher = self.compiled(open_teacher(self.budget, task.shape).to(device))

    def compiled(self, network: nn.Module) -> nn.Module:
        """The network as the budget lets it run."""
        return cast(nn.Module, torch.compile(network)) if self.budget.compile else network

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        """One batch: forward, backward and, at the end of an accumulation, a step of the optimiser.

        inputs: what the model takes. targets: what the task's loss takes. Both are this rank's part of the batch; its
        loss counts by its share, so that the mean of the gradients is the gradient of the whole batch.
        """
        self.waiting += 1
        complete = self.waiting == self.accumulate
        with contextlib.nullcontext() if complete else without_sync(self.objective, self.model):
            loss: Tensor = self.objective(inputs, targets)
            (loss * (self.share * self.ranks.size / self.accumulate)).backward()
        if complete:
            self.update()

    def update(self) -> None:
        """Let the optimiser take its step with the gradients that have come together."""
        if self.budget.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.budget.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        self.waiting = 0

    def forget(self) -> None:
        """Drop what a pass that led to no step has left behind: gradients and penalties."""
        self.optimizer.zero_grad()
        self.tempered.control.ledger.forget()
        self.waiting = 0

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss with all that the recipe adds to it; the meter counts it."""
        seen: list[tuple[Tensor, Tensor]] = []
        self.seeds = []
        counted = counted_in(targets)
        weight = self.weight(counted)
        taught = self.taught(inputs)

        def criterion(out: Any) -> Tensor:
            loss, logits = self.criterion(out, targets, taught)
            seen.append((loss.detach(), logits.detach()))
            return loss

        def forward() -> Any:
            out = self.network(inputs)
            if (seed := self.tempered.control.ledger.last_seed) is not None:
                self.seeds.append(seed)
            return out

        with self.autocast():
            total = self.tempered.loss(forward, criterion, counted, weight)
        losses = torch.stack([loss for loss, _ in seen])  # a recipe that compares passes asks once for each
        means = losses.mean(), self.task.right(seen[0][1], targets)
        loss, right = means if weight is None else (weight * mean for mean in means)
        self.meter.update(*self.ranks.mean((total.detach(), loss, right), self.share))
        return total

    def weight(self, counted: Tensor | None) -> Tensor | None:
        """What a loss must be multiplied with that is a mean over what counts in a batch, and not over its samples.

        counted: boolean, which predictions count; none: all. A rank whose samples have more of them counts for more.
        """
        if counted is None or self.ranks.alone:
            return None
        here = counted.sum().float()
        return here / self.ranks.sum(here).clamp_min(1) / self.share

    @torch.no_grad()
    def taught(self, inputs: Tensor) -> Tensor | None:
        """What the teacher says to a batch, which the student sees in just the same form; None without a teacher."""
        if self.teacher is None:
            return None
        with self.autocast():
            return logits_of(self.teacher(inputs)).float()

    def criterion(self, out: Any, targets: Tensor, taught: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss of an output, the task's own and the teacher's share in it, and what the task sees of the output.

        taught: the teacher's logits.
        """
        logits, budget = output_of(self.task, out), self.budget
        loss = self.task.loss(logits, targets, budget.smoothing)
        if taught is not None:
            far = distillation_loss(answer(out).float(), taught, budget.distillation, budget.temperature)
            loss = (1 - budget.distillation_alpha) * loss + budget.distillation_alpha * far
        return loss, logits

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Lower precision where the budget asks for it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.budget.precision == "bfloat16")

    def set_lr(self, rate: float) -> None:
        """Give every group of parameters the rate of this step, times its own scale."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # in place: a CUDA graph has it by its address
                group["lr"].fill_(rate * group["scale"])
            else:
                group["lr"] = rate * group["scale"]

    def to_training(self) -> None:
        """Training mode; what is frozen keeps its running statistics."""
        self.model.train()
        for norm in frozen_norms(self.model):
            norm.eval()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the averaged weights where there are any; afterwards, as it was."""
        swapped = self.average.swapped_in() if self.average is not None else contextlib.nullcontext()
        self.model.eval()
        try:
            with swapped, torch.no_grad(), self.autocast():
                yield self.model
        finally:
            self.to_training()

    def sync_statistics(self) -> None:
        """Give every rank the running statistics of the main one; parameters are equal without that."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        own = {id(buffer) for norm in norms for buffer in norm.buffers()}
        self.ranks.overwrite([buffer for buffer in self.model.buffers() if id(buffer) in own])
        if self.average is not None:
            pairs = zip(self.average.live, self.average.values, strict=True)
            self.ranks.overwrite([value for live, value in pairs if id(live) in own])

    def weights(self) -> dict[str, Tensor]:
        """A copy of what is evaluated; of a sharded model, this rank's part."""
        with self.evaluating() as model:
            return {name: copy_of(value) for name, value in model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """Everything that later steps depend on, except random states."""
        average = None if self.average is None else self.average.values
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"], "average": average}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # the budget's own, on this device
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if self.average is not None:
            self.average.load(state["average"])


def make_optimizer(
    model: nn.Module,
    budget: Budget,
    device: torch.device,
    *,
    graphs: bool = True,
    scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Adam with L2 or AdamW, in one fused kernel.

    graphs: whether a CUDA graph may hold its steps; on a GPU the rate then is a tensor, which a graph can read.
    scales: what the learning rate of parameters is multiplied with, by their names; those that are left out: by 1.
    """
    kind: Callable[..., torch.optim.Optimizer] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        budget.optimizer
    ]
    captured = graphs and device.type == "cuda"
    groups = parameter_groups(model, budget.decay, scales or {})
    for group in groups:
        rate = budget.lr * group["scale"]
        group["lr"] = torch.tensor(rate, device=device) if captured else rate
    return kind(groups, lr=budget.lr, weight_decay=budget.weight_decay, fused=True, capturable=captured)


def parameter_groups(
    model: nn.Module, decay: Literal["all", "matrices"], scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The trained parameters in groups of equal learning rate, weight decay or none: learnt rates always have none.

    decay: "matrices" leaves out whatever has one dimension, which are biases, norms and scales, and what the model
        itself names: timm's models have a `no_weight_decay()`, with class token and positions in it.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alone = {added.name for added in added_parameters(model) if added.side == "rate"}
    if decay == "matrices":
        named = set(cast(Any, model).no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
        alone |= {name for name, p in trained.items() if p.ndim <= 1 or name in named}
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for undecayed in (False, True):
        for name, p in trained.items():
            if (name in alone) == undecayed:
                scale = scales.get(name, 1.0)
                made = {"params": [], "scale": scale} | ({"weight_decay": 0.0} if undecayed else {})
                groups.setdefault((undecayed, scale), made)["params"].append(p)
    return list(groups.values())


class Average:
    """An exponential moving average of a model's weights; what is not a floating-point number is copied."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = [*model.parameters(), *model.buffers()]
        self.values = [tensor.detach().clone() for tensor in self.live]

    @torch.no_grad()
    def update(self) -> None:
        for value, live in zip(self.values, self.live, strict=True):
            if value.is_floating_point():
                value.lerp_(live, 1 - self.decay)
            else:
                value.copy_(live)

    @torch.no_grad()
    def load(self, values: list[Tensor]) -> None:
        for value, given in zip(self.values, values, strict=True):
            value.copy_(given)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager: inside it, the model has the averaged weights."""
        kept = [tensor.detach().clone() for tensor in self.live]
        self._write(self.values)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for live, value in zip(self.live, values, strict=True):
            live.copy_(value)


def refuse_comparisons(tempered: Tempered, task: Task) -> None:
    """Raise where a recipe compares what passes say of classes, and the task has none to say anything of."""
    comparison = next((method for method in tempered.methods if isinstance(method, LossTerm)), None)
    if comparison is not None and comparison.strength and getattr(task, "continuous", False):
        raise ParameterError(
            f"{comparison} compares passes by the probabilities that they give to classes, and '{task.name}' predicts "
            "numbers. Leave it out of pre-training; fine-tuning can have it."
        )
