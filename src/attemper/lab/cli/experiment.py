"""`attemper experiment`: the papers' experiments on what goes on inside a model."""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from attemper.lab.cli.options import Data, Json, Text
from attemper.lab.cli.printing import console, print_json, say


@dataclass(frozen=True)
class Experiment:
    """Train the arms of a paper's experiment and look inside them; without a name, list the experiments.

    Writes the figures as JSON and Markdown, and a chart over the blocks as PNG.

    Examples
      attemper experiment
      attemper experiment skips
      attemper experiment skips --task cifar10 --vit vit-tiny --mixer convmixer --epochs 40 --batch-size 128
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Which experiment; otherwise they are listed."""
    task: str = "digits"
    """Such as digits, cifar10, folder:PATH."""
    vit: str = "vit-digits"
    """The transformer of the arms."""
    mixer: str = "convmixer(width=32, depth=4, kernel=3)"
    """The network without attention, where an arm has one."""
    seeds: int = 3
    """How many."""
    epochs: int = 20
    """Of every run."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 1e-3
    """Learning rate."""
    out: Path = Path("experiments")
    """Where files are written."""
    data: Data = None
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.experiments import EXPERIMENTS, find_experiment, run_experiment
        from attemper.lab.tasks.registry import open_task
        from attemper.lab.training.schedule import schedule_notes
        from attemper.lab.training.spec import Budget

        where = console(json=self.json)
        if self.name is None:
            from rich.table import Table as Grid

            grid = Grid("name", "experiment", "arms", box=None, pad_edge=False, header_style="bold")
            for name, each in EXPERIMENTS.items():
                grid.add_row(name, each.title, str(len(each.arms)))
            where.print(grid)
            return 0
        experiment = find_experiment(self.name)
        task = open_task(self.task, self.data)
        budget = Budget(epochs=self.epochs, batch_size=self.batch_size, lr=self.lr)
        asked = {"task": task.name, "models": {"ViT": self.vit, "mixer": self.mixer}, "seeds": self.seeds}
        check_out(self.out, self.name, {**asked, "budget": budget.to_dict()})
        notes = [f"note: {note}" for note in schedule_notes(budget)]
        say(where, experiment.title, f"In the paper: {experiment.expected}", *notes, "")
        found = run_experiment(
            self.name,
            task,
            budget=budget,
            seeds=self.seeds,
            vit=self.vit,
            mixer=self.mixer,
            device=self.device,
            log=lambda line: say(where, line),
        )
        say(where, "", *markdown(found).splitlines(), "", f"Written: {write(found, self.out)}")
        if self.json:
            print_json(found)
        return 0


def markdown(found: dict[str, Any]) -> str:
    """A table with one row per arm."""
    measure = ("κ", "going in", "behind the last block")
    if found["measure"] == "entropy":
        measure = ("entropy", "first block", "last block")
    what, first, last = measure
    lines = [
        f"| arm | test {found['metric']}, % | {what}, {first} | {what}, {last} | diverged |",
        "|---|---|---|---|---|",
    ]
    for arm in found["arms"]:
        spread = "" if arm["deviation"] is None else f" ± {100 * arm['deviation']:.2f}"
        ends = " | ".join("–" if value is None else f"{value:.3g}" for value in (arm["median"][0], arm["median"][-1]))
        lines.append(f"| {arm['name']} | {100 * arm['mean']:.2f}{spread} | {ends} | {arm['diverged']} |")
    return "\n".join(lines)


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
        told = f"its {other} is {found[other]}, not {wanted[other]}" if other in found else "it is of no experiment"
        raise ParameterError(f"{there[0]} is there already, and {told}. Choose another folder with --out.")


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment says of itself, without nesting."""
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    return {**found, **{name: value for each in nested.values() for name, value in each.items()}} | dict.fromkeys(
        nested
    )


def write(found: dict[str, Any], out: Path) -> Path:
    """JSON, Markdown and PNG into a folder; returns the path of the chart."""
    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors
    from attemper.lab.report.png import curves

    condition = found["measure"] == "condition"
    chart = curves(
        {arm["name"]: arm["median"] for arm in found["arms"]},
        title=f"{'Condition number of tokens' if condition else 'Attention entropy'} after training, {found['task']}",
        y="κ, before the first block and behind every block" if condition else "share of its maximum",
        x="blocks passed" if condition else "block",
        log=condition,
    )
    with folder_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{found['experiment']}.png"
        chart.save(path, "PNG", optimize=True)
        atomic_write(out / f"{found['experiment']}.json", json_module.dumps(found, indent=1, allow_nan=False) + "\n")
        atomic_write(out / f"{found['experiment']}.md", markdown(found) + "\n")
    return path
