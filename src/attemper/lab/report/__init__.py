"""Reports: one self-contained HTML page, its charts drawn here as SVG."""

from attemper.lab.report.page import Section, page
from attemper.lab.report.study import render

__all__ = ["Section", "page", "render"]
