"""A job script for Slurm: an array of workers that share one folder, each of them one worker among equals.

Tasks of the array do not divide the runs between them beforehand. Each claims what is free, as every worker does, so it
does not matter how many of them the scheduler starts, or when. A worker whose time is nearly up gives its run back, and
its task goes into the queue again.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import ParameterError

LEFT_WORK = 75
"""The exit code of a worker whose time was up while there was something to do: 'try again later'."""

TIME = re.compile(r"[0-9]{1,9}|[0-9]{1,9}:[0-9]{2}(:[0-9]{2})?|[0-9]{1,6}-[0-9]{1,3}(:[0-9]{2}){0,2}")
"""As sbatch reads it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
MEMORY = re.compile(r"[0-9]{1,12}[KMGT]?")


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm.

    tasks: how many workers the array has. most: at most so many at a time; none: as many as Slurm will start.
    notice: seconds before the end of the time at which a worker is asked to stop.
    more: further options of sbatch, such as '--qos=long'.
    """

    tasks: int
    time: str = "24:00:00"
    cpus: int = 4
    gpus: int = 1
    memory: str | None = None
    partition: str | None = None
    account: str | None = None
    most: int | None = None
    notice: int = 120
    more: Sequence[str] = ()

    def __post_init__(self) -> None:
        limits = {"tasks": (1, 100_000), "cpus": (1, 10_000), "gpus": (0, 10_000), "notice": (1, 10**6)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                end = f"at least {low}" if getattr(self, name) < low else f"at most {high:,}"
                raise ParameterError(f"{name} is {getattr(self, name)}; it must be {end}.")
        if self.most is not None and self.most < 1:
            raise ParameterError(f"most is {self.most}; it must be at least 1.")
        if self.gpus > 1:
            raise ParameterError(f"gpus is {self.gpus}; a worker uses one GPU. Ask for more tasks instead.")
        if not TIME.fullmatch(self.time):
            raise ParameterError(f"time is '{self.time}'; Slurm reads such as 24:00:00, 90 (minutes) or 2-12:00:00.")
        if self.memory is not None and not MEMORY.fullmatch(self.memory):
            raise ParameterError(f"memory is '{self.memory}'; Slurm reads such as 32G.")
        for option in self.more:
            if not re.fullmatch(r"-(-[a-z][a-z-]*(=.+)?|[A-Za-z].*)", option) or not option.isprintable():
                raise ParameterError(f"'{option}' is no option of sbatch; write it such as --qos=long.")

    def directives(self, name: str, log: Path) -> list[str]:
        """The options of sbatch, one per line."""
        limit = f"%{self.most}" if self.most is not None else ""
        found = [
            f"--job-name={_quoted(name)}",
            f"--array=0-{self.tasks - 1}{limit}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={self.cpus}",
            f"--gres=gpu:{self.gpus}" if self.gpus else "",
            f"--mem={self.memory}" if self.memory else "",
            f"--time={self.time}",
            f"--partition={_quoted(self.partition)}" if self.partition else "",
            f"--account={_quoted(self.account)}" if self.account else "",
            "--requeue",
            "--open-mode=append",
            f"--signal=USR1@{self.notice}",
            f"--output={_quoted(_literal(log) + '/%A_%a.log')}",
            *self.more,
        ]
        return [f"#SBATCH {option}" for option in found if option]


def slurm_script(job: Job, command: Sequence[str], *, name: str, folder: Path, here: Path) -> str:
    """The whole script.

    command: one worker, word by word. name: of the job. folder: of the study; logs go into its `slurm/`.
    here: where the command is run, since a plan may have relative paths.
    """
    lines = [
        "#!/bin/bash",
        *job.directives(name, folder.absolute() / "slurm"),
        "",
        "# Every task of the array is one worker on the same folder. Before its time is up Slurm sends it USR1: it",
        f"# gives its run back, ends with {LEFT_WORK}, and the task goes into the queue again. After TERM, which means",
        "# that it was cancelled or preempted, Slurm itself knows whether to queue it again.",
        "",
        "set -u",
        f"cd -- {shlex.quote(str(here.absolute()))} || exit 1",
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {shlex.join(command)}',
        "code=$?",
        f'if [ "$code" -eq {LEFT_WORK} ]; then',
        '    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        "    exit 0",
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A value of an #SBATCH line; only what needs them gets quotes."""
    if not text.isprintable():
        raise ParameterError(f"{text!r} has characters that a job script cannot hold.")
    if re.fullmatch(r"[\w./:%+,@=-]+", text):
        return text
    if '"' in text or "\\" in text:
        raise ParameterError(f"'{text}' has quotes or backslashes, which sbatch does not read; choose another name.")
    return f'"{text}"'


def _literal(path: Path) -> str:
    """A path in which sbatch replaces nothing."""
    return str(path).replace("%", "%%")
