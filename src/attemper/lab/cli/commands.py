"""All commands, and how a line of words becomes one of them.

A command's module is loaded when the command is asked for. What it needs for its work is loaded when it is run, so that
help and mistakes in the words do not wait for torch.
"""

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import attemper
from attemper.errors import suggestion


class Command(Protocol):
    """One command, its options read."""

    def run(self, words: Sequence[str] = ()) -> int:
        """Do it, and give the exit code. words: what was typed."""
        ...


Group = tuple[str, Mapping[str, str]]
"""A line about some commands, and their classes by name."""

COMMANDS: Mapping[str, str | Group] = {
    "compare": "compare:Compare",
    "recommend": "recommend:Recommend",
    "train": "train:Train",
    "evaluate": "evaluate:Evaluate",
    "predict": "predict:Predict",
    "export": "export:ExportModel",
    "reproduce": "reproduce:Reproduce",
    "study": (
        "Look at a study, go on with it, take its results elsewhere.",
        {
            "status": "study:Status",
            "resume": "study:Resume",
            "work": "submit:Work",
            "submit": "submit:Submit",
            "export": "study:Export",
        },
    ),
    "plan": (
        "Know whether a plan can be run, and what it will take.",
        {"check": "check:CheckCommand", "estimate": "estimate:EstimateCommand"},
    ),
    "report": "study:Report",
    "diagnose": "diagnose:Diagnose",
    "experiment": "experiment:Experiment",
    "methods": "methods:Methods",
    "data": (
        "Fetch and check data sets.",
        {"prepare": "data:Prepare", "preview": "data:Preview", "verify": "data:Verify"},
    ),
    "bench": (
        "Measure what methods cost on this machine.",
        {"ops": "bench:BenchOps", "step": "bench:BenchStep", "loop": "bench:BenchLoop"},
    ),
}
"""Module and class of every command, in the order of the help; the modules lie beside this one."""


def load(target: str) -> Any:
    """The class of a command."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"attemper.lab.cli.{module}"), name)


def read(words: Sequence[str]) -> Command:
    """The command that the words ask for. Help and mistakes in the words end the program."""
    if words and words[0] == "--version":
        _end(f"attemper {attemper.__version__}")
    about = "Regularise attention in any transformer, and see whether it helped."
    found, path = _find(COMMANDS, words, "attemper", about)
    if not isinstance(found, str):
        found, path = _find(found[1], words[1:], path, found[0])
    kind = load(found)
    import tyro

    command: Command = tyro.cli(
        kind,
        prog=path,
        description=inspect.cleandoc(kind.__doc__ or ""),
        args=list(words[len(path.split()) - 1 :]),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    return command


def _find(commands: Mapping[str, Any], words: Sequence[str], path: str, about: str) -> tuple[Any, str]:
    """What the first word names, and the path to it."""
    if not words or words[0] in ("-h", "--help", "help"):
        _end(_overview(commands, path, about))
    if words[0] not in commands:
        text = f"there is no '{path} {words[0]}'.{suggestion(words[0], commands)} There are: {', '.join(commands)}."
        sys.stderr.write(f"attemper: {text}\n")
        raise SystemExit(2)
    return commands[words[0]], f"{path} {words[0]}"


def _overview(commands: Mapping[str, str | Group], path: str, about: str) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {path} COMMAND …", "", about, ""]
    lines += [f"  {name:{width}}  {_first_line(each)}" for name, each in commands.items()]
    lines += ["", f"'{path} COMMAND --help' tells more and shows examples."]
    if path == "attemper":
        lines.append("'attemper compare' alone runs a comparison of eight recipes, in about three minutes.")
    return "\n".join(lines)


def _first_line(each: str | Group) -> str:
    return inspect.cleandoc(load(each).__doc__ or "").partition("\n")[0] if isinstance(each, str) else each[0]


def _end(text: str) -> NoReturn:
    sys.stdout.write(text + "\n")
    raise SystemExit(0)
