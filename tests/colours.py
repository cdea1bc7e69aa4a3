"""The colours of the report's style sheet."""

from __future__ import annotations

import re
from importlib import resources


def palette() -> dict[str, tuple[str, str]]:
    style = resources.files("attemper.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)}
