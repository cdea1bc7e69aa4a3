"""The command line: `attemper compare`, `train`, `evaluate`, `reproduce`, `study`, `report`, `diagnose` and more.

Every command is a small dataclass whose fields are its options and whose `run` does the work and gives the exit code.
0: done. 1: done, but some runs failed. 2: what was asked for cannot be done. 130: stopped by Ctrl-C.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code. words: the command line; None: the one that was typed."""
    words = sys.argv[1:] if words is None else list(words)
    from attemper.errors import AttemperError
    from attemper.lab.cli.commands import read
    from attemper.lab.cli.progress_bar import told_on_terminal
    from attemper.lab.errors import StoppedError

    try:
        command = read(words)
        with told_on_terminal():
            return command.run(words)
    except StoppedError as stopped:
        _complain(str(stopped))
        return 130
    except KeyboardInterrupt:
        _complain("stopped")
        return 130
    except AttemperError as error:
        _complain(str(error))
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "attemper":
            raise
        extra = error.name if error.name in ("timm", "torchvision", "transformers") else "study"
        _complain(f"this needs '{error.name}', which is not installed: pip install 'attemper[{extra}]'")
        return 2
    except BrokenPipeError:  # whoever read our output has enough of it
        sys.stderr.close()
        return 0


def _complain(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"attemper: {text}\n")
