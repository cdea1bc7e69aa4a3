"""`attemper plan estimate`: hours and memory of a plan, from a short probe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attemper.errors import ParameterError, quoted
from attemper.lab.cli.options import Json, Number, Points, Text, Workers, option
from attemper.lab.cli.plan_options import PlanOptions
from attemper.lab.cli.printing import console, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from attemper.lab.study.estimate import Estimate
    from attemper.lab.study.plan import Plan
    from attemper.lab.study.pricing import Spread

GIB = 1024**3
MOST_GPUS = 1_000_000
MOST_STEPS = 1_000_000
IMAGES = (
    "In place of a task: so many made-up training images, and a twenty-fifth of that to test on; noise, or with boxes "
    "for a plan on boxes."
)
PILOT = (
    "With --difference: a study's folder, summary.json or page that shows how far the differences of seeds are apart; "
    "otherwise what is known of the task."
)


@dataclass(frozen=True)
class EstimateCommand(PlanOptions):
    """Tell how many hours and how much memory a plan will take, from some measured steps of every recipe.

    The steps are made in as many processes at once as there would be workers. Without data, --images measures on noise:
    reading images from disk is then not in the figures.

    Examples
      attemper plan estimate
      attemper plan estimate plan.yaml --gpus 1,8,64
      attemper plan estimate plan.yaml --difference 0.5 --pilot runs/pilot
      attemper plan estimate --images 1281167 --image-size 224 --model timm:vit_small_patch16_224 --epochs 300
    """

    images: Annotated[int | None, option(IMAGES, "N")] = None
    image_size: int = 224
    """With --images: their side in pixels."""
    classes: int = 1000
    """With --images: so many classes."""
    gpus: Text = None
    """Numbers of GPUs like this machine's to work out as well, such as 1,8,64."""
    workers: Workers = None
    per_gpu: Number = None
    """Runs side by side on one GPU; otherwise one."""
    steps: int = 20
    """Steps of every recipe that are measured."""
    difference: Points = None
    """Also tell how many seeds, and how long, it takes to see a difference of so many points in 80 of 100 studies."""
    pilot: Annotated[Path | None, option(PILOT, "STUDY")] = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.estimate import estimate
        from attemper.lab.study.pricing import price_of
        from attemper.lab.study.probing import probe

        if not 1 <= self.steps <= MOST_STEPS:
            raise ParameterError(f"--steps is {self.steps}; it must be from 1 to {MOST_STEPS:,}.")
        numbers, plan, screen = read_numbers(self.gpus), self.planned(), console(json=self.json)
        spread = self._spread(plan)
        self._check(plan)
        say(screen, *(f"note: {note}" for note in plan.notes))
        say(screen, f"measuring {self.steps} steps of each of {len(plan.recipes)} recipes")
        found = probe(plan, root=self.data, workers=self.workers, per_gpu=self.per_gpu, steps=self.steps)
        result = estimate(plan, found, numbers)
        price = None
        if spread is not None and self.difference is not None:
            price = price_of(plan, found, spread, self.difference / 100)
        if self.json:
            print_json({**dataclasses.asdict(result), "power": price and dataclasses.asdict(price)})
            return 0
        show_estimate(screen, result)
        if price is not None:
            say(screen, "", *price.lines())
        return 0

    def _spread(self, plan: Plan) -> Spread | None:
        from attemper.lab.study.pricing import known_spread, spread_of

        if self.difference is None:
            if self.pilot is not None:
                raise ParameterError("--pilot says how far seeds are apart; say with --difference what is to be seen.")
            return None
        if not 0 < self.difference < 100:
            raise ParameterError(f"--difference is {self.difference:g}; it must be a number of points above 0.")
        return spread_of(self.pilot, self.data) if self.pilot is not None else known_spread(plan.task)

    def planned(self) -> Plan:
        """The plan, with a task of made-up images where these were asked for, and with a teacher that needs no file."""
        from attemper.lab.training.teacher import with_untrained_teacher

        if self.images is not None:
            if self.task is not None:
                raise ParameterError("--task and --images both say what is learnt from; give one of them.")
            return dataclasses.replace(self, task=self._stand_in(self.images), images=None).planned()
        plan = super().planned()
        return dataclasses.replace(plan, budget=with_untrained_teacher(plan.budget))

    def _stand_in(self, images: int) -> str:
        """A task without files for the one of the plan: of its kind where there is such a task, else noise."""
        from attemper.lab.call_syntax import parse_call
        from attemper.lab.study.planfile import load_plan
        from attemper.lab.tasks.registry import STAND_INS

        sizes = f"train={images}, test={max(1, images // 25)}"
        named = "" if self.plan is None else load_plan(self.plan).task
        made_up = STAND_INS.get(parse_call(named)[0].partition(":")[0]) if named else None
        if made_up is not None:
            return f"{made_up}(size={self.image_size}, {sizes})"
        return f"noise(size={self.image_size}, classes={self.classes}, {sizes})"

    def _check(self, plan: Plan) -> None:
        """What cannot be run cannot be estimated: found out in a moment, recipe by recipe."""
        from attemper.lab.evaluation.runs import check_suites
        from attemper.lab.tasks.registry import open_task
        from attemper.lab.training.check import check_run

        task = open_task(plan.task, self.data)
        for entry in plan.recipes:
            spec = plan.spec(entry.configurations[0], plan.lr[0], plan.seeds[0], task.name)
            # Neither changes whether a recipe fits, and compiling for this check's CPU would take minutes.
            budget = dataclasses.replace(spec.budget, compile=False, precision="float32")
            check_suites(spec, task)
            check_run(dataclasses.replace(spec, budget=budget), task)


def read_numbers(text: str | None) -> list[int]:
    """'1,8,64' as numbers."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,7}", part) and 0 < int(part) <= MOST_GPUS for part in parts):
        raise ParameterError(
            f"--gpus is {quoted(text)}; it must be numbers from 1 to {MOST_GPUS:,} joined by commas, such as 1,8,64."
        )
    return [int(part) for part in parts]


def show_estimate(screen: Console, found: Estimate) -> None:
    """Tables for people: recipes, then machines."""
    from rich.table import Table
    from rich.text import Text as Words

    from attemper.lab.study.processes import gpu_memory, runs_per_gpu
    from attemper.lab.study.status import duration

    on_gpu = any(row.memory is not None for row in found.recipes)
    unit = "GPU" if on_gpu else "worker"
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(("recipe", "runs", "batch", "images/s", "one run", "GPU memory")):
        rows.add_column(title, justify="right" if index else "left")
    for row in found.recipes:
        memory = "–" if row.memory is None else f"{row.memory / GIB:.1f} GiB"
        rate = f"{row.images_per_second:,.0f}"
        took = duration(row.seconds)
        rows.add_row(Words(row.name), str(row.runs), f"{row.milliseconds:.1f} ms", rate, took, memory)
    screen.print(rows)
    digits = 2 if found.hours < 10 else 0
    say(
        screen,
        "",
        f"{found.runs} runs, {found.hours:,.{digits}f} {unit}-hours on {found.device}; "
        f"{found.resident / GIB:.1f} GiB of main memory per worker",
        f"here, with {found.here.workers} at a time: {duration(found.here.seconds)}, and {duration(found.costs)} to "
        "measure what a step costs with each recipe",
    )
    if found.at_most is not None:
        say(screen, f"where no recipe is decided before it has all its seeds: {duration(found.at_most.seconds)}")
    for scale in found.elsewhere:
        idle = f", of which there are {scale.busy}" if scale.busy < scale.workers else ""
        gpus = "1 GPU" if scale.gpus == 1 else f"{scale.gpus} GPUs"
        say(screen, f"on {gpus}, {scale.workers} runs at a time{idle}: {duration(scale.seconds)}")
    if on_gpu:
        fit = runs_per_gpu(max(row.memory or 0 for row in found.recipes), min(gpu_memory()))
        say(screen, f"{fit} of these runs fit on one GPU side by side")
