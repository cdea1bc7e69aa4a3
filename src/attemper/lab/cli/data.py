"""`attemper data …`: fetch and check data sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from attemper.lab.cli.options import Data
from attemper.lab.cli.printing import console, say

Task = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]


@dataclass(frozen=True)
class Prepare:
    """Download what a task needs and is not there yet, or compute its spectrograms once, then check it.

    On a machine without network, copy the official files under the data root and use 'attemper data verify'.

    Examples
      attemper data prepare cifar10
      attemper data prepare cifar100 --data /path/to/data
      attemper data prepare audio:genres
    """

    task: Task
    """Such as cifar10, cifar100, audio:PATH, timm:NAME."""
    data: Data = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.tasks.registry import prepare

        say(console(), *prepare(self.task, self.data))
        return 0


@dataclass(frozen=True)
class Preview:
    """Show which classes the names of files give, and how many files each has; no file is opened.

    Of use before a pattern for names is put into a plan: {label} is the class, files with the same {group} are never
    separated, * is anything and # a number.

    Examples
      attemper data preview folder:photos
      attemper data preview "audio:recordings(label='{label}_{group}_*.wav')"
    """

    task: Task
    """Such as folder:PATH or audio:PATH."""
    data: Data = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.tasks.registry import preview

        say(console(), *preview(self.task, self.data))
        return 0


@dataclass(frozen=True)
class Verify:
    """Check that the files of a task are there and whole, against their published checksums where there are any.

    Examples
      attemper data verify cifar10
      attemper data verify folder:flowers
      attemper data verify "folder:flowers(broken=skip)"
    """

    task: Task
    """Such as digits, cifar10, cifar100, folder:PATH, audio:PATH, wds:PATH, hf:NAME, timm:NAME."""
    data: Data = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.tasks.registry import verify

        say(console(), *verify(self.task, self.data))
        return 0
