"""`attemper bench …`: what methods cost on this machine."""

from collections.abc import Sequence

from attemper.lab.bench.commands import Loop, Ops, Step


class BenchOps(Ops):  # noqa: D101
    __doc__ = Ops.__doc__

    def run(self, words: Sequence[str] = ()) -> int:  # type: ignore[override]
        super().run(words[1:])
        return 0


class BenchStep(Step):  # noqa: D101
    __doc__ = Step.__doc__

    def run(self, words: Sequence[str] = ()) -> int:  # type: ignore[override]
        super().run(words[1:])
        return 0


class BenchLoop(Loop):  # noqa: D101
    __doc__ = Loop.__doc__

    def run(self, words: Sequence[str] = ()) -> int:  # type: ignore[override]
        super().run(words[1:])
        return 0
