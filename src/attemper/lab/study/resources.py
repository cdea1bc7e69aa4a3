"""What one run takes of a machine: cores, a GPU or a part of one, memory."""

from __future__ import annotations

from dataclasses import dataclass

from attemper.errors import ParameterError, suggestion

GIB = 1024**3


@dataclass(frozen=True)
class Resources:
    """Of one run.

    >>> Resources.parse("cpus=2,gpus=0.25")
    Resources(cpus=2.0, gpus=0.25, memory=None)
    """

    cpus: float = 1.0
    gpus: float = 0.0
    """A part of one lets several runs share it; their memory must fit together."""
    memory: float | None = None
    """GiB; none: not counted."""

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise ParameterError(f"cpus is {self.cpus:g}; a run takes more than 0.")
        if not 0 <= self.gpus <= 1:
            raise ParameterError(f"gpus is {self.gpus:g}; a run takes one GPU, a part of one, or none: 0 to 1.")
        if self.memory is not None and not self.memory > 0:
            raise ParameterError(f"memory is {self.memory:g} GiB; a run takes more than 0.")

    @classmethod
    def parse(cls, text: str) -> Resources:
        """Read 'cpus=1,gpus=0.25,memory=8'."""
        given: dict[str, float] = {}
        known = list(cls.__dataclass_fields__)
        for part in text.split(","):
            name, equals, amount = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise ParameterError(f"'{part.strip()}' is no amount; write such as cpus=1,gpus=0.25.")
            if name not in known:
                raise ParameterError(
                    f"A run takes no '{name}'.{suggestion(name, known)} There are: {', '.join(known)}."
                )
            if name in given:
                raise ParameterError(f"'{text}' names {name} twice.")
            try:
                given[name] = float(amount)
            except ValueError:
                raise ParameterError(f"{name} is '{amount}'; it must be a number.") from None
        return cls(**given)

    @property
    def bytes(self) -> int | None:
        """Memory in bytes."""
        return None if self.memory is None else int(self.memory * GIB)

    def __str__(self) -> str:
        memory = "" if self.memory is None else f",memory={self.memory:g}"
        return f"cpus={self.cpus:g},gpus={self.gpus:g}{memory}"
