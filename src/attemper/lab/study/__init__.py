"""Studies: recipes × seeds on one task, resumable, by any number of processes, with honest statistics."""

from attemper.lab.errors import FolderError, PlanError, StoppedError, StudyError
from attemper.lab.study.comparison import DEFAULT_PLAN, compare
from attemper.lab.study.executor import work
from attemper.lab.study.export import to_csv, to_markdown
from attemper.lab.study.live import make_view, status_table, summary_table
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.study.status import Status, status_of
from attemper.lab.study.study import Study
from attemper.lab.study.summary import Summary, summarise

__all__ = [
    "DEFAULT_PLAN", "FolderError", "Plan", "PlanError", "Status", "StoppedError", "Study", "StudyError", "Summary",
    "compare", "dump_plan", "load_plan", "make_view", "status_of", "status_table", "summarise", "summary_table",
    "to_csv", "to_markdown", "work",
]  # fmt: skip
