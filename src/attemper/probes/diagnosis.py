"""`attemper.diagnose`: what the attention of a model does with a batch, per block and head."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError, UnmetError, suggestion
from attemper.probes.attention import Seen, head_statistics
from attemper.probes.block_jacobians import block_jacobians
from attemper.probes.branch_rows import Log
from attemper.probes.conditioning import conditioning
from attemper.probes.findings import looks_untrained
from attemper.probes.patterns import first_samples, sinks, twins
from attemper.probes.smoothing import logit_push, own_prediction
from attemper.probes.table import HeadRow, JacobianRow, SmoothingRow, Table, TokenRow
from attemper.probes.tokens import BlockWatch, block_watches
from attemper.probes.watching import AttentionWatch, in_eval, looking, run_model, samples_in
from attemper.probes.watching import find_attention as find_attention
from attemper.sites import AttentionSite, Geometry, Sites
from attemper.sites.targets import Targets
from attemper.tempering.subclassing import Action

PROBES = {
    "entropy": "entropy of attention, against its maximum and against the uniform distribution",
    "distance": "how far attention reaches on the grid of patches",
    "logits": "largest logit, lengths of queries and keys",
    "sinks": "a key that gets most of all weights: its share, the length of its value, the rank of the head's output",
    "twins": "heads of one layer that attend to the same",
    "conditioning": "κ, effective rank and similarity of the tokens through every block",
    "smoothing": "whether the gradient of the logits flattens attention, without and with the recipe",
    "jacobian": "κ of the Jacobians of attention and feed-forward network, without and with their skips; slow",
}
"""Names for `diagnose(probes=…)`, with what each of them looks at."""

DEFAULT = ("entropy", "distance", "logits", "sinks", "twins", "conditioning")

MOST_DECOMPOSED = 8
"""Samples whose token matrices are decomposed: singular values take longer than the model."""


def diagnose(
    model: nn.Module,
    batch: Any,
    probes: Sequence[str] = DEFAULT,
    *,
    targets: Targets | None = None,
    jacobian_limit: int | None = None,
    loss: Callable[[], Tensor] | None = None,
    log: Log = lambda line: None,
) -> Table:
    """Look at a model, tempered or plain, while it runs on a batch, in eval mode; for "smoothing" in training mode too.

    Fused attention stays on. Afterwards everything is as it was: outputs, weights, modes, random generators.

    batch: what the model takes: a tensor, a tuple of arguments, or a dict of named ones.
    probes: names of `attemper.probes.PROBES`.
    targets: globs on the names of modules of your own that compute attention, as in `attemper.apply`.
    jacobian_limit: with more coordinates (tokens × channels) than that, of a Jacobian only σ_max is computed; otherwise
        4,096 on a CPU and 25,000 on a GPU.
    loss: for "smoothing": runs the model and gives the loss; otherwise cross-entropy against the classes that the model
        holds most probable itself, and what the recipe adds to it.
    log: called with a line before each Jacobian, which may take minutes.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> table = diagnose(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 9, 16))
    >>> [(row.block, row.head) for row in table.heads]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    wanted = _check(probes)
    sites = find_attention(model, targets)
    with in_eval(model), torch.no_grad():
        heads, unmet = head_rows(model, batch, sites, wanted)
        notes = [f"'{name}' computed no attention that could be seen" for name in unmet]
        tokens: tuple[TokenRow, ...] = ()
        jacobians: tuple[JacobianRow, ...] = ()
        if "conditioning" in wanted:
            tokens = _token_rows(model, batch, sites)
        if "jacobian" in wanted:
            jacobians = block_jacobians(model, batch, sites, jacobian_limit, log)
            notes += [] if jacobians else ["no Jacobian: this model has no blocks that are recognised"]
    smoothing: tuple[SmoothingRow, ...] = ()
    if "smoothing" in wanted:
        smoothing = logit_push(model, loss or own_prediction(model, batch), targets=targets)
    return Table(
        type(model).__name__, samples_in(batch), heads, tokens, jacobians, smoothing, tuple(notes),
        untrained=looks_untrained(model),
    )  # fmt: skip


def _check(probes: Sequence[str]) -> frozenset[str]:
    names = [probes] if isinstance(probes, str) else list(probes)
    for name in names:
        if name not in PROBES:
            raise ParameterError(
                f"there is no probe '{name}'.{suggestion(name, PROBES)} There are: {', '.join(PROBES)}."
            )
    if not names:
        raise ParameterError(f"probes is empty; name some of {', '.join(PROBES)}")
    return frozenset(names)


# ---------------------------------------------------------------------------------------------------------- attention
def head_rows(
    model: nn.Module, batch: Any, sites: Sites, probes: frozenset[str]
) -> tuple[tuple[HeadRow, ...], list[str]]:
    """One pass: a row per head, and the names of attention sites that were not met."""
    found: dict[str, list[dict[str, Tensor]]] = {}

    def tell(site: AttentionSite, call: Seen) -> None:
        found.setdefault(site.name, []).append(_statistics(call, probes, site.geometry))

    watches: list[tuple[nn.Module, Action]] = [(site.module, AttentionWatch(site, tell)) for site in sites.attentions]
    with looking(watches):
        run_model(model, batch)
    if not found:
        raise UnmetError(
            f"{type(model).__name__} computed no attention by scaled_dot_product_attention, "
            "multi_head_attention_forward or a softmax over the last axis of 4-D logits. A Transformers model may need "
            "attn_implementation='sdpa'."
        )
    rows = [row for site in sites.attentions if site.name in found for row in _rows(site, found[site.name])]
    return tuple(rows), [site.name for site in sites.attentions if site.name not in found]


def _statistics(call: Seen, probes: frozenset[str], geometry: Geometry | None) -> dict[str, Tensor]:
    """What the probes say about one call, one number per head each."""
    whole = head_statistics(call, probes, geometry)
    found = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    with torch.autocast(call.device.type, enabled=False):
        few = first_samples(call)
        found |= sinks(few) if "sinks" in probes else {}
        found |= twins(few) if "twins" in probes else {}
    if "sinks" in probes:
        found["keys"] = torch.full(call.shape[1:2], call.shape[3])
    return {name: value for name, value in found.items() if value is not None}


def _rows(site: AttentionSite, found: list[dict[str, Tensor]]) -> list[HeadRow]:
    """The heads of one attention; where a pass calls it several times, means over the calls."""
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each[name] for each in found if name in each]
        if len({len(value) for value in values}) > 1:
            continue
        if name in WHOLE:  # places, of which there is no mean
            columns[name] = values[0].int().tolist()
        else:
            merge = torch.amax if name == "logit_max" else torch.mean
            columns[name] = merge(torch.stack(values), 0).tolist()
    heads = max((len(values) for values in columns.values()), default=0)
    return [
        HeadRow(site.block, site.name, head, **{name: values[head] for name, values in columns.items()})
        for head in range(heads)
    ]


WHOLE = ("sink_key", "twin", "keys")
"""Columns that are numbers of keys or heads."""


# ------------------------------------------------------------------------------------------------------------- tokens
def _token_rows(model: nn.Module, batch: Any, sites: Sites) -> tuple[TokenRow, ...]:
    rows: list[TokenRow] = []

    def tell(block: int, place: str, tokens: Tensor) -> None:
        rows.append(TokenRow(block, place, *conditioning(tokens[:MOST_DECOMPOSED])))

    with looking(block_watches(model, sites, BlockWatch, tell)):
        run_model(model, batch)
    return tuple(rows)
