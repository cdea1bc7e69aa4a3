"""Attention known by what ran: modules that made attention calls in a pass of the model, whatever they are called."""

from collections.abc import Iterable, Sequence

from attemper.sites.base import SeenCall
from attemper.sites.detect import is_called_attention
from attemper.sites.tree import Tree, below

CHANNELS = "its softmax is over channels, not over keys"
SCORES = "it weighs tokens by scores in which no queries and keys meet"


def by_calls(tree: Tree, attentions: Sequence[str], left_alone: dict[str, str], calls: Sequence[SeenCall]) -> list[str]:
    """The attentions that were recognised, corrected by the calls of a pass; what is none is noted in `left_alone`.

    Without calls, those that were recognised.
    """
    busy = {name for call in calls if call.over == "keys" for name in call.modules}
    for call in calls:
        here = next((name for name in call.modules if name in attentions), None)
        if call.over == "channels" and here is not None and here not in busy:
            left_alone[here] = CHANNELS
        if call.over == "scores" and here is None:
            left_alone.setdefault(_weighted(tree, call.modules), SCORES)
    kept = [name for name in attentions if name not in left_alone]
    known = {*kept, *left_alone}
    found = [_weighted(tree, call.modules) for call in calls if call.over == "keys" and not known & set(call.modules)]
    # what was recognised inside of a module that computes attention itself, and did not run, is not what does
    kept = [name for name in kept if name in busy or not any(below(name, above) for above in found)]
    found = [name for name in found if not tree.inside(name, [*kept, *found])]
    return [name for name in tree.modules if name in kept or name in found]


def _weighted(tree: Tree, modules: Sequence[str]) -> str:
    """The innermost of the modules that were running that has weights: what has none only computes for it."""
    weighted = (name for name in modules if any(True for _ in tree.modules[name].parameters()))
    return next(weighted, modules[0])


def what_was_seen(tree: Tree, calls: Sequence[SeenCall]) -> str:
    """What the modules that are called attention did in a pass, in words; empty: there are none.

    "12 modules are called CrossAttention ('a.0', …), and no softmax over keys ran in them: ...".
    """
    named: dict[str, list[str]] = {}
    for name, module in tree.modules.items():
        if is_called_attention(module):
            named.setdefault(type(module).__name__, []).append(name)
    said = []
    for kind, names in named.items():
        inside = [call.what for call in calls if set(names) & set(call.modules)]
        many = f"{len(names)} modules are called" if len(names) > 1 else "1 module is called"
        said.append(f"{many} {kind} ('{names[0]}'{', …' if len(names) > 1 else ''}); seen in them: {counted(inside)}.")
    return " ".join(said)


def counted(things: Iterable[str]) -> str:
    """What was seen, each once with how often.

    >>> counted(["a softmax", "a product", "a softmax"])
    'a softmax (2 times), a product'
    """
    things = list(things)
    often = {thing: things.count(thing) for thing in dict.fromkeys(things)}
    return ", ".join(thing if n == 1 else f"{thing} ({n} times)" for thing, n in often.items()) or "no softmax"
