"""Options that several commands have, each described once."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def option(text: str | None = None, metavar: str | None = None, name: str | None = None) -> Any:
    """What help says of an option: its text, and what stands for its value."""
    return tyro.conf.arg(help=text, metavar=metavar, name=name, help_behavior_hint="")


Text = Annotated[str | None, option(metavar="TEXT")]
Texts = Annotated[tuple[str, ...], option(metavar="TEXT …")]
Number = Annotated[int | None, option(metavar="N")]
Numbers = Annotated[tuple[float, ...], option(metavar="X …")]
Real = Annotated[float | None, option(metavar="X")]
MARGIN = (
    "Differences of up to so many points do not matter: within them a recipe is equivalent. Otherwise the smaller "
    "of half a point and a tenth of the baseline's errors; of other metrics than accuracy 2 % of the baseline."
)
Points = Annotated[float | None, option(MARGIN, "POINTS")]
UNTIL = (
    "decided: recipes that are undecided get more seeds, one look after another, until they are better, worse or "
    "equivalent, or have --max-seeds; p and intervals are corrected for the looks."
)
Until = Annotated[Literal["decided"] | None, option(UNTIL)]
Writable = Annotated[Path | None, option(metavar="PATH")]

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help="The study's folder.")]
Run = Annotated[
    Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="The folder of 'attemper train', or of a study.")
]
OF = "The name of a recipe of the study; otherwise the best run of all on validation."
Of = Annotated[str | None, option(OF, "RECIPE")]
KEEP = "Whose weights the study keeps: those of the best run of every recipe, of all runs, or none; otherwise best."
Keep = Annotated[Literal["best", "all", "none"] | None, option(KEEP)]
STUDIES = "Folders of studies; a summary.json or a page of a study stands for its folder."
Studies = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STUDY …", help=STUDIES)]
SUITES = (
    "What is measured beside accuracy, joined by commas: calibration, robustness, stochastic; with options in "
    'brackets, such as "robustness(steps=20)".'
)
Suites = Annotated[str, option(SUITES, "SUITES")]
DATA = "Where data sets lie on this machine; otherwise the variable ATTEMPER_DATA says it, else it is ./data."
Data = Annotated[Path | None, option(DATA, "PATH")]
PARALLEL = (
    "Under torchrun or accelerate launch: ddp, the whole model in every process, or fsdp, a part in each; otherwise "
    "ddp."
)
Parallel = Annotated[Literal["ddp", "fsdp"] | None, option(PARALLEL)]
WORKERS = "Runs side by side; otherwise one per core, or as many as fit on the GPUs or the cluster."
Workers = Annotated[int | None, option(WORKERS, "N")]
TRACKERS = (
    "Send curves while training: tensorboard (event files in the folder), trackio, wandb, or one that another package "
    "adds."
)
Trackers = Annotated[tuple[str, ...], option(TRACKERS, "NAME …")]
Costs = Annotated[bool, option("Do not measure what a training step costs with each recipe.", name="no-costs")]
Json = Annotated[bool, option("Print the result as JSON; progress goes to standard error.")]
ACCEPT = "Go on with what was begun under other versions of torch or of Attemper's results; results say so."
Accept = Annotated[bool, option(ACCEPT)]
Change = Annotated[bool, option("Use a folder that holds another plan's study; results in common stay.")]
