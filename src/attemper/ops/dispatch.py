"""`attemper.attention`: one operation, several implementations.

An implementation is a module with two functions: `refuse(call)` gives the reason why it cannot serve a call, or None,
and `attention(call)` serves it. One that can take sums of squares along has two more: `squares(call, wanted)`, which of
them, and `attention_and_squares(call, bias, factors)`. One that gives log-sum-exps has `attention_and_lse(call)`. One
that has less to do in later calls of the same layout has `repeat(call)`: it gives what to call then, with q, k, v, the
projection that they may be parts of and where the stream starts, or None. None imports another one. To add one, write
the module, list it here, and put it into the table of `choice.py` above everything that it beats.
"""

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, overload

from torch import Tensor

from attemper.errors import ParameterError, UnsupportedError, suggestion
from attemper.ops.call import Call, make_call
from attemper.ops.choice import is_short, preference
from attemper.ops.documents import Documents, make_documents
from attemper.ops.perturbation import Perturbation
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import NOWHERE, Offsets, Source, checked

IMPLEMENTATIONS: dict[str, ModuleType] = {
    name: importlib.import_module(module)  # by name: nothing here depends on a kernel
    for name, module in {
        "sdpa": "attemper.ops.sdpa",
        "tiled": "attemper.ops.tiled",
        "gather": "attemper.kernels.implementations.gather",
        "triton": "attemper.kernels.implementations.triton",
        "fa4": "attemper.kernels.implementations.fa4",
        "reference": "attemper.ops.reference",
    }.items()
}

Impl = Literal["auto", "sdpa", "tiled", "gather", "triton", "fa4", "reference"]


@dataclass(frozen=True)
class Verdict:
    """Whether one implementation can serve a call."""

    name: str
    serves: bool
    reason: str
    """Why not; empty where it serves."""
    chosen: bool
    """Whether `impl="auto"` picks it."""
    because: str = ""
    """Why `auto` picks it; empty where it does not."""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    methods: Sequence[Perturbation] | Perturbation = (),
    seed: int | Tensor | None = None,
    at: Offsets | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: Impl = "auto",
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    methods: Sequence[Perturbation] | Perturbation = (),
    seed: int | Tensor | None = None,
    at: Offsets | None = None,
    return_lse: Literal[True],
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    methods: Sequence[Perturbation] | Perturbation = (),
    seed: int | Tensor | None = None,
    at: Offsets | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention with methods applied inside. Returns (B, H, Nq, e_v).

    q: (B, H, Nq, e).
    k, v: (B, H_kv, Nk, e) and (B, H_kv, Nk, e_v); H must be a multiple of H_kv (grouped-query heads).
    attn_mask: broadcastable to (B, H, Nq, Nk); boolean (True = may attend) or added to the logits.
    is_causal: query i sees keys 0 … i only, both numbered as in the larger call where there is one (see at). May be
        combined with attn_mask.
    scale: 1/√e unless given.
    methods: what acts in this call, such as `[DropKey(0.1)]`. There is no training mode here: they always act.
    seed: an int or a 0-dim int64 tensor; drawn from torch's generator where None.
    at: where this call stands in a larger one of which it is a part, for code that splits attention over devices: the
        numbers of its first sample, head, query and key. It needs a seed, the same for all parts. A call that has a
        part of the keys (`at.key`, `at.keys`) leaves a row that loses all of them without any: its output is zeros.
    cu_seqlens: (D + 1,) int32 or int64, where each of D documents begins among the tokens, and the end: B is 1, and a
        document attends to itself alone, as in a call of its own with at=Offsets(sample=d): its masks are those, and
        is_causal is within it. What is dropped independently is the same in the padded batch of these documents.
    cu_seqlens_k: the same for the keys, where documents have other numbers of keys than of queries.
    return_lse: return (out, lse). lse: (B, H, Nq), log Σ exp(logit) over the keys that are left of a row, −inf where
        none is; float32, or float64 for float64 inputs; differentiable. `attemper.merge_parts` merges parts by it.
    impl: "auto" takes the fastest implementation that can serve the call; a name is obeyed or refused.

    >>> import torch
    >>> from attemper.methods import DropKey
    >>> q = k = v = torch.randn(2, 3, 17, 8)
    >>> attention(q, k, v, methods=[DropKey(0.1)], seed=0).shape
    torch.Size([2, 3, 17, 8])
    """
    if at is not None and seed is None:
        raise ParameterError("at= needs a seed, the same for all parts of a call; without one each would draw its own")
    source = None if seed is None else Source(seed_tensor(seed, q.device), at=checked(at or NOWHERE))
    documents = _documents(q, k, cu_seqlens, cu_seqlens_k, at or NOWHERE)
    call = make_call(
        q, k, v, attn_mask, is_causal, scale, methods, source, None, documents, return_lse  # type: ignore[arg-type]
    )  # fmt: skip
    if not return_lse:
        return attend(call, impl)
    out, lse = choose(call, impl).attention_and_lse(call)
    return out, lse


def _documents(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, at: Offsets
) -> Documents | None:
    if not q.dim() == k.dim() == 4:
        return None  # which `make_call` refuses
    return make_documents(cu_seqlens, cu_seqlens_k, (q.shape[0], q.shape[2], k.shape[2]), at, q.device)


WORTH_WHILE = 2**22
"""Numbers in Q from which a GPU, and not the host, is waited for: torch's own launch is the quicker one."""


def fastest_unperturbed(call: Call, alone: bool = False) -> Literal["auto", "triton"]:
    """The `impl` that is fastest for a call without methods, also where its last bits are not those of torch's kernels.

    `auto` keeps such calls bit for bit as they are. Masks that are added, and causal calls, were not measured.
    alone: nothing is taken along from the call (`attend_and_square`).
    """
    if alone and call.q.numel() < WORTH_WHILE:
        return "auto"
    if call.is_causal or (call.attn_mask is not None and call.attn_mask.is_floating_point()):
        return "auto"
    return "triton" if is_short(call) and IMPLEMENTATIONS["triton"].refuse(call) is None else "auto"


def attend(call: Call, impl: str) -> Tensor:
    """Serve a call that was checked before."""
    out: Tensor = choose(call, impl).attention(call)
    return out


def attend_and_square(
    call: Call, impl: str, bias: Tensor | None, wanted: Collection[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`attend`, and those of the wanted squares of the projections that come along with it for next to nothing.

    bias: of the projection that gave call.packed. wanted: "v", ‖V − b_v‖², or "qk", ‖(Q − b_q)(K − b_k)ᵀ‖², or both.
    """
    chosen = choose(call, impl)
    names = chosen.squares(call, wanted) if wanted and hasattr(chosen, "squares") else ()
    if not names:
        return chosen.attention(call), {}
    out, squares = chosen.attention_and_squares(call, bias, dict.fromkeys(names, 1.0))
    return out, {name: square.sum() if square.dim() else square for name, square in squares.items()}


def choose(call: Call, impl: str) -> ModuleType:
    """The implementation that serves this call, or an error that says which ones would."""
    return IMPLEMENTATIONS[chosen_name(call, impl)]


def chosen_name(call: Call, impl: str) -> str:
    """Its name."""
    if impl == "auto":
        return _picked(call)[0]
    if impl not in IMPLEMENTATIONS:
        known = ["auto", *IMPLEMENTATIONS]
        raise ParameterError(f"impl must be one of {', '.join(known)}; got {impl!r}.{suggestion(impl, known)}")
    reason = _refusal(impl, call)
    if reason is None:
        return impl
    serving = [name for name in IMPLEMENTATIONS if _refusal(name, call) is None]
    raise UnsupportedError(
        f"impl='{impl}' cannot serve this call on {call.q.device}: {reason}. These can: {', '.join(serving)}."
    )


def _refusal(name: str, call: Call) -> str | None:
    """Why an implementation cannot serve a call, or None."""
    module = IMPLEMENTATIONS[name]
    if call.with_lse and not hasattr(module, "attention_and_lse"):
        return "gives no log-sum-exps (return_lse)"
    reason: str | None = module.refuse(call)
    return reason


def _picked(call: Call) -> tuple[str, str]:
    """The name of the implementation that `auto` takes, and why."""
    row = preference(call)
    name = next(name for name in row.order if _refusal(name, call) is None)
    before = row.order[: row.order.index(name)]
    if not before:
        return name, row.because
    return name, f"the fastest that can serve {row.calls}; {' and '.join(before)} cannot serve this call"


def implementations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    methods: Sequence[Perturbation] | Perturbation = (),
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> list[Verdict]:
    """For each implementation, whether it can serve this call of `attention`, if not, why, and which one `auto` takes.

    >>> import torch
    >>> q = k = v = torch.randn(1, 1, 4, 8)
    >>> [(verdict.name, verdict.because) for verdict in implementations(q, k, v) if verdict.chosen]
    [('sdpa', "a call without methods is torch's own, bit for bit")]
    """
    documents = _documents(q, k, cu_seqlens, cu_seqlens_k, NOWHERE)
    call = make_call(
        q, k, v, attn_mask, is_causal, scale, methods, None, None, documents, return_lse  # type: ignore[arg-type]
    )  # fmt: skip
    chosen, because = _picked(call)
    verdicts = []
    for name in IMPLEMENTATIONS:
        reason = _refusal(name, call)
        picked = name == chosen
        verdicts.append(Verdict(name, reason is None, reason or "", picked, because if picked else ""))
    return verdicts
