"""The command line: `attemper compare`, `train`, `evaluate`, `reproduce`, `study`, `report`, `diagnose` and more.

Every command is a small dataclass whose fields are its options and whose `run` does the work and gives the exit code.
0: done. 1: done, but some runs failed. 2: what was asked for cannot be done. 130: stopped by Ctrl-C; 143: by SIGTERM.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code. words: the command line; None: the one that was typed."""
    try:
        return _run(sys.argv[1:] if words is None else list(words))
    except KeyboardInterrupt:  # also while something is imported
        sys.stderr.write("attemper: stopped\n")
        return 130


def _run(words: list[str]) -> int:
    from attemper.errors import AttemperError, first_line
    from attemper.lab.cli.commands import read
    from attemper.lab.cli.complaints import complain, missing_module
    from attemper.lab.cli.progress_bar import told_on_terminal
    from attemper.lab.errors import StoppedError

    try:
        command = read(words)
        with told_on_terminal():
            return command.run(words)
    except StoppedError as stopped:
        complain(str(stopped))
        return stopped.code
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except AttemperError as error:
        complain(str(error))
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "attemper":
            raise
        complain(missing_module(error.name))
        return 2
    except BrokenPipeError:  # whoever read our output has enough of it
        sys.stderr.close()
        return 0
    except MemoryError as error:
        complain(f"there is not enough memory for this: {first_line(error)}")
        return 2
    except OSError as error:  # of a file that nobody has looked after, or of a network
        complain(first_line(error))
        return 2
