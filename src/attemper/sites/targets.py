"""Targets: globs on module names, for everything, or for attention, feed-forward networks and the like apart."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attemper.errors import NoSiteError, ParameterError, suggestion
from attemper.sites.tree import Tree, below

Kind = Literal["attention", "mlp", "blocks", "convolutions", "patches"]
KINDS = ("attention", "mlp", "blocks", "convolutions")
Targets = str | Sequence[str] | Mapping[str, str | Sequence[str]]
Globs = list[str] | dict[str, list[str]]


def read_targets(targets: Any) -> Globs | None:
    """Targets as plain data, checked: a list of globs, a dict of such lists, or None.

    >>> read_targets("blocks.0"), read_targets({"mlp": ("a.*", "b")})
    (['blocks.0'], {'mlp': ['a.*', 'b']})
    """
    if targets is None:
        return None
    if isinstance(targets, Mapping):
        for kind in targets:
            if kind not in KINDS:
                hint = suggestion(kind, KINDS) if isinstance(kind, str) else ""
                raise ParameterError(f"targets must name some of {', '.join(KINDS)}; got {kind!r}.{hint}")
        if not targets:
            raise ParameterError(f"targets is empty; it must name some of {', '.join(KINDS)}")
        return {kind: _globs(f"targets['{kind}']", each) for kind, each in targets.items()}
    return _globs("targets", targets)


def _globs(what: str, given: Any) -> list[str]:
    globs = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else None
    if globs is None or not all(isinstance(glob, str) for glob in globs):
        raise ParameterError(
            f"{what} must be globs on module names, such as ['blocks.*.attn'], or {{'attention': […], 'mlp': […]}}; "
            f"got {given!r}"
        )
    if not globs:
        raise ParameterError(f"{what} is empty: nothing would be tempered")
    return globs


def globs_for(globs: Globs | None, kind: Kind) -> list[str] | None:
    """The globs that choose modules of a kind; None: all of them are meant."""
    return globs.get(kind) if isinstance(globs, dict) else globs


def matches(tree: Tree, globs: Sequence[str]) -> dict[str, list[str]]:
    """Glob → the names that it matches. One that matches nothing is an error."""
    found = {glob: fnmatch.filter(tree.modules, glob) for glob in globs}
    for glob, names in found.items():
        if not names:
            raise NoSiteError(f"targets: '{glob}' matches no module. {_some(tree)}")
    return found


def reached(tree: Tree, globs: Globs | None) -> dict[Kind, frozenset[str]]:
    """Of each kind that targets choose: the names that its globs match, and everything below them."""
    found: dict[Kind, frozenset[str]] = {}
    kinds: tuple[Kind, ...] = ("attention", "mlp", "blocks", "convolutions", "patches")
    for kind in kinds:
        chosen = globs_for(globs, kind)
        if chosen is not None:
            matched = {name for names in matches(tree, chosen).values() for name in names}
            inside = (name for name in tree.modules if name in matched or matched & set(tree.ancestors(name)))
            found[kind] = frozenset(inside)
    return found


def chosen_attentions(tree: Tree, attentions: Sequence[str], mlps: Sequence[str], globs: Globs) -> list[str]:
    """The attentions inside what the globs match.

    A matched module in which none is known is assumed to be attention, unless it is a part of one that is, or has to do
    with a feed-forward network and the globs are not for attention alone.
    """
    for_attention = globs_for(globs, "attention")
    if for_attention is None:
        return list(attentions)
    chosen: set[str] = set()
    for matched in matches(tree, for_attention).values():
        known = [a for a in attentions if any(a == m or below(a, m) for m in matched)]
        innermost = [m for m in matched if not any(below(m, other) for other in (*matched, *attentions))]
        if isinstance(globs, list):
            innermost = [m for m in innermost if not any(m == f or below(m, f) or below(f, m) for f in mlps)]
        chosen.update(known or innermost)
    return [name for name in tree.modules if name in chosen]


def check_found(globs: Globs | None, kind: Kind, names: Sequence[str], what: str, tree: Tree) -> None:
    """Raise for a glob for one kind of module that matches none of that kind. names: those that there are."""
    if not isinstance(globs, dict) or kind not in globs:
        return
    for glob, matched in matches(tree, globs[kind]).items():
        if not any(name == m or below(name, m) for name in names for m in matched):
            kinds = sorted({type(tree.modules[m]).__name__ for m in matched})
            raise NoSiteError(
                f"targets['{kind}']: '{glob}' matches {len(matched)} modules ({', '.join(kinds[:6])}), and no {what} "
                "is recognised in them"
            )


def _some(tree: Tree) -> str:
    names = [name for name in tree.modules if name]
    return f"The model has {len(names)} modules: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
