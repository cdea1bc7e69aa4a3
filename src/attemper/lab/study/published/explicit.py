"""Explicit dropout, 2026: its main tables, and its ablation of strength by learning rate.

Vidhi Agrawal, Illia Oleksiienko, Alexandros Iosifidis. Read whole.
"""

from typing import Any

from attemper.lab.study.published.table import Row, Size, Table

PAPER = "Explicit Dropout, arXiv:2604.20505"
STRENGTHS = ("1e-3", "5e-3", "1e-4", "5e-4")
RATES = (1e-3, 5e-3, 1e-4, 5e-4)
"""Strengths and learning rates were searched over the same four values."""

COLUMNS = {
    "cifar10": "CIFAR-10, accuracy",
    "cifar100": "CIFAR-100, accuracy",
    "thumos14-kinetics": "THUMOS14 with Kinetics features, mAP",
    "thumos14-activitynet": "THUMOS14 with ActivityNet features, mAP",
    "gtzan": "GTZAN, accuracy",
}

PENALTY = "p=0.2, reduction=authors"

# Name, recipe, and (mean, deviation) over five seeds in the order of COLUMNS.
Figures = tuple[tuple[float, float], ...]
MAIN: tuple[tuple[str, str, Figures], ...] = (
    (
        "DropAttention + implicit FF",
        "dropattention(0.2, rescale=normalize, detach=true) + ffdropout(0.2)",
        ((85.24, 0.75), (58.01, 1.20), (62.03, 0.26), (53.89, 0.46), (84.84, 0.89)),
    ),
    (
        "DropKey + implicit FF",
        "dropkey(0.2) + ffdropout(0.2)",
        ((85.45, 0.41), (59.11, 1.23), (64.58, 0.33), (55.87, 0.61), (84.84, 0.89)),
    ),
    ("implicit FF", "ffdropout(0.2)", ((85.14, 0.63), (59.01, 1.13), (64.53, 0.47), (55.62, 0.74), (85.00, 0.86))),
    (
        "Arora Q + explicit FF",
        f"arora(q=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})",
        ((61.08, 0.80), (37.59, 0.79), (48.66, 6.52), (46.67, 2.03), (85.31, 0.86)),
    ),
    (
        "Arora K + explicit FF",
        f"arora(k=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})",
        ((47.01, 1.58), (29.61, 0.85), (51.84, 4.14), (44.52, 5.80), (84.22, 1.02)),
    ),
    (
        "Arora V + explicit FF",
        f"arora(v=λ, {PENALTY}) + explicit(ff=λ, {PENALTY})",
        ((59.22, 1.80), (37.16, 1.51), (52.23, 7.40), (36.96, 2.28), (85.16, 0.55)),
    ),
    (
        "Arora FF",
        f"arora(ff=λ, {PENALTY})",
        ((86.02, 0.51), (55.42, 1.37), (57.76, 0.90), (48.44, 1.05), (84.84, 0.43)),
    ),
    (
        "explicit FF",
        f"explicit(ff=λ, {PENALTY})",
        ((86.14, 0.36), (56.81, 2.84), (63.96, 0.46), (54.92, 0.33), (85.16, 0.55)),
    ),
    (
        "explicit Q + explicit FF",
        f"explicit(q=λ, ff=λ, {PENALTY})",
        ((83.92, 0.98), (53.79, 4.82), (63.70, 0.56), (54.98, 0.84), (85.68, 0.65)),
    ),
    (
        "explicit K + explicit FF",
        f"explicit(k=λ, ff=λ, {PENALTY})",
        ((84.06, 0.85), (51.53, 0.90), (63.78, 0.54), (54.92, 0.76), (85.78, 0.65)),
    ),
    (
        "explicit V + explicit FF",
        f"explicit(v=λ, ff=λ, {PENALTY})",
        ((86.38, 0.44), (55.15, 0.84), (64.68, 0.36), (56.51, 0.37), (85.00, 0.86)),
    ),
    (
        "explicit AV + explicit FF",
        f"explicit(av=λ, ff=λ, {PENALTY})",
        ((86.11, 0.41), (56.62, 2.03), (64.24, 0.40), (56.10, 0.55), (85.00, 0.35)),
    ),
)

# CIFAR-10, by component and strength, then (mean, deviation) in the order of RATES.
ABLATION: dict[tuple[str, str], Figures] = {
    ("K", "1e-3"): ((83.65, 0.81), (79.56, 5.18), (81.15, 1.53), (84.06, 0.85)),
    ("K", "5e-3"): ((66.48, 2.19), (61.02, 5.84), (69.46, 0.94), (68.30, 0.71)),
    ("K", "1e-4"): ((78.02, 0.72), (77.61, 0.65), (78.80, 0.98), (78.09, 1.01)),
    ("K", "5e-4"): ((83.91, 0.84), (81.87, 0.99), (82.96, 1.37), (83.73, 0.66)),
    ("Q", "1e-3"): ((83.44, 0.94), (79.08, 5.31), (80.76, 1.30), (83.74, 0.45)),
    ("Q", "5e-3"): ((67.17, 0.36), (58.33, 1.66), (69.16, 0.72), (68.81, 0.32)),
    ("Q", "1e-4"): ((78.18, 0.62), (77.65, 0.56), (78.81, 1.03), (78.23, 0.90)),
    ("Q", "5e-4"): ((83.92, 0.98), (81.93, 1.02), (83.33, 1.22), (83.70, 0.65)),
    ("V", "1e-3"): ((86.11, 0.38), (85.91, 0.78), (85.66, 0.82), (85.85, 0.42)),
    ("V", "5e-3"): ((70.57, 1.38), (71.31, 0.44), (70.61, 1.44), (70.57, 1.25)),
    ("V", "1e-4"): ((78.79, 0.54), (78.14, 0.54), (79.28, 0.53), (78.99, 0.51)),
    ("V", "5e-4"): ((86.38, 0.44), (86.16, 0.48), (85.92, 0.62), (86.05, 0.57)),
    ("AV", "1e-3"): ((85.47, 0.63), (80.90, 1.63), (85.71, 0.52), (85.48, 0.87)),
    ("AV", "5e-3"): ((70.58, 0.80), (70.23, 0.96), (70.73, 0.78), (70.41, 0.88)),
    ("AV", "1e-4"): ((79.80, 0.57), (78.88, 0.49), (80.11, 0.41), (79.84, 0.67)),
    ("AV", "5e-4"): ((85.20, 0.72), (84.30, 0.67), (86.11, 0.41), (86.04, 0.61)),
}

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
    task="digits",
    model="vit-digits",
    seeds=2,
    epochs=3,
    lr=(3e-3,),
    strengths=("5e-4",),
    budget={"batch_size": 64, "warmup_epochs": 0.5},
)
LIKELY = {"batch_size": 128, "augment": "crop-flip"}
"""The rest of what is most likely is what `Budget` has as its defaults."""


def main_rows(column: str) -> tuple[Row, ...]:
    """The twelve rows of a column of `COLUMNS`, after the one without any dropout."""
    at = list(COLUMNS).index(column)
    rows = (
        Row(name=name, recipe=recipe, value=figures[at][0], deviation=figures[at][1]) for name, recipe, figures in MAIN
    )
    return (NOTHING, *rows)


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


def _main(column: str, number: int) -> Table:
    return Table(
        key=f"explicit-{column}",
        title=f"Explicit dropout on CIFAR-{column.removeprefix('cifar')}",
        source=f"{PAPER}, table {number}",
        caveats=(*SETTING, *CHOICE),
        rows=main_rows(column),
        sizes=sizes(SMOKE, column, "vit-cifar", (40, 200), 1e-3, {**LIKELY, "precision": "bfloat16"}, LIKELY),
    )


def _ablation(at: int) -> Table:
    """One column of the ablation: a plan has one learning rate for what it compares cell by cell."""
    rate = STRENGTHS[at]
    rows = [
        Row(
            name=f"{component} {strength}",
            recipe=f"explicit({component.lower()}={strength}, ff={strength}, {PENALTY})",
            value=figures[at][0],
            deviation=figures[at][1],
        )
        for (component, strength), figures in ABLATION.items()
    ]
    small = {**LIKELY, "precision": "bfloat16"}
    return Table(
        key=f"explicit-ablation-{rate}",
        title=f"Explicit dropout on CIFAR-10, strengths at learning rate {rate}",
        source=f"{PAPER}, table 5, learning rate {rate}",
        caveats=(
            *SETTING,
            "Explicit dropout on the feed-forward layers with the same λ: presumably, the paper does not say.",
        ),
        rows=(NOTHING, *rows),
        sizes={
            "smoke": Size(task="digits", model="vit-digits", seeds=1, epochs=3, lr=(RATES[at],), budget=SMOKE.budget),
            "small": Size(task="cifar10", model="vit-cifar", seeds=3, epochs=40, lr=(RATES[at],), budget=small),
            "full": Size(task="cifar10", model="vit-cifar", seeds=5, epochs=200, lr=(RATES[at],), budget=LIKELY),
        },
    )


TABLES = (_main("cifar10", 1), _main("cifar100", 2), *(_ablation(at) for at in range(len(RATES))))
