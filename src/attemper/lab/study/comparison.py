"""The main job: from a plan to a summary."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attemper.files import atomic_write
from attemper.lab.folders import folder_errors
from attemper.lab.study.costs import measure_costs
from attemper.lab.study.engine import Engine, Training
from attemper.lab.study.executor import Executor, stopped, work
from attemper.lab.study.export import to_csv, to_markdown
from attemper.lab.study.live import SilentView, View
from attemper.lab.study.plan import Plan
from attemper.lab.study.rank_team import RankTeamEngine, follow, send_summary, work_together
from attemper.lab.study.settings import Settings, read_settings
from attemper.lab.study.study import ATTEMPTS, Study
from attemper.lab.study.summary import Summary, summarise
from attemper.lab.study.until import going_on, longer_plan, what_is_added
from attemper.lab.training.ranks import current

DEFAULT_PLAN: Mapping[str, Any] = {
    "title": "Eight recipes on handwritten digits",
    "task": "digits",
    "model": "vit-digits",
    "seeds": 5,
    "budget": {"epochs": 15, "batch_size": 64, "warmup_epochs": 2.0},
    "lr": [3e-3],
    "recipes": [
        "none",
        "dropkey(0.1, schedule=decreasing)",
        "dropattention(0.1, rescale=normalize)",
        "hardmask(0.1, k=3)",
        "blur",
        "explicit(v=5e-4, ff=5e-4, p=0.2)",
        "cb",
        "graying",
    ],
}
"""What `attemper compare` runs without a plan: about three minutes on two cores, and nothing to download."""


def compare(
    plan: Plan | Mapping[str, Any],
    folder: str | Path,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    root: Path | None = None,
    view: View | None = None,
    costs: bool = True,
    change_plan: bool = False,
    command: str = "attemper compare",
    engine: Engine | None = None,
    settings: Settings | None = None,
    attempts: int | None = None,
    accept_versions: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run what is missing of a plan, measure what each recipe costs, and summarise.

    folder: where results are kept; started again, it goes on from there. A summary is written to it as JSON, CSV and
        Markdown.
    workers: how many processes; none: one per core, or as many as fit on each GPU.
    executor: who does the runs in their place, such as `attemper.lab.study.ray_executor.RayCluster()`.
    root: where this machine keeps its data.
    view: shows how it goes on, such as `attemper.lab.study.live.make_view()`.
    costs: measure the time of a training step, which takes some seconds per recipe.
    change_plan: take a folder that holds another plan's study.
    command: how this was started, for the report.
    engine: who performs the runs; none: `attemper.lab.training`.
    settings: how runs are watched; none: as the folder remembers it.
    attempts: after so many that went wrong, a run is given up; none: 3.
    accept_versions: do runs under other versions of torch or of Attemper's results than those that are there.
    stop: asked between steps where several ranks train together; True ends the study after a checkpoint.

    A plan or folder that cannot work is refused before anything is written. Runs that kept failing leave the summary
    incomplete, and are named in its notes. Inside of `lab.training.joined`, all ranks train every run together.
    """
    ranks = current()
    view = view or SilentView()
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    if not ranks.main:
        watched = settings or read_settings(Path(folder))
        return follow(engine or Training(watched.probe_every), plan.task, root, ranks)

    def opened(plan: Plan) -> Study:
        study = Study(
            folder,
            plan,
            root,
            engine=engine,
            settings=settings,
            change_plan=change_plan,
            attempts=attempts or ATTEMPTS,
            accept_versions=accept_versions,
        )
        if not ranks.alone:
            study.engine = RankTeamEngine(study.engine, ranks)
        return study

    study = opened(going_on(plan, Path(folder)))
    for note in plan.notes:
        view.note(note)
    try:
        study.check_versions()
        study.check()
        while True:
            if ranks.alone:
                work(study, workers=workers, view=view, executor=executor)
            else:
                work_together(study, view, workers=workers, executor=executor, stop=stop)
            longer = longer_plan(study)
            if longer is None:
                break
            view.note(what_is_added(longer))
            study = opened(going_on(longer, Path(folder)))
        view.close()  # a bar takes its place
        if costs:
            view.note("measuring what a training step costs with each recipe")
            measure_costs(study, [row["recipe"] for row in summarise(study)["recipes"] if row["lr"] is not None])
    except KeyboardInterrupt:
        raise stopped(study) from None
    finally:
        view.close()
    summary = summarise(study, command=command)
    write_summary(summary, study.folder)
    return send_summary(ranks, summary)


def write_summary(summary: Summary, folder: Path) -> None:
    """Put a summary beside its runs: as JSON, as CSV and as Markdown."""
    texts = {"json": json.dumps(summary, indent=1, allow_nan=False) + "\n"}
    texts |= {"csv": to_csv(summary), "md": to_markdown(summary)}
    for suffix, text in texts.items():
        path = folder / f"summary.{suffix}"
        with folder_errors(path):
            atomic_write(path, text)
