"""Which recipes act on which models: every architecture × every recipe, on small models with random weights.

    python benchmarks/sweep.py --jobs 2 --json benchmarks/results/sweep.json
    python benchmarks/sweep.py --library timm --models "swin*" --recipes dropkey droppath --report swin.md
    python benchmarks/sweep.py --show benchmarks/results/sweep.json --markdown
    python benchmarks/sweep.py --show NEW.json --compare OLD.json
    python benchmarks/sweep.py --fill README.md

A pair *acts* where outputs, loss or gradients of a training pass differ from those of the plain model. It is *refused*
where Attemper raises an error of its own, a *no-op* where nothing differs, and a *crash* where anything else goes wrong
that the plain model does not do: another error, other outputs in eval mode, gradients that are not finite.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from architectures import LIBRARIES, architectures_of, is_installed
from sweeping.outcomes import RECIPES
from sweeping.report import by_reason, counts, difference, listing, markdown, oddities
from sweeping.results import Sweep, about_here, fill, load, save
from sweeping.running import Model, prepare, sweep


def chosen(libraries: list[str], globs: list[str]) -> list[Model]:
    """The models of these libraries whose names match."""
    names = [(library, name) for library in libraries for name in architectures_of(library)]
    return [(library, name) for library, name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def run(options: argparse.Namespace) -> Sweep:
    """Measure what was asked for."""
    prepare()
    absent = tuple(library for library in options.library if not is_installed(library))
    for library in absent:
        print(f"{library} is not installed here: its models are left out")
    models = chosen([library for library in options.library if library not in absent], options.models)
    if not models:
        raise SystemExit(f"no model matches {' '.join(options.models)} in {', '.join(options.library)}")
    found, left_out = sweep(
        models, options.recipes, options.jobs, options.timeout, lambda line: print(line, flush=True)
    )
    return Sweep(found, left_out, absent, about_here())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", default=list(LIBRARIES), choices=LIBRARIES, help="all unless given")
    parser.add_argument("--models", nargs="+", default=["*"], metavar="GLOB", help="models whose names match")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help="all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--timeout", type=int, default=60, help="processor seconds that a pair may take (default 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write here which models have which reason")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: take the outcomes from this file")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print what is different from this file")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.add_argument(
        "--fill", nargs="+", type=Path, metavar="PAGE", help="only write the tables of these pages anew"
    )
    options = parser.parse_args(words)
    for page in options.fill or ():
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    if options.fill:
        return 0
    result = load(options.show) if options.show else run(options)
    if options.json:
        save(result, options.json)
    if options.report:
        options.report.write_text(listing(result.found) + "\n", encoding="utf-8")
    print(", ".join(f"{kind} {number}" for kind, number in counts(result.found).items()))
    print(by_reason(result.found))
    for line in oddities(result.found):
        print(line)
    for name, reason in result.left_out.items():
        print(f"left out, since it does not run by itself: {name} ({reason})")
    if options.markdown:
        print(markdown(result.found))
    if options.compare:
        print(difference(load(options.compare).found, result.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
