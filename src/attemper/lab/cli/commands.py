"""All commands, and how a line of words becomes one of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import tyro

import attemper
from attemper.errors import suggestion
from attemper.lab.bench.commands import Ops, Step
from attemper.lab.cli.compare import Compare
from attemper.lab.cli.data import Prepare, Verify
from attemper.lab.cli.diagnose import Diagnose
from attemper.lab.cli.estimate import EstimateCommand
from attemper.lab.cli.evaluate import Evaluate
from attemper.lab.cli.experiment import Experiment
from attemper.lab.cli.methods import Methods
from attemper.lab.cli.reproduce import Reproduce
from attemper.lab.cli.study import Export, Report, Resume, Status
from attemper.lab.cli.submit import Submit, Work
from attemper.lab.cli.train import Train

__all__ = ["read"]


class Command(Protocol):
    """One command, its options read."""

    def run(self, words: Sequence[str] = ()) -> int:
        """Do it, and give the exit code. words: what was typed."""
        ...


class BenchOps(Ops):
    __doc__ = Ops.__doc__

    def run(self, words: Sequence[str] = ()) -> int:  # type: ignore[override]
        super().run(words[1:])
        return 0


class BenchStep(Step):
    __doc__ = Step.__doc__

    def run(self, words: Sequence[str] = ()) -> int:  # type: ignore[override]
        super().run(words[1:])
        return 0


Commands = Mapping[str, Any]
GROUPS: dict[str, tuple[str, Commands]] = {
    "study": (
        "Look at a study, go on with it, take its results elsewhere.",
        {"status": Status, "resume": Resume, "work": Work, "submit": Submit, "export": Export},
    ),
    "plan": ("Know what a plan will take before it is run.", {"estimate": EstimateCommand}),
    "data": ("Fetch and check data sets.", {"prepare": Prepare, "verify": Verify}),
    "bench": ("Measure what methods cost on this machine.", {"ops": BenchOps, "step": BenchStep}),
}
COMMANDS: Commands = {
    "compare": Compare,
    "train": Train,
    "evaluate": Evaluate,
    "reproduce": Reproduce,
    "study": GROUPS["study"],
    "plan": GROUPS["plan"],
    "report": Report,
    "diagnose": Diagnose,
    "experiment": Experiment,
    "methods": Methods,
    "data": GROUPS["data"],
    "bench": GROUPS["bench"],
}


def read(words: Sequence[str]) -> Command:
    """The command that the words ask for. Help and mistakes in the words end the program."""
    if words and words[0] == "--version":
        _end(f"attemper {attemper.__version__}")
    about = "Regularise attention in any transformer, and see whether it helped."
    kind, path = _find(COMMANDS, words, "attemper", about)
    if isinstance(kind, tuple):
        kind, path = _find(kind[1], words[1:], path, kind[0])
    command: Command = tyro.cli(
        kind,
        prog=path,
        description=inspect.cleandoc(kind.__doc__ or ""),
        args=list(words[len(path.split()) - 1 :]),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    return command


def _find(commands: Commands, words: Sequence[str], path: str, about: str) -> tuple[Any, str]:
    """What the first word names, and the path to it."""
    if not words or words[0] in ("-h", "--help", "help"):
        _end(_overview(commands, path, about))
    if words[0] not in commands:
        text = f"there is no '{path} {words[0]}'.{suggestion(words[0], commands)} There are: {', '.join(commands)}."
        sys.stderr.write(f"attemper: {text}\n")
        raise SystemExit(2)
    return commands[words[0]], f"{path} {words[0]}"


def _overview(commands: Commands, path: str, about: str) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {path} COMMAND …", "", about, ""]
    lines += [f"  {name:{width}}  {_first_line(kind)}" for name, kind in commands.items()]
    lines += ["", f"'{path} COMMAND --help' tells more and shows examples."]
    if path == "attemper":
        lines.append("'attemper compare' alone runs a comparison of eight recipes, in about three minutes.")
    return "\n".join(lines)


def _first_line(kind: Any) -> str:
    if isinstance(kind, tuple):
        return str(kind[0])
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def _end(text: str) -> NoReturn:
    sys.stdout.write(text + "\n")
    raise SystemExit(0)
