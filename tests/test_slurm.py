"""Job scripts: bash and sbatch read them as they are meant, their workers share a folder and leave when told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.study.planfile import load_plan
from attemper.lab.study.slurm import LEFT_WORK, Job, slurm_script
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.training.checkpoint import load_checkpoint
from teams import start_server

PLAN = """
task: digits(train=100, test=50)
model: vit-digits(depth=1)
seeds: 2
budget: {epochs: 1, batch_size: 32}
recipes: [none, cb]
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
printf '%s\\n' "$@" > {words}
exit {code}
"""
SCONTROL = """#!/bin/bash
printf '%s\\n' "$@" > {words}
"""


def script(folder: Path = Path("/shared/study"), **options: Any) -> str:
    job = Job(**{"tasks": 8, **options})
    return slurm_script(job, ["attemper", "study", "work", str(folder)], name="a study", folder=folder, here=folder)


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_script_says_to_slurm_what_was_asked_for() -> None:
    text = script(time="2-00:00:00", cpus=6, gpus=1, memory="32G", partition="gpu", account="us", most=4, notice=60)
    assert directives(text) == {
        "--job-name": '"a study"',
        "--array": "0-7%4",
        "--nodes": "1",
        "--ntasks": "1",
        "--cpus-per-task": "6",
        "--gres": "gpu:1",
        "--mem": "32G",
        "--time": "2-00:00:00",
        "--partition": "gpu",
        "--account": "us",
        "--requeue": "",
        "--open-mode": "append",
        "--signal": "USR1@60",
        "--output": "/shared/study/slurm/%A_%a.log",
    }
    assert text.startswith("#!/bin/bash\n#SBATCH")
    body = text.index("set -u")
    assert "#SBATCH" not in text[body:], "sbatch stops reading at the first command"


def test_what_was_not_asked_for_is_left_to_the_cluster() -> None:
    found = directives(script(gpus=0, more=["--qos=long", "--exclusive"]))
    assert found.keys().isdisjoint({"--gres", "--mem", "--partition", "--account"})
    assert (found["--qos"], found["--exclusive"]) == ("long", "")


@pytest.mark.parametrize("name", ["plain", "with space", "quo'te", "100%", "$HOME`ls`;#", "ümlaut"])
def test_any_folder_reaches_the_worker_as_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text = script(folder)
    job = tmp_path / "job.sh"
    job.write_text(text)
    assert subprocess.run(["bash", "-n", str(job)], capture_output=True, check=False).returncode == 0
    code = run_with_fakes(job, tmp_path, code=0)
    assert code == 0
    assert (tmp_path / "srun.words").read_text().splitlines() == ["attemper", "study", "work", str(folder)]
    assert not (tmp_path / "scontrol.words").exists()
    assert directives(text)["--output"].strip('"') == f"{folder}/slurm/%A_%a.log".replace("100%", "100%%")


def run_with_fakes(job: Path, tmp_path: Path, code: int) -> int:
    """Run a script where srun and scontrol write down what they are asked."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        words = str(tmp_path / f"{name}.words")
        (tools / name).write_text(text.format(words=f"'{words}'", code=code))
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    return subprocess.run(["bash", str(job)], env=env, check=False).returncode


def test_a_worker_whose_time_is_up_is_queued_again_and_one_that_failed_is_not(tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text(script(tmp_path))
    assert run_with_fakes(job, tmp_path, code=1) == 1
    assert not (tmp_path / "scontrol.words").exists()
    assert run_with_fakes(job, tmp_path, code=LEFT_WORK) == 0
    assert (tmp_path / "scontrol.words").read_text().split() == ["requeue", "17_3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "tasks is 0; it must be at least 1"),
        ({"time": "a day"}, "time is 'a day'; Slurm reads such as 24:00:00"),
        ({"memory": "32 GB"}, "memory is '32 GB'; Slurm reads such as 32G"),
        ({"gpus": 4}, "a worker uses one GPU. Ask for more tasks"),
        ({"most": 0}, "most is 0"),
        ({"more": ["qos=long"]}, "'qos=long' is no option of sbatch"),
        ({"more": ["--qos=long\n#SBATCH --exclusive"]}, "is no option of sbatch"),
        ({"partition": 'g"pu'}, "has quotes"),
        ({"account": "us\nrm -rf"}, "has characters that a job script cannot hold"),
    ],
)
def test_what_slurm_would_not_read_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        script(**options)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------- the command line
def test_submit_makes_a_study_ready_and_writes_a_script_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    assert main(["study", "submit", "one", "--plan", "plan.yaml"]) == 2
    assert "For which scheduler?" in capsys.readouterr().err
    words = ["study", "submit", "one", "--plan", "plan.yaml", "--slurm", "--sbatch=--qos=long", "--sbatch=--exclusive"]
    words += ["--gpus", "0"]
    assert main([*words, "--time", "soon"]) == 2
    assert not Path("one").exists(), "nothing is written for a mistake"
    assert main([*words, "--out", "job.sh"]) == 0
    found = directives(Path("job.sh").read_text())
    assert found["--array"] == "0-3", "one worker per run that is missing"
    assert (found["--qos"], found["--exclusive"]) == ("long", "")
    assert Path("job.sh").stat().st_mode & stat.S_IXUSR
    assert load_plan("one/plan.yaml") == load_plan("plan.yaml")
    assert Path("one/slurm").is_dir()
    assert main(["study", "submit", "one", "--slurm", "--tasks", "2"]) == 0
    assert "#SBATCH --array=0-1\n" in capsys.readouterr().out


def test_a_worker_does_what_is_free_leaves_and_the_last_one_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    study = Study(tmp_path / "one", load_plan(tmp_path / "plan.yaml"))
    study.prepare()
    other = study.claim()
    assert other is not None
    assert main(["study", "work", str(study.folder)]) == 0
    assert "3 of 4 runs done, 0 failed, 1 running." in capsys.readouterr().out
    assert not (study.folder / "report.html").exists()
    other.release()
    assert main(["study", "work", str(study.folder)]) == 0
    assert len(study.results()) == len(study.runs)
    assert (study.folder / "report.html").exists()
    assert (study.folder / "summary.csv").exists()


def work_until_told(folder: Path) -> None:
    raise SystemExit(main(["study", "work", str(folder)]))


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGUSR1, LEFT_WORK), (signal.SIGTERM, 143)])
def test_a_worker_that_is_told_to_leave_gives_its_run_back(tmp_path: Path, sign: int, code: int) -> None:
    lasting = PLAN.replace("epochs: 1, batch_size: 32", "epochs: 1, batch_size: 1").replace("train=100", "train=1000")
    (tmp_path / "plan.yaml").write_text(lasting)
    study = Study(tmp_path / "one", load_plan(tmp_path / "plan.yaml"))
    study.prepare()
    start_server()  # which has imported everything: a process of its own would take ten seconds for that
    worker = multiprocessing.get_context("forkserver").Process(target=work_until_told, args=(study.folder,))
    worker.start()
    assert worker.pid is not None
    until = time.monotonic() + 120
    while not list(study.folder.glob("progress/*")) and time.monotonic() < until:
        assert worker.is_alive(), "it ended before it was told to"
        time.sleep(0.1)
    os.kill(worker.pid, sign)
    worker.join(60)
    assert worker.exitcode == code
    status = status_of(study)
    assert (status.running, status.failed, status.missing) == ((), 0, 4)
    [work] = (study.folder / "work").iterdir()
    state = load_checkpoint(work)
    assert state is not None, "inside of its first epoch, minutes before it would write one"
    assert state["story"]["batch"] > 0
