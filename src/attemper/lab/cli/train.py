"""`attemper train`: one run, without a study around it."""

from __future__ import annotations

import json as json_module
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ParameterError
from attemper.lab.cli.evaluate import show_evaluation
from attemper.lab.cli.options import Accept, Data, Json, Number, Parallel, Suites, Text, Trackers, Writable
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.training.spec import Budget, RunSpec

if TYPE_CHECKING:
    from rich.console import Console

    from attemper.lab.tasks.base import Task
    from attemper.lab.training.leaving import Leave
    from attemper.lab.training.ranks import Ranks
    from attemper.lab.training.tracking import Follower


@dataclass(frozen=True)
class Train:
    """Train one model with one recipe, and tell what it reached.

    The epoch is chosen on validation, and the test set is read once, at the end. With --folder the run can be stopped
    and goes on where it was; its result is then written there as result.json, and the weights of the chosen epoch as
    model.safetensors, which 'attemper evaluate' reads. Ctrl-C and TERM write a checkpoint first. A folder that holds
    another run is left alone.

    Examples
      attemper train
      attemper train --recipe "dropkey(0.1) + cb" --seed 3 --epochs 30
      attemper train --task cifar10 --model vit-cifar --precision bfloat16 --folder runs/one --track tensorboard
      torchrun --nproc-per-node 4 -m attemper train --task cifar10 --model vit-small --batch-size 512
    """

    task: str = "digits"
    """Such as digits, cifar10, folder:PATH, csv:FILE, audio:PATH, wds:PATH, hf:NAME, timm:NAME, MODULE:FUNCTION."""
    model: str = "vit-digits"
    """Such as vit-cifar, "timm:vit_tiny_patch16_224(pretrained=true)", hf:OWNER/NAME, MODULE:FUNCTION."""
    recipe: str = "none"
    """Such as "dropkey(0.1, schedule=decreasing) + cb"."""
    seed: int = 0
    """Of the split, the initial weights, the order of batches and every draw."""
    budget: Budget = field(default_factory=Budget)
    folder: Writable = None
    """Where checkpoints, the result and the weights go; otherwise nothing is written."""
    probe_every: Number = None
    """Look at attention every so many steps; what is seen goes into the result."""
    evaluate: Suites = ""
    track: Trackers = ()
    data: Data = None
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    parallel: Parallel = None
    accept_versions: Accept = False
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.training.leaving import Leave, exit_code, noting
        from attemper.lab.training.ranks import joined

        numbers = [signal.SIGTERM] if self.folder is None else [signal.SIGTERM, signal.SIGINT]
        with joined(self.parallel) as ranks, noting(*numbers, say=self._promise if ranks.main else None) as signals:
            try:
                self._train(ranks, signals)
                return 0
            except Leave as leave:
                left = leave
        if ranks.main:
            self._print_left(left, signals[0])
        return exit_code(signals[0] if signals else signal.SIGTERM)

    def _promise(self, number: int) -> str:
        kept = "without anything kept, since there is no --folder" if self.folder is None else "after a checkpoint"
        return f"{signal.Signals(number).name}: the run ends at its next step, {kept}; a second signal ends it at once."

    def _print_left(self, left: Leave, number: int) -> None:
        kept = "It was not kept: there is no --folder."
        if left.place:
            kept = f"Its checkpoint in {self.folder} stands at {left.place}; run the same command to go on."
        say(console(json=True), f"attemper: the run was stopped by {signal.Signals(number).name}. {kept}")

    def _train(self, ranks: Ranks, signals: Sequence[int]) -> None:
        from attemper.lab.evaluation.runs import examine
        from attemper.lab.folders import folder_errors
        from attemper.lab.study.defaults import missed
        from attemper.lab.training.loop import run
        from attemper.lab.training.run_folder import take_folder
        from attemper.lab.training.schedule import schedule_notes

        screen = console(json=self.json, quiet=not ranks.main)
        task, spec = self._opened()
        say(screen, *(f"note: {note}" for note in (*schedule_notes(spec.budget), *missed(spec, self.data))))
        if self.folder is not None and ranks.main:
            spec = take_folder(self.folder, spec, task.fingerprint, accept_versions=self.accept_versions)
            with folder_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
        with (
            _progress_bar(screen, spec.recipe) as show,
            self._follow(spec, spec.key(task.fingerprint), screen, ranks) as follower,
        ):
            result = run(
                spec,
                task,
                folder=self.folder,
                progress=_watched(screen, signals, show, follower),
                device=self.device,
                probe_every=self.probe_every,
                examine=examine,
                accept_versions=self.accept_versions,
            )
            follower.result(result)
        if ranks.main:
            self._show(self._written(result), screen)

    def _opened(self) -> tuple[Task, RunSpec]:
        """The task and the run, refused here if they cannot work."""
        from attemper.lab.evaluation.runs import check_suites
        from attemper.lab.evaluation.suites import parse_suites
        from attemper.lab.tasks.registry import open_task
        from attemper.lab.tracking.registry import check_trackers
        from attemper.lab.training.check import check_run
        from attemper.lab.training.hashes import with_hashes
        from attemper.recipe import as_methods, render

        check_trackers(self.track)
        if self.track and self.folder is None:
            raise ParameterError(f"--track {' '.join(self.track)} needs a place for its files: give a --folder.")
        if not 0 <= self.seed < 2**63:
            raise ParameterError(f"--seed is {self.seed}; it must be from 0 to {2**63 - 1:,}.")
        task = open_task(self.task, self.data)
        recipe = render(as_methods(self.recipe))
        suites = tuple(suite.text for suite in parse_suites(self.evaluate)) if self.evaluate else ()
        spec = RunSpec(
            task=task.name, model=self.model, recipe=recipe, seed=self.seed, budget=self.budget, evaluate=suites
        )
        check_suites(spec, task)
        check_run(spec, task)
        return task, with_hashes(spec, task)

    def _follow(self, spec: RunSpec, key: str, screen: Any, ranks: Ranks) -> AbstractContextManager[Follower]:
        from attemper.lab.training.tracking import follow

        folder = self.folder or Path()
        return follow(
            self.track if ranks.main else (),
            spec,
            key=key,
            project=folder.absolute().name,
            name=f"{spec.recipe}, seed {spec.seed}",
            folder=folder,
            log=lambda text: say(screen, text),
        )

    def _written(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result, with a digest where it was written into a folder."""
        from attemper.files import atomic_write
        from attemper.lab.folders import folder_errors
        from attemper.lab.training.digests import with_digest
        from attemper.lab.training.run_folder import RESULT

        if self.folder is None:
            return result
        path, signed = self.folder / RESULT, with_digest(result)
        with folder_errors(path):
            atomic_write(path, json_module.dumps(signed, indent=1, allow_nan=False) + "\n")
        return signed

    def _show(self, result: dict[str, Any], screen: Any) -> None:
        metric = result["metric"]
        parts = ", ".join(f"{part} {100 * result[part][metric]:.2f} %" for part in ("train", "validation", "test"))
        timing = result["timing"]
        say(screen, f"{result['spec']['recipe']}: {metric} {parts}, at epoch {result['chosen_epoch']}")
        if result["status"] == "diverged":
            say(screen, f"It diverged at epoch {result['diverged_at']['epoch']}; the figures are of the epochs before.")
        say(screen, f"{timing['seconds']:.1f} s, {timing['images_per_second']:.0f} samples/s")
        if "evaluation" in result:
            show_evaluation(screen, {"spec": result["spec"], **result["evaluation"]})
        if self.json:
            print_json(result)


@contextmanager
def _progress_bar(screen: Console, name: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context manager: inside it, a terminal has a bar, which the function that it gives moves by a run's events."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[epoch]}"), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        line = bar.add_task(name, total=1.0, epoch="")

        def show(event: dict[str, Any]) -> None:
            done = (event["epoch"] - 1 + event["step"] / event["steps"]) / event["epochs"]
            bar.update(line, completed=done, epoch=f"epoch {event['epoch']}/{event['epochs']}")

        yield show


def _watched(
    screen: Console, signals: Sequence[int], show: Callable[[dict[str, Any]], None], follower: Follower
) -> Callable[[dict[str, Any]], None]:
    """What a run calls with its events: prints warnings, ends the run after a signal, and hands the others on."""
    from attemper.lab.training.leaving import Leave

    def progress(event: dict[str, Any]) -> None:
        if "warning" in event:
            say(screen, f"note: {event['warning']}")
        if signals:
            raise Leave
        show(event)
        follower.progress(event)

    return progress
