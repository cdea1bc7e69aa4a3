"""Finding the sites of a model: one walk over its modules, with what each library's adapter knows."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from functools import cache

from torch import nn

from attemper.sites import grids, timm, torchvision, transformers
from attemper.sites.adapter import Adapter
from attemper.sites.base import AttentionSite, BlockSite, Geometry, MlpSite, SeenCall, Sites
from attemper.sites.convolutions import find_convolutions
from attemper.sites.detect import computes_attention, find_heads, find_projections, has_projection, is_called_attention
from attemper.sites.gates import is_gate
from attemper.sites.mlp import Mlp, find_mlp, named_mlp
from attemper.sites.patches import find_patches
from attemper.sites.seen import by_calls, what_was_seen
from attemper.sites.targets import Globs, Targets, check_found, chosen_attentions, matches, reached, read_targets
from attemper.sites.tree import Tree, below


@cache
def adapters() -> tuple[Adapter, ...]:
    """What is known about each library; other packages add theirs under the entry point `attemper.sites`."""
    added = [entry.load() for entry in importlib.metadata.entry_points(group="attemper.sites")]
    return (*added, timm.ADAPTER, transformers.ADAPTER, torchvision.ADAPTER, grids.ADAPTER)


def find_sites(model: nn.Module, targets: Targets | None = None, calls: Sequence[SeenCall] | None = None) -> Sites:
    """Every attention, MLP, block, convolution and patch embedding of a model.

    targets: globs on module names, or some for each of "attention", "mlp", "blocks" and "convolutions". Attention is
        then looked for only in the modules that they match, and a matched module in which none is recognised is assumed
        to be attention, unless it is a feed-forward network.
    calls: the attention calls of a pass of the model, where one was seen; modules are then known by what they do, too.
    """
    globs = read_targets(targets)
    tree = Tree(dict(model.named_modules()))
    left_alone: dict[str, str] = {}
    attentions = by_calls(tree, _attention_names(tree, left_alone), left_alone, calls or ())
    mlps = {
        name: mlp
        for name, module in tree.modules.items()
        if not any(name == a or below(name, a) for a in (*attentions, *left_alone))
        and (mlp := find_mlp(module)) is not None
        and not is_gate(module, tree.holder(name), *mlp)
    }
    mlps |= _named_mlps(tree, globs, mlps)
    blocks = _block_of_attention(tree, attentions, mlps)
    if any(tree.listed(block) for block in blocks.values()):
        for name in [name for name in attentions if not tree.listed(blocks[name])]:
            left_alone[name] = "it stands outside the blocks; name it in targets= to include it"
            attentions.remove(name)
            del blocks[name]
    owners, in_stages = set(blocks.values()), tree.in_stages((*attentions, *mlps))
    mlp_blocks = {
        name: block for name in mlps if (block := _block_of_mlp(tree, name, attentions, in_stages, owners)) is not None
    }

    if globs is not None:
        attentions = chosen_attentions(tree, attentions, list(mlps), globs)
        outside = _block_of_attention(tree, [name for name in attentions if name not in blocks], mlps)
        blocks |= {name: block if tree.listed(block) else name for name, block in outside.items()}
    owners = set(blocks.values()) | set(mlp_blocks.values())
    order = [name for name in tree.modules if name in owners]
    index = {name: i for i, name in enumerate(order)}
    check_found(globs, "mlp", list(mlp_blocks), "feed-forward network", tree)
    check_found(globs, "blocks", order, "block", tree)
    convolutions = find_convolutions(tree, order)
    check_found(globs, "convolutions", [each.name for each in convolutions], "convolution", tree)

    sites = tuple(_attention_site(tree, name, index[blocks[name]]) for name in attentions)
    return Sites(
        attentions=sites,
        mlps=tuple(MlpSite(name, index[mlp_blocks[name]], *mlps[name]) for name in mlps if name in mlp_blocks),
        blocks=tuple(BlockSite(name, tree.modules[name], i) for name, i in index.items()),
        patches=find_patches(tree, sites),
        left_alone={name: reason for name, reason in left_alone.items() if name not in attentions},
        seen="" if calls is None else what_was_seen(tree, calls),
        reached=reached(tree, globs),
        convolutions=convolutions,
    )


def _named_mlps(tree: Tree, globs: Globs | None, known: Iterable[str]) -> dict[str, Mlp]:
    """Modules that globs for MLPs name, and that are known as one by the widths of their layers alone."""
    chosen = globs.get("mlp", ()) if isinstance(globs, dict) else ()
    found: dict[str, Mlp] = {}
    for names in matches(tree, chosen).values():
        for name in names:
            near = any(name == other or below(name, other) or below(other, name) for other in (*known, *found))
            if not near and (mlp := named_mlp(tree.modules[name])) is not None:
                found[name] = mlp
    return found


def _attention_names(tree: Tree, left_alone: dict[str, str]) -> list[str]:
    """Modules that compute attention; where two are nested, the inner one does the work."""
    found = []
    for name, module in tree.modules.items():
        reason = next((reason for adapter in adapters() if (reason := adapter.leave_alone(module))), None)
        if reason:
            left_alone[name] = reason
        elif computes_attention(module):
            found.append(name)
    innermost = [name for name in found if not tree.inside(name, found)]
    return list(dict.fromkeys(_with_projections(tree, name, innermost) for name in innermost))


def _with_projections(tree: Tree, name: str, others: Sequence[str]) -> str:
    """The attention whose projections a module works on that has none, as the `Attend` of several libraries."""
    if not isinstance(tree.modules[name], nn.MultiheadAttention) and not has_projection(tree.modules[name]):
        for above in tree.ancestors(name):
            module = tree.modules[above]
            if is_called_attention(module) and has_projection(module):
                return above if sum(below(other, above) for other in others) == 1 else name
            if tree.listed(above):
                break
    return name


def _block_of_attention(tree: Tree, attentions: Sequence[str], mlps: Iterable[str]) -> dict[str, str]:
    """The nearest list element that holds the attention; else itself, if it is one; else what holds it.

    A block whose attentions and MLP are listed inside of it, as T5's, is the element that holds them all. A stage,
    which lists blocks of its own, is none.
    """
    blocks = {}
    lists = _of_single_heads(tree, attentions)
    attentions = list(dict.fromkeys(lists.get(name, name) for name in attentions))
    in_stages = tree.in_stages((*attentions, *mlps))
    for name in attentions:
        above = [ancestor for ancestor in tree.ancestors(name) if tree.listed(ancestor)]
        whole = [
            block
            for block in above
            if tree.inside(block, list(mlps)) and sum(below(other, block) for other in attentions) <= PER_BLOCK
        ]
        alone = name if tree.listed(name) else name.rpartition(".")[0]
        blocks[name] = (whole or ([alone] if name in in_stages else above) or [alone])[0]
    return {**blocks, **{name: blocks[above] for name, above in lists.items()}}


def _of_single_heads(tree: Tree, attentions: Sequence[str]) -> dict[str, str]:
    """Attentions that are a head each, with the list that holds them: their values together are as wide as it."""
    beside: dict[str, list[str]] = {}
    for name in attentions:
        if tree.listed(name):
            beside.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, str] = {}
    for above, names in beside.items():
        projections = [find_projections(tree.modules[name]) for name in names]
        values = [parts.v.matrix().flatten(1).shape for parts in projections if parts is not None]
        if len(names) > 1 and [rows * len(names) for rows, _ in values] == [columns for _, columns in values] != []:
            found |= dict.fromkeys(names, above)
    return found


PER_BLOCK = 2
"""How many attentions a block may have: one over its own tokens, and one over those of an encoder."""


def _block_of_mlp(
    tree: Tree, name: str, attentions: Sequence[str], in_stages: frozenset[str], blocks: set[str]
) -> str | None:
    """The same for an MLP, whose layers may belong to the block itself. None: it is in no block (a head, say).

    blocks: those of attentions. An MLP inside of one belongs to it, even where it is listed there once more, as the
        experts of a mixture are, or as the parts of a layer that is a ModuleList.
    """
    if tree.inside(name, attentions) and (tree.listed(name) or name == ""):
        return name
    above = [ancestor for ancestor in tree.ancestors(name) if tree.listed(ancestor)]
    parent = name.rpartition(".")[0]
    if above:
        whole = next((ancestor for ancestor in above if ancestor in blocks), None)
        if whole is None and name in in_stages:
            return name if tree.listed(name) else parent
        return whole or above[0]
    beside = [attention for attention in attentions if attention.rpartition(".")[0] == parent]
    return parent if name and beside else None


def _attention_site(tree: Tree, name: str, block: int) -> AttentionSite:
    module = tree.modules[name]
    geometry, source = _geometry(tree, name), grids.find_source(tree, name, adapters())
    return AttentionSite(name, module, block, find_heads(module), geometry, find_projections(module), source)


def _geometry(tree: Tree, name: str) -> Geometry | None:
    """What the nearest enclosing model of a known library says about the keys' grid."""
    for owner in (name, *tree.ancestors(name)):
        for adapter in adapters():
            geometry = adapter.geometry(tree.modules[owner], tree.modules[name])
            if geometry is not None:
                return geometry
    return None
