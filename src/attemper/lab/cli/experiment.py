"""`attemper experiment`: the papers' experiments on what goes on inside a model."""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attemper.lab.cli.options import Data, Json, Text, Texts, option
from attemper.lab.cli.printing import console, print_json, say


@dataclass(frozen=True)
class Experiment:
    """Train the arms of a paper's experiment and look inside them; without a name, list the experiments.

    Every finished run is kept in the folder, so that the same command goes on where it was stopped; --arms and
    --only-seeds do a part of it. Writes what was found so far as JSON, Markdown and PNG.

    Examples
      attemper experiment
      attemper experiment skips
      attemper experiment skips --arms resnet --only-seeds 1
      attemper experiment skips --task cifar10 --vit vit-tiny --mixer convmixer --resnet resnet --epochs 40
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Which experiment; otherwise they are listed."""
    task: str = "digits"
    """Such as digits, cifar10, folder:PATH."""
    vit: str = "vit-digits"
    """The transformer of the arms."""
    mixer: str = "convmixer(width=32, depth=4, kernel=3)"
    """The mixer without attention, where an arm has one."""
    resnet: str = "resnet(width=8, depth=14)"
    """The residual network without attention, where an arm has one."""
    seeds: int = 3
    """How many."""
    arms: Texts = ()
    """Run these arms only, by their names or parts of them."""
    only_seeds: Annotated[tuple[int, ...], option(metavar="N …")] = ()
    """Run these seeds only, counted from 0."""
    epochs: int = 20
    """Of every run."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 1e-3
    """Learning rate."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate rises."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass in training."""
    jobs: int = 1
    """Runs at a time, each in a process of its own: small networks leave most of a GPU idle."""
    out: Path = Path("experiments")
    """Where files are written."""
    data: Data = None
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        screen = console(json=self.json)
        if self.name is None:
            screen.print(_listing())
            return 0
        from attemper.lab.experiments.catalogue import find_experiment
        from attemper.lab.experiments.running import asked, run_experiment
        from attemper.lab.experiments.tables import markdown
        from attemper.lab.tasks.registry import open_task
        from attemper.lab.training.schedule import schedule_notes
        from attemper.lab.training.spec import Budget

        experiment = find_experiment(self.name)
        task = open_task(self.task, self.data)
        budget = Budget(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            warmup_epochs=self.warmup_epochs,
            precision=self.precision,
        )
        models = {"VIT": self.vit, "MIXER": self.mixer, "RESNET": self.resnet}
        check_out(self.out, self.name, asked(experiment, task, budget, models))
        notes = [f"note: {note}" for note in schedule_notes(budget)]
        say(screen, experiment.title, f"In the paper: {experiment.expected}", *notes, "")
        found = run_experiment(
            self.name,
            task,
            budget=budget,
            seeds=self.seeds,
            arms=self.arms,
            only_seeds=self.only_seeds,
            models=models,
            out=self.out,
            device=self.device,
            jobs=self.jobs,
            data=self.data,
            log=lambda line: say(screen, line),
        )
        say(screen, "", *markdown(found).splitlines(), "", f"Written: {write(found, self.out)}")
        if self.json:
            print_json(found)
        return 0


def _listing() -> Any:
    """The experiments as a table."""
    from rich.table import Table as Grid

    from attemper.lab.experiments.catalogue import EXPERIMENTS

    grid = Grid("name", "experiment", "arms", box=None, pad_edge=False, header_style="bold")
    for name, each in EXPERIMENTS.items():
        grid.add_row(name, each.title, str(len(each.arms)))
    return grid


def check_out(out: Path, name: str, asked: dict[str, Any]) -> None:
    """Raise if files of an experiment are there already and tell of another task, other models or another budget."""
    from attemper.errors import ParameterError
    from attemper.files import read_bytes
    from attemper.lab.folders import read_object

    paths = [out / f"{name}.{ending}" for ending in ("json", "md", "png")]
    there = [path for path in paths if path.exists()]
    if not there:
        return
    found, wanted = _flat(read_object(read_bytes(paths[0])) if paths[0].is_file() else {}), _flat(asked)
    other = next((what for what, value in wanted.items() if found.get(what) != value), None)
    if other is not None:
        reason = f"its {other} is {found[other]}, not {wanted[other]}" if other in found else "it is of no experiment"
        raise ParameterError(f"{there[0]} is there already, and {reason}. Choose another folder with --out.")


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment says of itself, without nesting."""
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    return {**found, **{name: value for each in nested.values() for name, value in each.items()}} | dict.fromkeys(
        nested
    )


def write(found: dict[str, Any], out: Path) -> Path:
    """JSON, Markdown and PNG into a folder; returns the path of the chart."""
    from attemper.files import atomic_write
    from attemper.lab.experiments.charts import chart
    from attemper.lab.experiments.tables import markdown
    from attemper.lab.folders import folder_errors

    picture = chart(found)
    with folder_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{found['experiment']}.png"
        picture.save(path, "PNG", optimize=True)
        atomic_write(out / f"{found['experiment']}.json", json_module.dumps(found, indent=1, allow_nan=False) + "\n")
        atomic_write(out / f"{found['experiment']}.md", markdown(found) + "\n")
    return path
