"""`attemper recommend`: which recipe to use for a task and a model, found and confirmed within some minutes."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from attemper.lab.cli.compare import Compare
from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.cli.options import Data, Json, Number, Numbers, Points, Text, Writable, option
from attemper.lab.cli.plan_options import File
from attemper.lab.cli.printing import command_line, console, print_json, say, show_summary

EXPLORED = (
    "What is explored: dropkey, dropattention, hardmask, blur, explicit, cb, graying (these by default), drophead, "
    "droppath, ffdropout with their strengths; or recipes and grids in quotes, of which the learning rate is tried."
)


@dataclass(frozen=True)
class Recommend:
    """Recommend a recipe: explore settings with equal budgets, then confirm the best on fresh seeds.

    Half of the time goes into exploration: every recipe, none included, gets the same number of trials over its
    strengths and learning rates; the best third of them goes on at three times the epochs. Then the best two or three
    recipes meet none on seeds that exploration never saw, until they are decided or the time is over. The answer is a
    recipe line with its verdict and cost, and a page with everything that was tried. Needs the extra 'recommend'
    (Optuna).

    Stopped or killed, it goes on where it was when the same command is run again; several machines may share a folder.

    Examples
      attemper recommend
      attemper recommend --task cifar10 --model vit-cifar --epochs 20 --minutes 60 --data /path/to/data
      attemper recommend --recipes dropkey explicit "cb + droppath({0.05, 0.1})" --minutes 10
      attemper recommend plan.yaml --minutes 120 --workers 4
    """

    plan: File = None
    """A plan file, for its task, model and budget; otherwise the embedded comparison on digits."""
    folder: Writable = None
    """Where everything is kept; otherwise runs/recommend- and the names of task and model."""
    minutes: float = 5.0
    """How long it may take, about; what fits follows from how long the first trials take."""
    task: Text = None
    """Such as digits, cifar10, folder:PATH."""
    model: Text = None
    """Such as vit-cifar, timm:vit_tiny_patch16_224."""
    recipes: Annotated[tuple[str, ...], option(EXPLORED, "TEXT …")] = ()
    epochs: Number = None
    """Epochs of a whole run; trials begin with less."""
    batch_size: Number = None
    """Images per step."""
    lr: Numbers = ()
    """The learning rate round which others are tried, up to four times as large or small."""
    augment: Text = None
    """Augmentations joined by '+'."""
    margin: Points = None
    data: Data = None
    execution: ExecutorOptions = field(default_factory=ExecutorOptions)
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        import optuna  # noqa: F401  # said at once where it is missing

        from attemper.lab.errors import StoppedError
        from attemper.lab.report.recommendation import render
        from attemper.lab.study.live import make_view
        from attemper.lab.study.recommend import DIVERGED, recommend
        from attemper.lab.training.leaving import ending_as, interrupted_by

        base = self._base()
        folder = self.folder or _folder_of(base)
        screen, how, signals = console(json=self.json), self.execution, list[int]()
        with ending_as(signals), interrupted_by(signal.SIGTERM, into=signals):
            view = make_view(screen)
            try:
                found = recommend(
                    base,
                    folder,
                    minutes=self.minutes,
                    recipes=self.recipes,
                    workers=how.workers if how.executor == "processes" else None,
                    executor=how.make() if how.executor == "ray" or how.per_gpu else None,
                    root=self.data,
                    view=view,
                    command=command_line(words),
                )
            except KeyboardInterrupt:
                raise StoppedError("Stopped. Nothing is lost: run the same command to go on.") from None
            finally:
                view.close()
        page = _written(render(found), folder / "report.html")
        show_summary(screen, found["confirmation"], None)
        tried = sum(len(row["trials"]) for row in found["explored"])
        trained = found["answer"]["verdict"] != DIVERGED
        command = [training_command(base, found["answer"], self.data)] if trained else []
        say(screen, "", found["answer"]["text"], *command)
        say(screen, f"{tried} trials of {len(found['explored'])} recipes were explored. Report: {page}")
        if self.json:
            print_json(found)
        return 0 if found["confirmation"]["complete"] else 1

    def _base(self) -> dict[str, Any]:
        changes = Compare(
            plan=self.plan,
            task=self.task,
            model=self.model,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            augment=self.augment,
            margin=self.margin,
            data=self.data,
        )
        return changes.planned().to_dict()


def _folder_of(base: dict[str, Any]) -> Path:
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"recommend-{base['task']}-{base['model']}").strip("-.")
    return Path("runs") / words[:80]


def training_command(base: dict[str, Any], answer: dict[str, Any], data: Path | None = None) -> str:
    """The command that trains with it, under the budget that it was found with."""
    import dataclasses
    import shlex

    from attemper.lab.training.spec import HASHES, Budget

    words = ["attemper", "train", "--task", base["task"], "--model", base["model"], "--recipe", answer["recipe"]]
    words += ["--lr", str(answer["lr"]), "--epochs", str(base["budget"]["epochs"])]
    for setting in dataclasses.fields(Budget):
        value = base["budget"].get(setting.name, setting.default)
        if setting.name in ("lr", "epochs", *HASHES) or value == setting.default:
            continue
        name = f"--{setting.name.replace('_', '-')}"
        words += [name] if value is True else [name, str(value)]
    return shlex.join([*words, *([] if data is None else ["--data", str(data)])])


def _written(text: str, path: Path) -> Path:
    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors

    with folder_errors(path):
        atomic_write(path, text)
    return path
