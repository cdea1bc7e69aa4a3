"""One attention call, checked once and handed to whichever implementation serves it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.ops.documents import Documents
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import NOWHERE, Offsets, Source, causal_mask

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OUT_OF_REACH = 64.0  # e⁻⁶⁴ ≈ 1.6e-28: such a key has no weight that any dtype of a network could tell from zero


@dataclass(frozen=True)
class Call:
    """The checked arguments of `attemper.attention`.

    q: (B, H, Nq, e); k: (B, H_kv, Nk, e); v: (B, H_kv, Nk, e_v), H a multiple of H_kv.
    attn_mask: boolean (True = may attend) or additive, broadcastable to (B, H, Nq, Nk).
    packed: (B, N, 3 · H · e), of which q, k and v may be views; None: nothing like it is known.
    documents: which tokens belong together, where q, k and v hold several documents, and B is 1; None: they hold none.
    with_lse: whether the log-sum-exps of the rows are wanted, too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    methods: tuple[Perturbation, ...]
    source: Source | None
    packed: Tensor | None = None
    documents: Documents | None = None
    with_lse: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Nq, Nk), the shape of the logits."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def at(self) -> Offsets:
        """Where the call stands in a larger one."""
        return NOWHERE if self.source is None else self.source.at

    @property
    def is_partial(self) -> bool:
        """Whether its rows are parts: it has some of their keys, and a row may lose all of these."""
        return self.at.splits_rows(self.k.shape[2])

    @property
    def mask_and_causal(self) -> tuple[Tensor | None, bool]:
        """The mask, and whether query i sees keys 0 … i only, by its place in this call.

        Where the call is a part of a larger one, of which queries and keys begin at different places, the mask says it.
        """
        if not self.is_causal or self.at.query == self.at.key:
            return self.attn_mask, self.is_causal
        return without_future(self.attn_mask, *self.shape[2:], self.at, self.q.device), False

    @property
    def differs_between_queries(self) -> bool:
        """Whether attn_mask may hide different keys from different queries."""
        mask = self.attn_mask
        return mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1 and self.real_keys is None

    @property
    def differs_between_grouped_heads(self) -> bool:
        """Whether attn_mask may hide different keys from query heads that share their keys."""
        mask = self.attn_mask
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1 or self.q.shape[1] == self.k.shape[1]:
            return False
        return self.real_keys is None or self.real_keys.shape[1] > 1

    @property
    def real_keys(self) -> Tensor | None:
        """Boolean (B or 1, H or 1, 1, Nk): the keys that are no padding, where attn_mask leaves all queries the same.

        None without a mask, and where one may leave them different keys. Whether a mask with a row for every query does
        is a matter of its values. They are read, for which the host waits where they are on a GPU; but not while a
        compiler traces the call or a CUDA graph captures it, where such a mask may do so.
        """
        if torch.compiler.is_compiling():
            return _shared_keys(self.attn_mask, self.q.shape[1] != self.k.shape[1])
        known: dict[str, Tensor | None] = vars(self)  # read once in a call
        if "_real_keys" not in known:
            known["_real_keys"] = _shared_keys(self.attn_mask, self.q.shape[1] != self.k.shape[1])
        return known["_real_keys"]


def reachable(additive: Tensor) -> Tensor:
    """Which keys an additive mask, or logits that contain one, leaves in reach of the row's largest entry.

    People write "masked out" as −inf, as the dtype's minimum, as −1e4 or, in Swin, as −100. All of them count.
    """
    additive = additive.detach()
    top = additive.amax(-1, keepdim=True)
    return (additive > top - OUT_OF_REACH) & (additive > -torch.inf)


def without_future(mask: Tensor | None, queries: int, keys: int, at: Offsets, device: torch.device) -> Tensor:
    """A mask that also hides from every query what comes after it, broadcastable to (B, H, queries, keys)."""
    causal = causal_mask(queries, keys, at, device)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def _shared_keys(mask: Tensor | None, grouped: bool) -> Tensor | None:
    """See `Call.real_keys`. grouped: query heads share their keys, so those that see the same ones count as one."""
    if mask is None or 0 in mask.shape:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    for axis in (1, 2):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:  # one row, expanded
            mask = mask.narrow(axis, 0, 1)
    if mask.shape[2] > 1 and not _is_readable(mask):
        return None
    seen = mask if mask.dtype == torch.bool else reachable(mask)
    shared = seen if seen.shape[2] == 1 else _shared_along(2, seen)
    if shared is None or not grouped or shared.shape[1] == 1 or not _is_readable(mask):
        return shared
    of_all = _shared_along(1, shared)
    return shared if of_all is None else of_all


def _shared_along(axis: int, seen: Tensor) -> Tensor | None:
    """The keys that all rows along an axis see, but for rows that see none, if they are the same; else None."""
    together = seen.any(axis, keepdim=True)
    same = ((seen == together) | ~seen.any(-1, keepdim=True)).all()
    try:
        return together if same else None
    except RuntimeError:  # torch.func and tracers refuse to look at values
        return None


def _is_readable(mask: Tensor) -> bool:
    """Whether its values may be looked at now."""
    if torch.compiler.is_compiling() or mask.is_meta:
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    methods: Sequence[Perturbation],
    source: Source | None,
    packed: Tensor | None = None,
    documents: Documents | None = None,
    with_lse: bool = False,
) -> Call:
    """Check shapes, dtypes, devices and methods; raise an error that names what was given and what would be right."""
    _check_tensors(q, k, v)
    if attn_mask is not None:
        _check_mask(attn_mask, q, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if documents is not None and attn_mask is not None:
        raise ParameterError(
            "attn_mask cannot be given with cu_seqlens: the documents say who sees whom; see is_causal"
        )
    if documents is not None and with_lse:
        raise ParameterError("return_lse cannot be given with cu_seqlens: the rows of documents are whole")
    methods = checked_methods(methods)
    if source is not None:
        check_part(source.at, q.shape[1], k.shape[2], methods)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Call(q, k, v, attn_mask, is_causal, scale, methods, source, packed, documents, with_lse)


def checked_methods(methods: Sequence[Perturbation] | Perturbation) -> tuple[Perturbation, ...]:
    """The methods of one call, each of which acts on attention and has one rate; raise otherwise."""
    methods = (methods,) if isinstance(methods, Perturbation) else tuple(methods)
    for method in methods:
        if not isinstance(method, Perturbation):
            raise ParameterError(f"methods must act on attention, such as DropKey(0.1); got {method!r}")
        for name in method.per_block:
            what = "rate" if name == "schedule" else name
            raise ParameterError(f"{method} has a {what} per block, and one call has no block; give the {what} itself")
        if method.is_timed:
            raise ParameterError(
                f"{method} acts in a part of training, and one call knows of no training; leave out until, start, ramp"
            )
    return methods


def refuse_documents(call: Call) -> str | None:
    """Why an implementation that knows of no documents cannot serve this call, or None."""
    return None if call.documents is None else "knows of no packed documents (cu_seqlens)"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ParameterError(f"q, k and v must have four axes (batch, heads, tokens, width), got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ParameterError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in DTYPES:
        raise ParameterError(f"q, k and v must be float64, float32, bfloat16 or float16, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ParameterError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.shape[-1] != k.shape[-1]:
        raise ParameterError(f"q and k must have the same head width, got {shapes}")
    if k.shape[:3] != v.shape[:3]:
        raise ParameterError(f"k and v must agree in batch, heads and tokens, got {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ParameterError(f"q and k must have the same batch size, got {shapes}")
    if q.shape[-1] == 0:
        raise ParameterError(f"q and k must have a head width of at least 1, got {shapes}")
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ParameterError(f"attention needs at least one head, got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ParameterError(f"the heads of q must be a multiple of those of k and v, got {shapes}")
    if k.shape[2] == 0:
        raise ParameterError(f"attention needs at least one key, got {shapes}")


def check_part(at: Offsets, heads: int, keys: int, methods: Sequence[Perturbation]) -> None:
    """Whether methods can act on a part of a larger call, which has this many heads and keys."""
    if at.heads and at.head + heads > at.heads:
        raise ParameterError(f"at.heads is {at.heads}, and this call has the heads {at.head} to {at.head + heads - 1}")
    if at.keys and at.key + keys > at.keys:
        raise ParameterError(f"at.keys is {at.keys}, and this call has the keys {at.key} to {at.key + keys - 1}")
    if not at.splits_rows(keys):
        return
    for method in methods:
        if not method.acts_on_single_keys:
            raise ParameterError(
                f"{method} needs whole rows of keys, and this call has the keys {at.key} to {at.key + keys - 1} of "
                f"them (at.key, at.keys): give it all keys, or split over samples, heads or queries instead"
            )


def _check_mask(mask: Tensor, q: Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ParameterError(f"attn_mask must be boolean (True = may attend) or floating point, got {mask.dtype}")
    if mask.device != q.device:
        raise ParameterError(f"attn_mask must be on the device of q, {q.device}, got {mask.device}")
    if mask.dim() > 4 or any(
        given not in (1, wanted) for given, wanted in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        raise ParameterError(
            f"attn_mask must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(mask.shape)}"
        )
