"""What a run is: task, model, recipe, seed and budget, small enough to be written into a file and hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any, Literal

from attemper.errors import ParameterError, quoted, shown, suggestion
from attemper.lab.call_syntax import is_own, parse_call, render_call
from attemper.lab.models.naming import is_pretrained
from attemper.lab.training.versions import BEFORE, Versions, versions_here

FORMAT = 1
"""Of result files, and of the text whose hash is a key. What results depend on is counted in `versions.RESULTS`."""
MOST = 1_000_000
"""Epochs, samples per step, batches per step. More would be a typing error."""


LATER = (
    "repeats",
    "decay",
    "teacher",
    "teacher_weights",
    "teacher_hash",
    "distillation",
    "distillation_alpha",
    "temperature",
    "last_epochs_without",
    "init",
    "init_hash",
    "keep_head",
    "layer_decay",
    "freeze",
    "code_hash",
)
"""Fields of a budget that were not there from the beginning."""
HASHES = ("teacher_hash", "init_hash", "code_hash")
"""Fields of a budget that are filled in when a run begins."""
PLACES = ("teacher_weights", "init")
"""Fields of a budget that say where a file lies, which is no part of a run: the hashes say what is in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How long and how a model is trained. The same for every recipe of a study."""

    epochs: int = 20
    """How often the training set is gone through."""
    batch_size: int = 128
    """Samples per step."""
    lr: float = 1e-3
    """The largest learning rate, after warm-up."""
    min_lr: float = 1e-5
    """Where the cosine ends."""
    warmup_epochs: float = 5.0
    """Epochs (or a part of one) over which the rate rises linearly from zero."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """adam: weight decay is part of the gradient; adamw: it acts on the weights themselves."""
    weight_decay: float = 5e-5
    """How strongly weights are drawn to zero."""
    clip: float | None = None
    """Largest norm of the whole gradient; none: not clipped."""
    ema: float | None = None
    """Decay of a moving average of the weights that is evaluated in their place; none: the weights themselves."""
    accumulate: int = 1
    """Batches per optimiser step."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the forward pass computes in; bfloat16: by autocast, with weights in float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    augment: str = "none"
    """Augmentations joined by '+', such as 'crop-flip+mixup(0.8)'."""
    smoothing: float = 0.0
    """Label smoothing."""
    validation: float = 0.3
    """Share of the training set that is held out to choose the epoch and the configuration."""
    loss_bound: float = 1e4
    """A training loss above it, or one that is not a number, ends the run as diverged."""
    repeats: int = 1
    """How often every batch holds each of its images, augmented differently each time. An epoch keeps its length."""
    decay: Literal["all", "matrices"] = "all"
    """What weight decay falls on; matrices: not on biases, norms and what the model's own no_weight_decay() names."""
    teacher: str | None = None
    """A trained model to learn from beside the labels, such as 'timm:regnety_160.deit_in1k(pretrained=true)'."""
    teacher_weights: str | None = None
    """The teacher's weights: a .safetensors or .pt file, or the folder of a finished run."""
    teacher_hash: str | None = None
    """Of the teacher's weights; filled in when a run begins. Given, other weights are refused."""
    distillation: Literal["hard", "soft"] = "hard"
    """What is learnt from the teacher; hard: its answer; soft: its probabilities at a temperature."""
    distillation_alpha: float = 0.5
    """Share of the teacher in the loss; the labels have the rest."""
    temperature: float = 3.0
    """What soft distillation divides logits by."""
    last_epochs_without: int = 0
    """Epochs at the end in which every rate is 0, so that a model trains as it will be tested."""
    init: str | None = None
    """Weights to start from: a .safetensors or .pt file, or the folder of a finished run; none: as the model says."""
    init_hash: str | None = None
    """Of the weights that training starts from; filled in when a run begins. Given, other weights are refused."""
    keep_head: bool = False
    """Start from the last layer of those weights too, where it has as many classes; otherwise it is made anew."""
    layer_decay: float = 1.0
    """The learning rate of a block is that of the block behind it times this; 1: all layers learn alike."""
    freeze: Literal["none", "stem", "backbone"] = "none"
    """What is not trained; stem: all before the first block; backbone: all but the last layer."""
    code_hash: str | None = None
    """Of the source of a model of one's own; filled in when a run begins. Given, other source is refused."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._read(field.name, str(field.type))
        self._check_count("epochs")
        self._check_count("batch_size")
        self._check("lr", self.lr > 0, "above 0")
        self._check("min_lr", self.min_lr >= 0, "at least 0")
        self._check("warmup_epochs", self.warmup_epochs >= 0, "at least 0")
        self._check("optimizer", self.optimizer in ("adam", "adamw"), "'adam' or 'adamw'")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("clip", self.clip is None or self.clip > 0, "above 0, or none")
        self._check("ema", self.ema is None or 0 < self.ema < 1, "between 0 and 1, or none")
        self._check_count("accumulate")
        self._check("precision", self.precision in ("float32", "bfloat16"), "'float32' or 'bfloat16'")
        self._check("smoothing", 0 <= self.smoothing < 1, "from 0 to below 1")
        self._check("validation", 0 < self.validation < 1, "between 0 and 1")
        self._check("loss_bound", self.loss_bound > 0, "above 0")
        self._check_count("repeats")
        self._check("decay", self.decay in ("all", "matrices"), "'all' or 'matrices'")
        self._check("distillation", self.distillation in ("hard", "soft"), "'hard' or 'soft'")
        self._check("distillation_alpha", 0 <= self.distillation_alpha <= 1, "from 0 to 1")
        self._check("temperature", self.temperature > 0, "above 0")
        self._check("last_epochs_without", 0 <= self.last_epochs_without < self.epochs, "from 0 to below the epochs")
        self._check("layer_decay", 0 < self.layer_decay <= 1, "above 0 and at most 1")
        self._check("freeze", self.freeze in ("none", "stem", "backbone"), "'none', 'stem' or 'backbone'")
        if self.batch_size % self.repeats:
            raise ParameterError(
                f"batch_size is {self.batch_size}, and every image is in a batch {self.repeats} times (repeats); it "
                f"must be a multiple of that, such as {-(-self.batch_size // self.repeats) * self.repeats}."
            )
        self._check_teacher()

    def _read(self, name: str, kind: str) -> None:
        """See that a value has its type. A whole number in place of a float becomes one, so that keys are equal."""
        value = getattr(self, name)
        if value is None and "None" in kind:
            return
        if kind.startswith("float") and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 10**300 else math.inf
            object.__setattr__(self, name, value)
        types = {"int": int, "float": float, "bool": bool, "str": str}
        expected = types.get(kind.removesuffix(" | None"))
        if expected is None:  # one of a few words: checked with the ranges
            return
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
            raise ParameterError(f"{name} is {shown(value)}; it must be {words[expected]}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterError(f"{name} is {value!r}; it must be a finite number.")

    def _check(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:
            raise ParameterError(f"{name} is {shown(getattr(self, name))}; it must be {allowed}.")

    def _check_count(self, name: str) -> None:
        self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check(name, getattr(self, name) <= MOST, f"at most {MOST:,}")

    def _check_teacher(self) -> None:
        """An option that could not have any effect is refused: it would be a typo."""
        if self.teacher is not None:
            try:
                text = render_call(*parse_call(self.teacher))
            except ParameterError as error:
                raise ParameterError(f"teacher is {self.teacher!r}: {error}") from None
            object.__setattr__(self, "teacher", text)  # equal teachers must give equal keys
            if self.distillation == "hard" and self.temperature != Budget.temperature:
                raise ParameterError(f"temperature is {self.temperature}; only soft distillation has one.")
            return
        for name in ("teacher_weights", "teacher_hash", "distillation", "distillation_alpha", "temperature"):
            if getattr(self, name) != getattr(Budget, name):
                raise ParameterError(f"{name} is {getattr(self, name)!r}, and there is no teacher to learn from.")

    def to_dict(self) -> dict[str, Any]:
        """The budget as plain data. Fields that came later are left out where they say nothing.

        So a budget without newer options is written as before, and runs keep their keys.
        """
        whole = dataclasses.asdict(self)
        return {name: value for name, value in whole.items() if name not in LATER or value != getattr(Budget, name)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Budget:
        """The budget written in a plan or in a result; a key that does not exist is refused."""
        if not isinstance(given, dict):
            raise ParameterError(f"A budget is an object of names and values, not {shown(given)}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ParameterError(f"A budget has no '{name}'.{suggestion(name, known)} It has: {', '.join(known)}.")
        return cls(**given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run, complete: with the same data it gives the same result."""

    task: str
    """Such as 'digits' or 'cifar10'; where the files lie on this machine is not part of it."""
    model: str
    """Such as 'vit-cifar', 'vit-cifar(depth=4)' or 'timm:vit_tiny_patch16_224'."""
    recipe: str
    """In the form that `attemper.render` gives."""
    seed: int
    """Of the split, the initial weights, the batch order and every random draw."""
    budget: Budget
    evaluate: tuple[str, ...] = ()
    """What is measured at the end beside accuracy and loss, such as 'calibration': suites of `lab.evaluation`."""
    versions: Versions = dataclasses.field(default_factory=versions_here)
    """Under which the run was begun, or the study that it belongs to."""

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data. What came later is left out where it says nothing, so older runs keep their keys."""
        whole = {**dataclasses.asdict(self), "budget": self.budget.to_dict(), "evaluate": list(self.evaluate)}
        if not self.evaluate:
            del whole["evaluate"]
        if self.versions == BEFORE:
            del whole["versions"]
        return whole

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> RunSpec:
        """The run that `to_dict` gave; whatever else a file holds in its place is refused."""
        _check_run(given)
        suites = tuple(given.get("evaluate", ()))
        versions = Versions.from_dict(given["versions"]) if "versions" in given else BEFORE
        budget = Budget.from_dict(given["budget"])
        return cls(**{**given, "budget": budget, "evaluate": suites, "versions": versions})

    def key(self, fingerprint: str) -> str:
        """The run's name on disk: a hash of everything that its result depends on, data and versions included.

        Weights of a teacher, or to start from, count by what they are, wherever their file lies.
        """
        if lacking := lacks_hashes(self.budget, self.model):
            what = {"teacher_hash": "the teacher's weights are", "init_hash": "the weights to start from are"}
            raise ParameterError(
                f"A run of '{self.model}' has no key before {what.get(lacking, 'the source of its model is')} known; "
                "attemper.lab.training.hashes.with_hashes(spec, task) looks at it."
            )
        whole = {"format": FORMAT, "data": fingerprint, **self.to_dict()}
        for place in PLACES:
            whole["budget"].pop(place, None)
        return hashlib.sha256(canonical(whole).encode()).hexdigest()[:20]


def lacks_hashes(budget: Budget, model: str) -> str | None:
    """The first hash that a run's key depends on and that is not known yet."""
    needed = {
        "teacher_hash": budget.teacher is not None,
        "init_hash": budget.init is not None or is_pretrained(model),
        "code_hash": is_own(model),
    }
    return next((name for name in HASHES if needed[name] and getattr(budget, name) is None), None)


def _check_run(given: Any) -> None:
    """Raise unless a value from a file is what `RunSpec.to_dict` gives."""
    if not isinstance(given, dict):
        raise ParameterError(f"A run is an object of names and values, not {shown(given)}.")
    kinds: dict[str, type] = {"task": str, "model": str, "recipe": str, "seed": int, "budget": dict, "versions": dict}
    for name, value in given.items():
        if name != "evaluate" and (name not in kinds or type(value) is not kinds[name]):
            raise ParameterError(f"A run has no {quoted(str(name))} that is {shown(value)}.")
    if missing := kinds.keys() - given.keys() - {"versions"}:
        raise ParameterError(f"A run needs {', '.join(sorted(missing))}.")
    suites = given.get("evaluate", [])
    if not isinstance(suites, list) or not all(isinstance(suite, str) for suite in suites):
        raise ParameterError(f"evaluate is {shown(suites)}; it must be a list of suites.")


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spare spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
