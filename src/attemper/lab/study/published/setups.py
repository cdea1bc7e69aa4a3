"""Training set-ups that several tables share, and what their publications say of them."""

from typing import Any

from attemper.lab.study.published.table import Size, Stated

IMAGENET = "folder:imagenet(size=224)"
ON_IMAGENET = "ImageNet-1K"

# ------------------------------------------------------------------------------------------------------------- DeiT
AUGMENT = "resized-crop+randaugment(27, p=0.5, spread=1.5)+erasing(0.25, fill=noise)+mixup(0.8)+cutmix(1.0)"
DEIT: dict[str, Any] = {
    "batch_size": 1024,
    "min_lr": 1e-5,
    "warmup_epochs": 5.0,
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "decay": "matrices",
    "ema": 0.99996,
    "precision": "bfloat16",
    "smoothing": 0.1,
    "augment": AUGMENT,
    "validation": 0.02,
}
"""DeiT's training but for its repeated augmentation: every batch has different images."""
DEIT_LR = 1e-3
"""DeiT's rule, 5e-4 for every 512 images of a batch, at 1,024."""
REPEATED: dict[str, Any] = {"batch_size": 1026, "repeats": 3}
"""The repeated augmentation: 1,024 images with room for whole repeats."""
TEACHER: dict[str, Any] = {
    "teacher": "timm:regnety_160.deit_in1k(pretrained=true)",
    "distillation": "hard",
    "distillation_alpha": 0.5,
}
SHORT: dict[str, Any] = {**DEIT, "batch_size": 512, "ema": None, "validation": 0.1}
"""The same for an hour on CIFAR: less than an average of weights over 20,000 steps could follow, so without one."""
SHORT_LR = 5e-4


def deit_settings(epochs: int = 300, warmup: float = 5.0) -> tuple[Stated, ...]:
    """What the supplement on context broadcasting states by naming DeiT, as DeiT's paper has it."""

    def named(name: str, value: Any, text: str) -> Stated:
        return Stated(name=name, printed=f"DeiT's: {text}", value=value)

    return (
        Stated(name="epochs", printed=str(epochs) if epochs != 300 else "DeiT's: 300", value=epochs),
        Stated(name="lr", printed="DeiT's: 5e-4 for every 512 images", value=[DEIT_LR], also=([SHORT_LR],)),
        named("batch_size", 1024, "1,024"),
        named("min_lr", 1e-5, "1e-5"),
        Stated(name="warmup_epochs", printed=f"{warmup:g}", value=warmup),
        named("optimizer", "adamw", "AdamW"),
        named("weight_decay", 0.05, "0.05"),
        named("smoothing", 0.1, "0.1"),
        named("augment", AUGMENT, "random crops, RandAugment, random erasing 0.25, mixup 0.8, cutmix 1.0"),
    )


def is_on(task: tuple[str, str], model: tuple[str, str] | None = None, seeds: int | None = None) -> tuple[Stated, ...]:
    """Task and model as they are printed, each with what a plan that agrees has; and over how many runs."""
    found = [Stated(name="task", printed=task[0], value=task[1])]
    found += [Stated(name="model", printed=model[0], value=model[1])] if model else []
    found += [Stated(name="seeds", printed=str(seeds), value=seeds)] if seeds else []
    return tuple(found)


def on_imagenet(name: str, model: str) -> tuple[Stated, ...]:
    """ImageNet and a model that was trained there. name: of the model, as it is printed."""
    return is_on((ON_IMAGENET, IMAGENET), (name, model))


STAND_IN = "Small scale puts CIFAR-100 in the place of ImageNet: its figures cannot be compared."
NO_REPEATS = Stated(
    name="repeated augmentation",
    printed="none for ViT-Ti and ViT-S with CB",
    here="none in any row, as rows share their batches",
)
"""Said of the rows with CB alone."""

# ------------------------------------------------------------------------------------------------------------- CIFAR
OURS: dict[str, Any] = {
    "batch_size": 128,
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "clip": 1.0,
    "augment": "crop-flip+mixup(0.8)+cutmix(1.0)",
    "smoothing": 0.1,
}
FAST: dict[str, Any] = {**OURS, "precision": "bfloat16"}
SET_UP = (
    "The training set-up is ours: AdamW, weight decay 0.05, batch 128, crop and flip, mixup, cutmix, label "
    "smoothing 0.1. 70 % of the training set is trained on, 30 % chooses the epoch."
)
NOTES = "† All figures are from third-party reading notes, not from the paper."
DEIT_OURS = (
    "The training set-up is ours: the notes give none. It is DeiT's without repeated augmentation; at full scale 2 % "
    "of the training set choose the epoch."
)

# ------------------------------------------------------------------------------------------------------------- smoke
FEW = "digits(test=200, train=500)"
"""As many as show that a plan runs: a smoke run has up to 26 runs, and they should take a minute."""
DIGITS = Size(
    task=FEW, model="vit-digits", seeds=2, epochs=2, lr=(3e-3,), budget={"batch_size": 64, "warmup_epochs": 0.5}
)
NOISE = "noise(size=32, classes=4, train=128, test=32)"
"""For networks that 8 × 8 digits are too small for; nothing can be learnt from it."""


def smoke(stands_for: str, model: str = "vit-digits", task: str = FEW, **more: Any) -> Size:
    """A run that only shows that everything runs."""
    return Size(**{**vars(DIGITS), "task": task, "model": model, "stands_for": stands_for, **more})


def cifar_sizes(
    task: str, small: str, full: str, *, epochs: int = 200, evaluate: tuple[str, ...] = ()
) -> dict[str, Size]:
    """Three scales of a table on CIFAR, with our set-up."""
    return {
        "smoke": smoke(label(task), evaluate=evaluate),
        "small": Size(task=task, model=small, seeds=3, epochs=40, lr=(5e-4,), budget=FAST, evaluate=evaluate),
        "full": Size(task=task, model=full, seeds=5, epochs=epochs, lr=(1e-3, 5e-4), budget=OURS, evaluate=evaluate),
    }


def imagenet_sizes(
    model: str,
    small: str,
    *,
    smoke_size: Size,
    epochs: int = 300,
    evaluate: tuple[str, ...] = (),
    budget: dict[str, Any] = DEIT,
) -> dict[str, Size]:
    """Three scales of a table on ImageNet: itself, CIFAR-100 in its place, and the smoke run."""
    return {
        "smoke": smoke_size,
        "small": Size(
            task="cifar100", model=small, seeds=3, epochs=40, lr=(SHORT_LR,), budget=SHORT, evaluate=evaluate,
            stands_for=ON_IMAGENET,
        ),
        "full": Size(
            task=IMAGENET, model=model, seeds=3, epochs=epochs, lr=(DEIT_LR,), budget=budget, evaluate=evaluate
        ),
    }  # fmt: skip


def label(task: str) -> str:
    """How a task is called in a title.

    >>> label("cifar100")
    'CIFAR-100'
    """
    return f"CIFAR-{task.removeprefix('cifar')}"
