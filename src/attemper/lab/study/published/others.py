"""The other papers' tables on CIFAR. † marks figures from third-party reading notes.

None of these sources gives a training set-up for CIFAR, so the same one of ours serves all of them: AdamW, mixup and
cutmix on crop and flip, label smoothing. Compare rows with each other, and levels with care.
"""

from typing import Any

from attemper.lab.study.published.table import Row, Size, Table

OURS: dict[str, Any] = {
    "batch_size": 128,
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "clip": 1.0,
    "augment": "crop-flip+mixup(0.8)+cutmix(1.0)",
    "smoothing": 0.1,
}
FAST = {**OURS, "precision": "bfloat16"}
SET_UP = (
    "The training set-up is ours: AdamW, weight decay 0.05, batch 128, crop and flip, mixup, cutmix, label "
    "smoothing 0.1. 70 % of the training set is trained on, 30 % chooses the epoch."
)
NOTES = "† All figures are from third-party reading notes, not from the paper."
SMOKE = Size(
    task="digits", model="vit-digits", seeds=2, epochs=3, lr=(3e-3,), budget={"batch_size": 64, "warmup_epochs": 0.5}
)


def _sizes(task: str, small: str, full: str, *, epochs: int = 200) -> dict[str, Size]:
    return {
        "smoke": SMOKE,
        "small": Size(task=task, model=small, seeds=3, epochs=40, lr=(5e-4,), budget=FAST),
        "full": Size(task=task, model=full, seeds=5, epochs=epochs, lr=(1e-3, 5e-4), budget=OURS),
    }


def _label(task: str) -> str:
    return f"CIFAR-{task.removeprefix('cifar')}"


NOTHING = Row(name="none", recipe="none", note="our addition")


def _dropkey(task: str, increasing: float, constant: float, decreasing: float) -> Table:
    return Table(
        key=f"dropkey-schedules-{task}",
        title=f"DropKey's schedules on {_label(task)}",
        source="DropKey, CVPR 2023, T2T-ViT-19 †",
        caveats=(
            NOTES,
            "The figures are T2T-ViT-19's, most likely fine-tuned from ImageNet. A ViT-S for small images, trained "
            "from scratch, stands in for it.",
            "The formula of the schedules is ours: the project page gives none. A decreasing schedule drops about "
            "half as much as a constant one of the same base; the two rows with match=mean drop the same amount, "
            "and are ours.",
            SET_UP,
        ),
        rows=(
            NOTHING,
            Row(name="increasing", recipe="dropkey(0.3, schedule=increasing)", value=increasing),
            Row(name="constant", recipe="dropkey(0.3)", value=constant),
            Row(name="decreasing", recipe="dropkey(0.3, schedule=decreasing)", value=decreasing),
            Row(
                name="increasing, same mean",
                recipe="dropkey(0.3, schedule=increasing, match=mean)",
                note="our addition",
            ),
            Row(
                name="decreasing, same mean",
                recipe="dropkey(0.3, schedule=decreasing, match=mean)",
                note="our addition",
            ),
        ),
        sizes=_sizes(task, "vit-small", "vit-small"),
    )


DROPOUT = "dropattention(0.1, rescale=inverted) + ffdropout(0.1)"


def _attentiondrop(task: str, dropout: float, rdrop: float, hard: float, blur: float, both: float) -> Table:
    return Table(
        key=f"attentiondrop-{task}",
        title=f"AttentionDrop on {_label(task)}",
        source="AttentionDrop, arXiv:2504.12088, ViT-B/16 †",
        caveats=(
            NOTES,
            "The figures are ViT-B/16's, most likely pre-trained. Ours is trained from scratch on 32 × 32 images: a "
            "ViT-B for small images at full scale, a ViT-S at small scale.",
            "Rates and widths are our defaults, and dropout 0.1 on attention weights and in the MLP is our reading "
            "of the dropout row; R-Drop runs on top of it.",
            SET_UP,
        ),
        rows=(
            NOTHING,
            Row(name="dropout", recipe=DROPOUT, value=dropout),
            Row(name="R-Drop", recipe=f"{DROPOUT} + rdrop", value=rdrop),
            Row(name="hard masking", recipe="hardmask", value=hard),
            Row(name="blur", recipe="blur", value=blur),
            Row(name="blur + consistency", recipe="blur + consistency", value=both),
        ),
        sizes=_sizes(task, "vit-small", "vit-base"),
    )


BROADCAST = Table(
    key="cb-cifar100",
    title="Context broadcasting on CIFAR-100",
    source="Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, table S4",
    caveats=(
        "The paper trains ViT-S from scratch and gives nothing else about this table; its ImageNet set-up is DeiT's.",
        "Branches, positions and variants were published for ImageNet only. Position mid is left out: it equals end.",
        SET_UP,
    ),
    rows=(
        Row(name="none", recipe="none", value=74.73, note="ImageNet-1K: 79.9"),
        Row(name="cb", recipe="cb", value=75.43, note="ImageNet-1K: 80.5"),
        Row(name="cb, learned scale", recipe="cb(cb_s)", note="our addition here"),
        Row(name="cb in attention", recipe="cb(branch=attention)", note="ImageNet-1K: 80.1"),
        Row(name="cb in both branches", recipe="cb(branch=both)", note="ImageNet-1K: 80.1"),
        Row(name="cb in front of the MLP", recipe="cb(position=front)", note="ImageNet-1K: 79.9"),
        Row(name="gate", recipe="cb(gate)", note="ImageNet-1K: 80.4"),
        Row(name="hybrid", recipe="cb(hybrid)", note="ImageNet-1K: 80.5"),
    ),
    sizes=_sizes("cifar100", "vit-small", "vit-small", epochs=300),
)

SKIPS = "Always Skip Attention, ICCV 2025 †, approximate"
SKIPLESS = Table(
    key="skipless",
    title="A ViT without skip connections on CIFAR-10",
    source=SKIPS,
    caveats=(
        NOTES,
        "The figures are approximate, for ViT-Ti. Without attention's skip training is said to diverge: 70 is what "
        "was left.",
        SET_UP,
    ),
    rows=(
        Row(name="none", recipe="none", value=92.0, note="both skips"),
        Row(name="no MLP skip", recipe="skipless(mlp)", value=90.0),
        Row(name="no attention skip", recipe="skipless(attention)", value=70.0, note="diverges"),
        Row(name="no skip at all", recipe="skipless(both)", note="our addition"),
    ),
    sizes=_sizes("cifar10", "vit-tiny", "vit-tiny"),
)


def _convmixer(key: str, title: str, skip: bool) -> Table:
    """Skips of a ConvMixer belong to the model, not to a recipe: with and without are two plans of one row."""
    options = "" if skip else "(spatial_skip=False, channel_skip=False)"
    tiny = f"convmixer(channel_skip={skip}, depth=3, spatial_skip={skip}, width=32)"
    sizes = _sizes("cifar10", f"convmixer{options}", f"convmixer{options}")
    smoke = Size(**{**vars(SMOKE), "model": tiny})
    return Table(
        key=key,
        title=title,
        source=SKIPS,
        caveats=(
            NOTES,
            "No level was published: the two ConvMixers are said to lie within ± 0.2 points of each other. Compare the "
            "accuracy of skipless-convmixer with that of skipless-convmixer-bare.",
            SET_UP,
        ),
        rows=(Row(name="none", recipe="none", note="with its skips" if skip else "without any skip"),),
        sizes={**sizes, "smoke": smoke},
    )


TABLES = (
    _dropkey("cifar10", 96.6, 97.4, 97.6),
    _dropkey("cifar100", 77.2, 78.6, 79.2),
    _attentiondrop("cifar10", 93.5, 94.1, 94.5, 94.3, 94.8),
    _attentiondrop("cifar100", 74.2, 75.0, 75.3, 75.1, 75.6),
    BROADCAST,
    SKIPLESS,
    _convmixer("skipless-convmixer", "A ConvMixer with its skip connections on CIFAR-10", True),
    _convmixer("skipless-convmixer-bare", "A ConvMixer without any skip connection on CIFAR-10", False),
)
