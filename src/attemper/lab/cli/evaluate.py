"""`attemper evaluate`: calibration and robustness of a run that was trained before."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ParameterError
from attemper.lab.cli.options import Data, Json, Of, Run, Suites, Text, Writable
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from attemper.lab.evaluation.runs import FinishedRun

DEFAULT_SUITES = "calibration,robustness"


@dataclass(frozen=True)
class Evaluate:
    """Measure calibration and robustness of a finished run, on its test set and on others.

    Of a run that is no classifier of images, the task's own metrics are measured, class by class and with pictures.

    It writes evaluation.json and a page, evaluation.html, into the run's folder. Of a study, the run that is best on
    validation is evaluated, or with --of the best one of a recipe; its folder is below the study's weights/. To
    evaluate every run of a comparison, give its suites to 'attemper compare --evaluate'.

    The test sets of ImageNet are folders: ImageNet-V2 has one per class number; ImageNet-A and -R have one per WordNet
    id, and --wordnet says which class of the model each id is.

    Examples
      attemper evaluate runs/one
      attemper evaluate runs/one --suites "calibration, stochastic(passes=16), robustness(epsilon=[0.01, 0.03])"
      attemper evaluate runs/one --imagenet-v2 data/imagenetv2
      attemper evaluate runs/one --imagenet-a data/imagenet-a --wordnet data/imagenet/train
    """

    run_folder: Run
    of: Of = None
    suites: Suites = DEFAULT_SUITES
    imagenet_v2: Writable = None
    """A folder of ImageNet-V2."""
    imagenet_a: Writable = None
    """A folder of ImageNet-A."""
    imagenet_r: Writable = None
    """A folder of ImageNet-R."""
    real: Writable = None
    """The folder of ImageNet's validation images, for ReaL labels."""
    real_labels: Writable = None
    """The JSON file with ReaL labels."""
    wordnet: Writable = None
    """ImageNet's own folder of classes, or a JSON or text file with the WordNet ids of the model's classes."""
    data: Data = None
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from attemper.lab.cli.task_metrics import has_own_metrics
        from attemper.lab.evaluation.measure import evaluate
        from attemper.lab.evaluation.runs import load_run
        from attemper.lab.study.winner import find_run
        from attemper.lab.training.loop import choose_device

        screen, device = console(json=self.json), choose_device(self.device)
        folder = find_run(self.run_folder, self.of)
        finished = load_run(folder, root=self.data, device=device)
        if has_own_metrics(finished):
            return self._task_metrics(finished, folder, screen)
        others = self._test_sets(finished)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
            line = bar.add_task(finished.spec.recipe, total=1.0)
            found = evaluate(
                finished.model,
                finished.task.test(),
                normalise=finished.normalise,
                suites=self.suites,
                train=finished.training_part(),
                seed=finished.spec.seed,
                progress=lambda share: bar.update(line, completed=share),
            )
        found = {"spec": finished.spec.to_dict(), **found, "test_sets": self._evaluated(finished, others)}
        page = self._write(found, folder, _page(found), screen)
        say(
            screen,
            f"{finished.spec.recipe}: accuracy {100 * found['accuracy']:.2f} % on {counted(found['images'], 'image')}",
        )
        show_evaluation(screen, found)
        _show_test_sets(screen, found)
        self._end(found, page, screen)
        return 0

    def _task_metrics(self, finished: FinishedRun, folder: Path, screen: Any) -> int:
        """The task's own metrics, for runs that are no classifiers of images."""
        from attemper.lab.cli.task_metrics import lines, page_of, refuse_suites, task_metrics

        names = ("suites", "imagenet_v2", "imagenet_a", "imagenet_r", "real", "real_labels", "wordnet")
        refuse_suites(finished, {name: getattr(self, name) for name in names}, DEFAULT_SUITES)
        found = {"spec": finished.spec.to_dict(), **task_metrics(finished)}
        page = self._write(found, folder, page_of(found), screen)
        say(screen, *lines(found))
        self._end(found, page, screen)
        return 0

    def _write(self, found: dict[str, Any], folder: Path, html: str, screen: Any) -> Path:
        """The figures and their page, into the run's folder."""
        from attemper.files import atomic_write
        from attemper.lab.folders import folder_errors

        path, page = (folder / f"evaluation.{ending}" for ending in ("json", "html"))
        with folder_errors(path):
            for kept in _keep_other(found, path, page):
                say(screen, f"note: an evaluation of other things was there; it is now {kept}")
            atomic_write(path, json_module.dumps(found, indent=1, allow_nan=False) + "\n")
            atomic_write(page, html)
        return page

    def _end(self, found: dict[str, Any], page: Path, screen: Any) -> None:
        say(screen, f"Page: {page}")
        if self.json:
            print_json(found)

    def _test_sets(self, finished: FinishedRun) -> list[Any]:
        """The other test sets that were named, opened before any of them is evaluated."""
        from attemper.lab.evaluation.testsets import open_imagenet_subset, open_imagenet_v2, open_real
        from attemper.lab.evaluation.wordnet import wordnet_ids

        shape = finished.images
        size, classes = shape.height, shape.classes
        found = []
        if self.imagenet_v2 is not None:
            found.append(open_imagenet_v2(self.imagenet_v2, size=size, classes=classes))
        for name, folder in (("ImageNet-A", self.imagenet_a), ("ImageNet-R", self.imagenet_r)):
            if folder is None:
                continue
            if self.wordnet is None:
                raise ParameterError(
                    f"{name} needs --wordnet: ImageNet's own folder of classes, or a file with the ids in the order of "
                    "the model's outputs."
                )
            found.append(open_imagenet_subset(folder, wordnet_ids(self.wordnet), name=name, size=size))
        if (self.real is None) != (self.real_labels is None):
            raise ParameterError("ReaL needs both: --real, the folder of images, and --real-labels, the JSON file.")
        if self.real is not None and self.real_labels is not None:
            found.append(open_real(self.real, self.real_labels, size=size, classes=classes))
        return found

    def _evaluated(self, finished: FinishedRun, others: Sequence[Any]) -> list[dict[str, Any]]:
        from attemper.lab.evaluation.testsets import evaluate_test_set

        return [evaluate_test_set(finished.model, other, normalise=finished.normalise) for other in others]


def _keep_other(found: dict[str, Any], path: Path, page: Path) -> list[Path]:
    """Rename an earlier evaluation that measured other things, so that it is not lost; gives the new paths."""
    from attemper.files import read_bytes, set_aside
    from attemper.lab.folders import read_object

    if not path.exists():
        return []
    there = read_object(read_bytes(path))
    same = there.get("suites") == found.get("suites") and _names(there) == _names(found)
    return [] if same else [set_aside(each, "before") for each in (path, page) if each.exists()]


def _names(found: Mapping[str, Any]) -> list[Any]:
    return [each.get("name") for each in found.get("test_sets", ()) if isinstance(each, dict)]


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of one run in the form in which a study has those of many."""
    from attemper.lab.evaluation.key_figures import over_seeds

    spec = found["spec"]
    row = {"name": spec["recipe"], "recipe": spec["recipe"], "seeds": [spec["seed"]], "evaluation": over_seeds([found])}
    return {"recipes": [row]}


ONE = "The weights of the epoch that was best on validation, in eval mode, on the test set."


def _page(found: dict[str, Any]) -> str:
    from attemper.lab.report.entries import entries
    from attemper.lab.report.evaluation import calibration, robustness
    from attemper.lab.report.page import page

    spec = found["spec"]
    ranked = entries(_summary(found))
    sections = [section for section in (calibration(ranked, ONE), robustness(ranked)) if section is not None]
    title = f"{spec['recipe']} on {spec['task']} with {spec['model']}"
    return page(title, sections, head=_facts(found), kicker="Attemper · evaluation of one run")


def _facts(found: Mapping[str, Any]) -> str:
    """Accuracy with the interval that so many test images leave, whatever the seed."""
    from attemper.lab.report.markup import facts
    from attemper.lab.study.statistics import share_interval

    accuracy, images = found.get("accuracy"), found.get("images")
    if accuracy is None or not images:
        return ""
    low, high = share_interval(accuracy, images)
    shown = {
        "Accuracy": f"{100 * accuracy:.2f} %",
        "95 % interval, of the test sample": f"{100 * low:.2f} to {100 * high:.2f} %",
        "Test images": f"{images:,}",
        "Seed": str(found["spec"]["seed"]),
    }
    return facts(shown)


def show_evaluation(screen: Any, found: dict[str, Any]) -> None:
    """The figures of one evaluation, for people."""
    from attemper.lab.study.evaluations import evaluation_table

    table = evaluation_table(_summary(found))
    if table is not None:
        screen.print(table)


def _show_test_sets(screen: Any, found: dict[str, Any]) -> None:
    for other in found["test_sets"]:
        skipped = other["skipped"]
        names = f" ({', '.join(skipped['files'])}{', …' if skipped['count'] > len(skipped['files']) else ''})"
        broken = f"; {skipped['count']} could not be decoded{names}" if skipped["count"] else ""
        say(
            screen,
            f"{other['name']}: accuracy {100 * other['accuracy']:.2f} % on {counted(other['images'], 'image')}{broken}",
        )
