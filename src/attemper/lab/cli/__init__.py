"""The command line: `attemper compare`, `train`, `evaluate`, `reproduce`, `study`, `report`, `diagnose` and more.

Every command is a small dataclass whose fields are its options and whose `run` does the work and gives the exit code.
0: done. 1: done, but some runs failed. 2: what was asked for cannot be done. 130: stopped by Ctrl-C; 143: by SIGTERM.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code. words: the command line; None: the one that was typed."""
    try:
        with _remembering_interrupts() as interrupts:
            return _run(sys.argv[1:] if words is None else list(words), interrupts)
    except KeyboardInterrupt:  # also while something is imported
        sys.stderr.write("attemper: stopped\n")
        return 130


@contextlib.contextmanager
def _remembering_interrupts() -> Iterator[list[int]]:
    """Context manager: inside it, Ctrl-C raises KeyboardInterrupt as always, and is noted in the list that it gives.

    Modules in C that are being imported can swallow it, and whatever fails in its place is then of no interest.
    """
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _run(words: list[str], interrupts: list[int]) -> int:
    from attemper.errors import AttemperError, first_line
    from attemper.lab.cli.commands import read
    from attemper.lab.cli.complaints import complain, missing_module
    from attemper.lab.cli.progress_bar import progress_on_terminal
    from attemper.lab.errors import StoppedError

    try:
        try:
            command = read(words)
            with progress_on_terminal():
                return command.run(words)
        except Exception as error:
            if interrupts and not isinstance(error, StoppedError):
                raise KeyboardInterrupt from None
            raise
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
