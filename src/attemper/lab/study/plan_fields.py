"""Single fields of a plan, read from plain values: title, model, what is evaluated, which weights are kept, margin."""

from typing import Any

from attemper.errors import shown
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.errors import PlanError
from attemper.lab.evaluation.suites import parse_suites
from attemper.lab.study.plan_checks import checked_text, is_number, plan_errors

KEEP = ("best", "all", "none")


def read_title(given: Any) -> str:
    """On one line: YAML would fold others, also at breaks that no editor shows."""
    return " ".join(checked_text(given, "title", "Digits, five seeds").split()) if given else ""


def read_model(given: Any) -> str:
    """A model with its parameters, in the one form that keys are made of."""
    text = checked_text(given, "model", "vit-digits")
    with plan_errors(("model",)):
        return render_call(*parse_call(text))


def read_evaluate(given: Any) -> tuple[str, ...]:
    """Suites in their shortest form, in one order: equal evaluations must give equal keys."""
    if given is None or given == []:
        return ()
    if not isinstance(given, str) and not (isinstance(given, list | tuple) and all(isinstance(s, str) for s in given)):
        raise PlanError(
            f"evaluate is {shown(given)}; it must be suites such as [calibration, robustness].", ("evaluate",)
        )
    with plan_errors(("evaluate",)):
        return tuple(suite.text for suite in parse_suites(given))


def read_keep(given: Any) -> str:
    """Whose weights are kept."""
    if given not in KEEP:
        raise PlanError(f"keep is {shown(given)}; it must be one of {', '.join(KEEP)}.", ("keep",))
    return str(given)


def read_margin(given: Any) -> float | None:
    """A difference that does not matter, in points."""
    if given is None:
        return None
    if not is_number(given) or not 0 < given < 100:
        raise PlanError(
            f"margin is {shown(given)}; it must be a number of points above 0, such as 0.5: differences that small do "
            "not matter.",
            ("margin",),
        )
    return float(given)
