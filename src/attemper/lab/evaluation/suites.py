"""What an evaluation looks at: suites with their options, as texts such as 'robustness(steps=20)'."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attemper.errors import AttemperError, ParameterError, suggestion
from attemper.lab.call_syntax import check_count, parse_call, render_call

EPSILONS = (1 / 255, 2 / 255, 4 / 255, 8 / 255)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A part of an evaluation."""

    name: ClassVar[str]
    about: ClassVar[str]

    @property
    def text(self) -> str:
        """The shortest text that gives this suite again."""
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        changed = {name: value for name, (value, default) in fields.items() if value != default}
        return render_call(
            self.name, {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        )


@dataclass(frozen=True, kw_only=True)
class Calibration(Suite):
    """How far the model's confidence can be trusted: NLL, Brier score, expected calibration error, reliability."""

    name = "calibration"
    about = "NLL, Brier score, expected calibration error and the reliability diagram"
    bins: int = 15
    """Of the reliability diagram."""

    def __post_init__(self) -> None:
        check_count("bins", self.bins)


@dataclass(frozen=True, kw_only=True)
class Robustness(Suite):
    """Accuracy on covered, attacked and corrupted images."""

    name = "robustness"
    about = "accuracy under occlusion, FGSM, PGD and 14 published corruptions at five severities"
    epsilon: tuple[float, ...] = EPSILONS
    """Of FGSM and PGD: the largest change of a pixel, where pixels are in [0, 1]."""
    steps: int = 10
    """Of PGD."""
    occlusion: tuple[float, ...] = (0.1, 0.25, 0.5)
    """Shares of the image's area that are covered, in the middle and at random."""
    corruptions: tuple[str, ...] | None = None
    """Names; none: those of the published benchmark."""

    def __post_init__(self) -> None:
        from attemper.lab.evaluation.attacks import check_epsilon
        from attemper.lab.evaluation.corruptions import check_corruption
        from attemper.lab.evaluation.occlusion import check_share

        object.__setattr__(self, "epsilon", tuple(check_epsilon(each) for each in _listed(self.epsilon)))
        object.__setattr__(self, "occlusion", tuple(check_share(each) for each in _listed(self.occlusion)))
        check_count("steps", self.steps)
        if self.corruptions is not None:
            object.__setattr__(self, "corruptions", tuple(_listed(self.corruptions)))
            for name in self.corruptions:
                check_corruption(name)


@dataclass(frozen=True, kw_only=True)
class Stochastic(Suite):
    """The average over several passes in which the recipe's methods act, beside the deterministic result."""

    name = "stochastic"
    about = "the average over stochastic passes (8 by default), beside the deterministic result"
    passes: int = 8

    def __post_init__(self) -> None:
        check_count("passes", self.passes)


SUITES: dict[str, type[Suite]] = {kind.name: kind for kind in (Calibration, Robustness, Stochastic)}
DEFAULT = ("calibration", "robustness")


def parse_suites(given: str | Sequence[str | Suite]) -> tuple[Suite, ...]:
    """The suites that texts name, each once, in the order in which `SUITES` has them.

    >>> [suite.text for suite in parse_suites("robustness(steps=20), calibration")]
    ['calibration', 'robustness(steps=20)']
    """
    texts = split_suites(given) if isinstance(given, str) else list(given)
    found: dict[str, Suite] = {}
    for text in texts:
        suite = text if isinstance(text, Suite) else _parse(text)
        if suite.name in found:
            raise ParameterError(f"The suite '{suite.name}' stands twice; write its options into one of them.")
        found[suite.name] = suite
    if not found:
        raise ParameterError(f"No suite is named. There are: {', '.join(SUITES)}.")
    return tuple(found[name] for name in SUITES if name in found)


def split_suites(text: str) -> list[str]:
    """The parts of a text between commas that are in no brackets.

    >>> split_suites("calibration, robustness(epsilon=[0.1, 0.2], steps=20)")
    ['calibration', 'robustness(epsilon=[0.1, 0.2], steps=20)']
    """
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _parse(text: str) -> Suite:
    name, options = parse_call(text)
    if name not in SUITES:
        raise ParameterError(f"There is no suite '{name}'.{suggestion(name, SUITES)} There are: {', '.join(SUITES)}.")
    kind = SUITES[name]
    known = [field.name for field in dataclasses.fields(kind)]
    for option in options:
        if option not in known:
            near = suggestion(option, known)
            raise ParameterError(f"'{text}': there is no option '{option}'.{near} Options: {', '.join(known)}.")
    try:
        return kind(**options)
    except AttemperError as error:
        raise ParameterError(f"'{text}': {error}") from None


def _listed(given: Any) -> list[Any]:
    """One value, or several."""
    return list(given) if isinstance(given, tuple | list) else [given]
