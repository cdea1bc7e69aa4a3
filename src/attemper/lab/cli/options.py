"""Options that several commands have, each described once."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT …", help_behavior_hint="")]
Number = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Numbers = Annotated[tuple[float, ...], tyro.conf.arg(metavar="X …", help_behavior_hint="")]
Writable = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help="The study's folder.")]
Suites = Annotated[
    str,
    tyro.conf.arg(
        metavar="SUITES",
        help="What is measured beside accuracy, joined by commas: calibration, robustness, stochastic; with options in "
        'brackets, such as "robustness(steps=20)".',
        help_behavior_hint="",
    ),
]
Data = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="Where data sets lie on this machine; otherwise the variable ATTEMPER_DATA says it, else it is ./data.",
        help_behavior_hint="",
    ),
]
Parallel = Annotated[
    Literal["ddp", "fsdp"] | None,
    tyro.conf.arg(
        help="Under torchrun or accelerate launch: ddp, the whole model in every process, or fsdp, a part in each; "
        "otherwise ddp.",
        help_behavior_hint="",
    ),
]
Workers = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N",
        help="Runs side by side; otherwise one per core, or as many as fit on the GPUs or the cluster.",
        help_behavior_hint="",
    ),
]
Trackers = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="NAME …",
        help="Send curves while training: tensorboard (event files in the folder), trackio, wandb, or one that another "
        "package adds.",
        help_behavior_hint="",
    ),
]
Costs = Annotated[
    bool,
    tyro.conf.arg(
        name="no-costs", help="Do not measure what a training step costs with each recipe.", help_behavior_hint=""
    ),
]
Json = Annotated[
    bool, tyro.conf.arg(help="Print the result as JSON; progress goes to standard error.", help_behavior_hint="")
]
Change = Annotated[
    bool,
    tyro.conf.arg(help="Use a folder that holds another plan's study; results in common stay.", help_behavior_hint=""),
]
