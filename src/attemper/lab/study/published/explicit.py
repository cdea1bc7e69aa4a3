"""Explicit dropout, 2026: its main tables, and its ablation of strength by learning rate.

Vidhi Agrawal, Illia Oleksiienko, Alexandros Iosifidis. Read whole.
"""

from typing import Any

from attemper.lab.study.published.setups import FEW, is_on
from attemper.lab.study.published.table import Column, Row, Size, Stated, Table, rows_of

STRENGTHS = ("1e-3", "5e-3", "1e-4", "5e-4")
RATES = (1e-3, 5e-3, 1e-4, 5e-4)
"""Strengths and learning rates were searched over the same four values."""

PENALTY = "p=0.2, reduction=authors"
"""One reduction for all terms of a row, Arora's too."""

MAIN = {
    "DropAttention / implicit": (
        "DropAttention + implicit FF",
        "dropattention(0.2, rescale=normalize, detach=true) + ffdropout(0.2)",
    ),
    "DropKey / implicit": ("DropKey + implicit FF", "dropkey(0.2) + ffdropout(0.2)"),
    "None / implicit": ("implicit FF", "ffdropout(0.2)"),
    "Arora Q / explicit": ("Arora Q + explicit FF", f"arora(q=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})"),
    "Arora K / explicit": ("Arora K + explicit FF", f"arora(k=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})"),
    "Arora V / explicit": ("Arora V + explicit FF", f"arora(v=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})"),
    "None / Arora": ("Arora FF", f"arora(ff=λ, {PENALTY})"),
    "None / explicit": ("explicit FF", f"explicit(ff=λ, {PENALTY})"),
    "Explicit Q / explicit": ("explicit Q + explicit FF", f"explicit(q=λ, ff=λ, {PENALTY})"),
    "Explicit K / explicit": ("explicit K + explicit FF", f"explicit(k=λ, ff=λ, {PENALTY})"),
    "Explicit V / explicit": ("explicit V + explicit FF", f"explicit(v=λ, ff=λ, {PENALTY})"),
    "Explicit AV / explicit": ("explicit AV + explicit FF", f"explicit(av=λ, ff=λ, {PENALTY})"),
}
"""Rows as printed: attention / feed-forward, what they are called here, and the recipe."""

NOTHING = Row(name="none", recipe="none", note="no dropout at all: a row that the paper lacks")

SETTING = (
    "The paper gives seven blocks, p = 0.2, five seeds and the 70:30 split. Width 384, 12 heads, MLP 384, 4 × 4 "
    "patches, Adam, batch 128, cosine from the learning rate to 1e-5 with 5 warm-up epochs, 200 epochs and weight "
    "decay 5e-5 are most likely ones, from its authors' earlier public code. Crop and flip are our guess.",
    "Strengths are read with reduction=authors, Arora's too: a trace over tokens divided by their number and summed "
    "over the batch. The paper does not say so: its main text prints no divisor, its appendix B has ½ and 1/n for a "
    "linear layer, and which one its runs used is not known. At batch 128 this λ is 256 times that of reduction=mean.",
)
CHOICE = (
    "One λ serves attention and feed-forward layers: our reading. λ and the learning rate are chosen on validation "
    "here; the explicit rows of the paper equal the best test cells of its ablation.",
    "DropAttention stops the gradient through the sum of a row, as its paper writes it: otherwise it would equal "
    "DropKey.",
)

SMOKE = Size(
    task=FEW,
    model="vit-digits",
    seeds=2,
    epochs=2,
    lr=(3e-3,),
    strengths=("5e-4",),
    budget={"batch_size": 64, "warmup_epochs": 0.5},
)
LIKELY = {"batch_size": 128, "augment": "crop-flip", "validation": 0.3}
"""The rest of what is most likely is what `Budget` has as its defaults."""


def main_rows(column: str) -> tuple[Row, ...]:
    """The twelve rows of a main table, after the one without any dropout. column: its name among the printed ones."""
    printed = f"explicit/{column}"
    title = "mAP" if column.startswith("thumos") else "Accuracy (%)"
    return (NOTHING, *rows_of(printed, (title,), MAIN))


def main_settings(task: tuple[str, str], blocks: tuple[str, str], *, split: bool = True) -> tuple[Stated, ...]:
    """What the paper says of every main table. blocks: how it names the network, and the model."""
    shared = Stated(name="validation", printed="30 %", value=0.3)
    return (
        *is_on(task, blocks, seeds=5),
        Stated(name="lr", printed="1e-3, 5e-3, 1e-4, 5e-4", value=list(RATES)),
        Stated(name="λ", printed="1e-3, 5e-3, 1e-4, 5e-4", value=list(STRENGTHS)),
        Stated(name="dropout rate p", printed="0.2", scales=("smoke", "small", "full")),
        *((shared,) if split else ()),
    )


def sizes(
    smoke: Size, task: str, model: str, epochs: tuple[int, int], lr: float, small: dict[str, Any], full: dict[str, Any]
) -> dict[str, Size]:
    """Small: 3 seeds, two strengths; full: 5 seeds, all learning rates and strengths. epochs: of both; then budgets."""
    strengths = ("1e-3", "5e-4")
    return {
        "smoke": smoke,
        "small": Size(task=task, model=model, seeds=3, epochs=epochs[0], lr=(lr,), strengths=strengths, budget=small),
        "full": Size(task=task, model=model, seeds=5, epochs=epochs[1], lr=RATES, strengths=STRENGTHS, budget=full),
    }


def smoke_for(name: str, **more: Any) -> Size:
    """The smoke run of a table whose figures are for something else."""
    return Size(**{**vars(SMOKE), "stands_for": name, **more})


VIT = ("a ViT of 7 layers", "vit-cifar")


def _main(column: str) -> Table:
    name = f"CIFAR-{column.removeprefix('cifar')}"
    return Table(
        key=f"explicit-{column}",
        title=f"Explicit dropout on {name}",
        printed=(f"explicit/{column}", f"explicit/{column}-text", "explicit/setup"),
        caveats=(*SETTING, *CHOICE),
        rows=main_rows(column),
        sizes=sizes(smoke_for(name), column, "vit-cifar", (40, 200), 1e-3, {**LIKELY, "precision": "bfloat16"}, LIKELY),
        stated=main_settings((name, column), VIT),
    )


def _ablation(at: int) -> Table:
    """One column of the ablation: a plan has one learning rate for what it compares cell by cell."""
    rate, small = STRENGTHS[at], {**LIKELY, "precision": "bfloat16"}
    cells = {
        f"{part} {strength}": (f"{part} {strength}", f"explicit({part.lower()}={strength}, ff={strength}, {PENALTY})")
        for part in ("K", "Q", "V", "AV")
        for strength in STRENGTHS
    }
    return Table(
        key=f"explicit-ablation-{rate}",
        title=f"Explicit dropout on CIFAR-10, strengths at learning rate {rate}",
        printed=("explicit/cifar10-ablation", "explicit/cifar10-ablation-text", "explicit/setup"),
        caveats=(
            *SETTING,
            "Explicit dropout on the feed-forward layers with the same λ: presumably, the paper does not say.",
            "The text puts the best V at learning rate 5e-4, the table at 1e-3.",
        ),
        columns=(Column(title=f"accuracy at learning rate {rate}, %"),),
        rows=(NOTHING, *rows_of("explicit/cifar10-ablation", (f"lr {rate}",), cells)),
        sizes={
            "smoke": smoke_for("CIFAR-10", seeds=1, lr=(RATES[at],), strengths=()),
            "small": Size(task="cifar10", model="vit-cifar", seeds=3, epochs=40, lr=(RATES[at],), budget=small),
            "full": Size(task="cifar10", model="vit-cifar", seeds=5, epochs=200, lr=(RATES[at],), budget=LIKELY),
        },
        stated=(
            *is_on(("CIFAR-10", "cifar10"), VIT, seeds=5),
            Stated(name="lr", printed=rate, value=[RATES[at]]),
            Stated(name="validation", printed="30 %", value=0.3),
        ),
    )


TABLES = (_main("cifar10"), _main("cifar100"), *(_ablation(at) for at in range(len(RATES))))
