"""One self-contained HTML page out of sections: style and script inside, nothing fetched from anywhere."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from attemper.lab.report.drawing import symbols
from attemper.lab.report.markup import escape


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page, with a heading of its own and a link to it at the top."""

    heading: str
    body: str
    """Markup; what comes from outside must have gone through `escape`."""
    lead: str = ""
    """Plain text below the heading: what there is to see, and how to read it."""

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.heading.lower()).strip("-")


KICKER = '<p class="kicker"><span>Attemper'


def is_page(data: bytes) -> bool:
    """Whether a file is one of these pages."""
    return KICKER.encode() in data


def page(title: str, sections: Sequence[Section], *, head: str = "", kicker: str = "Attemper") -> str:
    """The whole page.

    head: markup between the title and the sections, such as the verdict of a study.
    kicker: the small line above the title; it begins with 'Attemper', by which our pages are known.
    """
    style, script = _file("page.css"), _file("page.js")
    links = "".join(f'<li><a href="#{section.anchor}">{escape(section.heading)}</a></li>' for section in sections)
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    # Only this style and this script may run, and nothing may be loaded: whatever slipped past `escape` stays inert.
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
{symbols()}
<header>
<p class="kicker"><span>{escape(kicker)}</span>
<button type="button" id="theme" hidden>Dark</button></p>
<h1>{escape(title)}</h1>
{head}
{contents}
</header>
<main id="main" tabindex="-1">
{"".join(_section(section) for section in sections)}</main>
<div id="told" class="unseen" role="status"></div>
<script>{script}</script>
</body>
</html>
"""


def _section(section: Section) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    return (
        f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-heading">'
        f'<h2 id="{section.anchor}-heading">{escape(section.heading)}</h2>{lead}{section.body}</section>\n'
    )


def _file(name: str) -> str:
    return resources.files("attemper.lab.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls an inline element by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
