"""DropKey, CVPR 2023: against dropout, its schedules, its structured and shared forms. † marks figures from notes."""

from typing import Any

from attemper.lab.study.published.setups import (
    DEIT_OURS,
    IMAGENET,
    NOISE,
    NOTES,
    ON_IMAGENET,
    SET_UP,
    cifar_sizes,
    imagenet_sizes,
    is_on,
    label,
    smoke,
)
from attemper.lab.study.published.table import Column, Row, Size, Stated, Table, added, rows_of

NOTHING = added("none", "none")
RATE = "† p ≈ 0.05 suits light backbones and 0.1 heavy ones; which is which is our reading."
DROPOUT = "Dropout is what frameworks call attention dropout, at DropKey's rate: our reading."
LETTER = "The formula of the schedules is ours: the project page gives none. "


# ------------------------------------------------------------------------------- against dropout and none, on ImageNet
def _imagenet(key: str, name: str, p: float, model: str, small: str, tiny: Size) -> Table:
    """One row of the printed table, whose two columns are recipes here."""
    cells = {
        column: rows_of("dropkey/imagenet", (column,), {name: ("", "")})[0].cells for column in ("Dropout", "DropKey")
    }
    rate = Stated(
        name="dropout rate p",
        printed="† about 0.05 for light backbones, 0.1 for heavy ones",
        here=f"{p:g}",
        scales=("smoke", "small", "full"),
    )
    return Table(
        key=f"dropkey-{key}",
        title=f"DropKey against dropout, {name} on ImageNet",
        printed=("dropkey/imagenet",),
        caveats=(NOTES, RATE, DROPOUT, f"{LETTER}DropKey decreases over the blocks, as the paper advises.", DEIT_OURS),
        columns=(Column(title="top-1, %"),),
        rows=(
            NOTHING,
            Row(name="dropout", recipe=f"dropattention({p:g}, rescale=inverted)", cells=cells["Dropout"]),
            Row(name="DropKey", recipe=f"dropkey({p:g}, schedule=decreasing)", cells=cells["DropKey"]),
        ),
        sizes=imagenet_sizes(model, small, smoke_size=tiny),
        stated=(*is_on((ON_IMAGENET, IMAGENET), (name, model)), rate),
    )


SMALL_T2T = smoke(ON_IMAGENET, "t2t-vit(depth=3, heads=4, mlp=64, width=32)")
SMALL_VOLO = smoke(ON_IMAGENET, "timm:volo_d1_224(patch_size=4)", NOISE, seeds=1)
"""As it is: timm's VOLO has no options for its width and depth."""
SMALL_DEIT = smoke(ON_IMAGENET, "timm:deit_base_patch16_224(depth=3, embed_dim=32, num_heads=4, patch_size=2)")


# --------------------------------------------------------------------- against dropout and none, forms, on small images
def _forms(task: str) -> Table:
    return Table(
        key=f"dropkey-{task}",
        title=f"DropKey against dropout on {label(task)}, and its other forms",
        origin="DropKey, CVPR 2023, figure 3",
        printed=("dropkey/setup",),
        caveats=(
            "Figure 3 compares dropout with DropKey on CIFAR-10 and CIFAR-100; our copy of the project page has the "
            "picture's caption alone, so that every cell is blank.",
            "Structured forms: the page says that they are not essential for ViTs, and gives no figures. Windows are "
            "its own, 3 for block and 1 for cross. Shared forms are ours.",
            RATE,
            DROPOUT,
            SET_UP,
        ),
        rows=(
            NOTHING,
            Row(name="dropout", recipe="dropattention(0.1, rescale=inverted)"),
            Row(name="DropKey", recipe="dropkey(0.1, schedule=decreasing)"),
            Row(name="DropKey, constant", recipe="dropkey(0.1)"),
            Row(name="DropKey-Block", recipe="dropkey(0.1, structure=block, w=3)"),
            Row(name="DropKey-Cross", recipe="dropkey(0.1, structure=cross, w=1)"),
            added("shared by queries", "dropkey(0.1, share=queries)"),
            added("shared by heads", "dropkey(0.1, share=heads)"),
        ),
        sizes=cifar_sizes(task, "vit-small", "vit-small"),
        stated=(
            *is_on((label(task), task)),
            Stated(name="windows of block and cross", printed="3 and 1", scales=("smoke", "small", "full")),
        ),
    )


# ----------------------------------------------------------------------------------------------------------- schedules
def _schedules(task: str) -> Table:
    rows = {
        "Increasing": ("increasing", "dropkey(0.3, schedule=increasing)"),
        "Constant": ("constant", "dropkey(0.3)"),
        "Decreasing": ("decreasing", "dropkey(0.3, schedule=decreasing)"),
    }
    return Table(
        key=f"dropkey-schedules-{task}",
        title=f"DropKey's schedules on {label(task)}",
        printed=("dropkey/schedules", "dropkey/setup"),
        caveats=(
            NOTES,
            "The figures are T2T-ViT-19's, most likely fine-tuned from ImageNet. A ViT-S for small images, trained "
            "from scratch, stands in for it.",
            f"{LETTER}A decreasing schedule drops about "
            "half as much as a constant one of the same base; the two rows with match=mean drop the same amount, "
            "and are ours.",
            SET_UP,
        ),
        rows=(
            NOTHING,
            *rows_of("dropkey/schedules", (label(task),), rows),
            added("increasing, same mean", "dropkey(0.3, schedule=increasing, match=mean)"),
            added("decreasing, same mean", "dropkey(0.3, schedule=decreasing, match=mean)"),
        ),
        sizes=cifar_sizes(task, "vit-small", "vit-small"),
        stated=(
            *is_on((label(task), task), ("T2T-ViT-19", "t2t-vit-19")),
            Stated(name="base rate p", printed="0.3 †", scales=("smoke", "small", "full")),
        ),
    )


# ------------------------------------------------------------------------------------------------------------ detection
APS = {
    "AP": "",
    "AP50": "test AP50",
    "AP75": "test AP75",
    "APS": "test AP small",
    "APM": "test AP medium",
    "APL": "test AP large",
}
BOXES: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 1e-4, "clip": 0.1}
COCO = Table(
    key="dropkey-coco",
    title="DropKey against dropout, DETR on COCO",
    printed=("dropkey/coco",),
    caveats=(
        DROPOUT,
        "The training set-up is DETR's as far as tasks here have it; docs/detection.md says where it differs. The "
        "backbone must start from ImageNet's weights (--init of attemper train): without, DETR needs far longer.",
    ),
    columns=tuple(Column(title=f"{name}, %", metric=metric) for name, metric in APS.items()),
    rows=rows_of(
        "dropkey/coco",
        tuple(APS),
        {
            "DETR": ("none", "none"),
            "DETR + Dropout": ("dropout", "dropattention(0.1, rescale=inverted)"),
            "DETR + DropKey": ("DropKey", "dropkey(0.1, schedule=decreasing)"),
        },
    ),
    sizes={
        "smoke": Size(
            task="boxes(test=20, train=60)",
            model="detr(backbone=resnet10t, depth=1, heads=4, mlp=64, queries=10, width=32)",
            seeds=1, epochs=1, lr=(5e-4,), stands_for="COCO",
            budget={**BOXES, "batch_size": 16, "warmup_epochs": 0.2, "augment": "flip+crop"},
        ),
        "small": Size(
            task="boxes", model="anchor-detr", seeds=3, epochs=100, lr=(1e-3,), stands_for="COCO",
            budget={**BOXES, "batch_size": 32, "warmup_epochs": 1.0, "augment": "flip+crop+photometric"},
        ),
        "full": Size(
            task="coco:coco(size=640)", model="detr(backbone=resnet50, frozen=true)", seeds=3, epochs=300, lr=(1e-4,),
            budget={
                **BOXES, "batch_size": 16, "min_lr": 1e-6, "warmup_epochs": 1.0, "validation": 0.02,
                "augment": "flip+crop(least=0.6)+scale(0.75, most=1.25)",
            },
        ),
    },
    stated=is_on(("COCO", "coco:coco(size=640)"), ("DETR", "detr(backbone=resnet50, frozen=true)")),
)  # fmt: skip

TABLES = (
    _imagenet("t2t-14", "T2T-14", 0.05, "t2t-vit-14(patch=16)", "t2t-vit-14", SMALL_T2T),
    _imagenet("t2t-19", "T2T-19", 0.1, "t2t-vit-19(patch=16)", "t2t-vit-19", SMALL_T2T),
    _imagenet("volo-d1", "VOLO-d1", 0.05, "timm:volo_d1_224", "timm:volo_d1_224(patch_size=4)", SMALL_VOLO),
    _imagenet("volo-d2", "VOLO-d2", 0.1, "timm:volo_d2_224", "timm:volo_d1_224(patch_size=4)", SMALL_VOLO),
    _imagenet(
        "deit-b", "DeiT-B", 0.1, "timm:deit_base_patch16_224(drop_path_rate=0.1)", "vit-small(drop_path=0.1)",
        SMALL_DEIT,
    ),
    _forms("cifar10"),
    _forms("cifar100"),
    _schedules("cifar10"),
    _schedules("cifar100"),
    COCO,
)  # fmt: skip
