"""`attemper study submit` and `attemper study work`: a study on machines that a scheduler gives out."""

import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from attemper.errors import ParameterError
from attemper.files import atomic_write
from attemper.lab.cli.compare import write_report
from attemper.lab.cli.options import Accept, Data, Folder, Number, Text, Writable
from attemper.lab.cli.printing import console, say


@dataclass(frozen=True)
class Submit:
    """Write a job script whose workers share a study's folder; nothing is sent off.

    The folder must lie where every machine of the cluster sees it under the same path. With --plan the study is made
    ready first: every recipe is checked against the model, and the plan is written into the folder.

    Examples
      attemper study submit /shared/imagenet --plan plan.yaml --slurm --tasks 8 --gpus 1 --time 24:00:00 --out job.sh
      attemper study submit /shared/imagenet --slurm --tasks 24 --partition gpu --sbatch=--qos=long | sbatch
    """

    folder: Folder
    slurm: bool = False
    """For Slurm, the one scheduler there is so far: an array of workers."""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """The plan of a study that is not begun yet; otherwise the one that the folder holds."""
    tasks: Number = None
    """Workers; otherwise one per run that is missing."""
    most: Number = None
    """At most so many of them at a time."""
    time: str = "24:00:00"
    """How long a worker may run at a stretch; it puts itself into the queue again while there is work."""
    cpus: int = 4
    """Cores per worker."""
    gpus: int = 1
    """GPUs per worker: 1 or 0."""
    memory: Text = None
    """Memory per worker, such as 32G; otherwise the cluster's default."""
    partition: Text = None
    """As sbatch has it."""
    account: Text = None
    """As sbatch has it."""
    sbatch: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="OPTION", help_behavior_hint="")
    ] = ()
    """A further option of sbatch, as --sbatch=--name=value; may be given several times."""
    out: Writable = None
    """The file to write; otherwise standard output."""
    data: Data = None
    accept_versions: Accept = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.folders import folder_errors, refuse_foreign
        from attemper.lab.study.locks import check_locks
        from attemper.lab.study.planfile import load_plan
        from attemper.lab.study.slurm import Job, slurm_script
        from attemper.lab.study.study import Study

        if not self.slurm:
            raise ParameterError("For which scheduler? There is one so far: --slurm.")
        plan = None if self.plan is None else load_plan(self.plan, pipes=True)
        study = Study(self.folder, plan, self.data, accept_versions=self.accept_versions)
        job = Job(
            tasks=max(1, len(study.missing())) if self.tasks is None else self.tasks,
            time=self.time,
            cpus=self.cpus,
            gpus=self.gpus,
            memory=self.memory,
            partition=self.partition,
            account=self.account,
            most=self.most,
            more=self.sbatch,
        )
        if self.out is not None:
            refuse_foreign(self.out, lambda data: b"#SBATCH --job-name=" in data, "a job script for Slurm")
        name, here = f"attemper-{study.folder.absolute().name}", Path.cwd()
        script = slurm_script(job, self.command(), name=name, folder=study.folder, here=here)
        study.check()
        study.prepare()
        check_locks(study.claims.folder)
        with folder_errors(study.folder):
            (study.folder / "slurm").mkdir(exist_ok=True)  # Slurm drops the log of a job whose folder is not there
        self._put(script)
        return 0

    def command(self) -> list[str]:
        """One worker, by the program that runs now: the same environment on every machine."""
        program = shutil.which("attemper")
        start = [program] if program else [sys.executable, "-m", "attemper"]
        data = [] if self.data is None else ["--data", str(self.data.absolute())]
        accept = ["--accept-versions"] if self.accept_versions else []
        return [*start, "study", "work", str(self.folder.absolute()), *data, *accept]

    def _put(self, script: str) -> None:
        from attemper.lab.folders import folder_errors

        if self.out is None:
            sys.stdout.write(script)
            return
        with folder_errors(self.out):
            atomic_write(self.out, script)
            self.out.chmod(0o755)
        say(console(), f"Written: {self.out}. Send it off with: sbatch {self.out}")


@dataclass(frozen=True)
class Work:
    """Do runs of a study in this process until none is free, and leave: one worker, for job scripts.

    USR1, TERM or Ctrl-C make it write a checkpoint, give its run back and leave; a second one ends it at once. The
    exit code is then 75 after USR1, by which job scripts know that they shall queue again, 143 after TERM and 130
    after Ctrl-C. Whoever finishes the last run writes the summary and the page.

    Examples
      attemper study work runs/digits-vit-digits
    """

    folder: Folder
    data: Data = None
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    accept_versions: Accept = False

    def run(self, words: Sequence[str] = ()) -> int:
        import torch

        from attemper.lab.study.comparison import write_summary
        from attemper.lab.study.locks import check_locks
        from attemper.lab.study.slurm import LEFT_WORK
        from attemper.lab.study.status import status_of
        from attemper.lab.study.study import Study
        from attemper.lab.study.summary import summarise
        from attemper.lab.threads import share_of_cores
        from attemper.lab.training.devices import usable_device
        from attemper.lab.training.leaving import exit_code, noting

        screen = console()
        if self.device is not None:
            usable_device(self.device)
        study = Study(self.folder, root=self.data, accept_versions=self.accept_versions)
        study.check_data()
        study.join()
        check_locks(study.claims.folder)
        torch.set_num_threads(share_of_cores(1))
        with noting(signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, say=_promise) as signals:
            study.work(stop=lambda: bool(signals), device=self.device, log=lambda text: say(screen, text), wait=False)
        status = status_of(study)
        say(
            screen, f"{status.done} of {status.total} runs done, {status.failed} failed, {len(status.running)} running."
        )
        if signals and study.missing():
            return LEFT_WORK if signals[0] == signal.SIGUSR1 else exit_code(signals[0])
        if not study.missing():
            study.sweep()
            summary = summarise(study, command=f"attemper study resume {self.folder.name}")
            write_summary(summary, study.folder)
            write_report(summary, study.folder / "report.html")
        return 1 if status.failed else 0


def _promise(number: int) -> str:
    name = signal.Signals(number).name
    return f"{name}: this worker writes a checkpoint, gives its run back and leaves; a second signal ends it at once."
