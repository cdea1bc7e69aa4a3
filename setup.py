"""The long description: README.md with links that hold on a package index, too. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def absolute(text: str, home: str) -> str:
    """A page whose relative links lead to the repository; links within the page stay."""

    def lead(match: re.Match[str]) -> str:
        kind = "tree" if match[2].endswith("/") else "raw" if match[2].endswith(".png") else "blob"
        return f"{match[1]}{home}/{kind}/main/{match[2]})"

    return re.sub(r"(\]\()(?![a-z]+:|#)([^)\s]+)\)", lead, text)


urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
setup(
    long_description=absolute((ROOT / "README.md").read_text(encoding="utf-8"), urls["Repository"]),
    long_description_content_type="text/markdown",
)
