"""FlashAttention-4's kernels as torch library operators, with shapes for the compiler and gradients for autograd.

Its forward and backward kernels are called by themselves: its own autograd function would hide the call from compilers.

The forward pass drops by a mask_mod, or, as a causal kernel skips tiles only without one, by a score_mod. The backward
pass drops by a score_mod, where keys outside of the sequence are masked without asking twice.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.flops import attention_backward_flops, attention_flops, counted_by, tell_counter
from attemper.kernels.fa4.tables import layout_of

HOPPER = 9  # its compute capability

torch.library.define(
    "attemper::fa4_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? words, float scale, bool causal) -> (Tensor, Tensor)",
)
torch.library.define(
    "attemper::fa4_attention_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor? words, float scale, bool causal, "
    "bool deterministic, str fill='none') -> (Tensor, Tensor, Tensor)",
)


def fa4_attention(q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, scale: float, causal: bool) -> Tensor:
    """(B, H, Nq, e_v), laid out in memory as (B, Nq, H, e_v). words: from `call_words`, None drops nothing."""
    out: Tensor = torch.ops.attemper.fa4_attention(q, k, v, words, scale, causal)[0]
    return out


def _token_major(like: Tensor, width: int) -> Tensor:
    """An empty (B, N, H, width) tensor, contiguous: FlashAttention-4's order of axes."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width)


def _stats(q: Tensor) -> Tensor:
    """An empty (B, H, Nq) int32 tensor for the bits of the log-sum-exp: no gradient is ever asked of integers."""
    return torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper run on this GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def _dropping(words: Tensor | None, q: Tensor, k: Tensor, causal: bool, by_mask: bool) -> dict[str, Any]:
    """What FlashAttention-4 is told about dropping keys, by a mask_mod or by a score_mod, and about being causal."""
    if words is None:
        return {"causal": causal}
    from cutlass import Int32, Int64

    from attemper.kernels.fa4.cute import mods

    if is_hopper(q.device):
        from attemper.kernels.fa4.cute import hopper

        hopper.install()
    batch, heads, queries, _ = q.shape
    at, rows_at = words.data_ptr(), layout_of(batch, heads, queries, k.shape[2]).rows
    told: dict[str, Any] = {"aux_scalars": (Int64(at), Int64(at + 4 * rows_at), Int32(heads), Int32(queries))}
    return told | {"causal": causal, **({"mask_mod": mods.mask_mod} if by_mask else {"score_mod": mods.score_mod})}


def _hitting(
    words: Tensor, q: Tensor, k: Tensor, fill: str
) -> tuple[dict[str, Any], contextlib.AbstractContextManager[None]]:
    """What FlashAttention-4 is told about hard masking, and in which context."""
    from cutlass import Int32, Int64

    from attemper.kernels.fa4.cute import hopper, mods

    hopper.install()
    batch, heads, queries, _ = q.shape
    layout = layout_of(batch, heads, queries, k.shape[2], hard=True)
    places = (Int64(words.data_ptr() + 4 * first) for first in (0, layout.rows, layout.lows))
    told = {"aux_scalars": (*places, Int32(heads), Int32(queries)), "score_mod": mods.HitMod(fill)}
    return told, hopper.small_tiles()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    tell_counter()
    out, stats = _token_major(q, v.shape[3]), _stats(q)
    with torch.cuda.device(q.device):
        _flash_attn_fwd(
            *(t.detach().transpose(1, 2) for t in (q, k, v)),
            softmax_scale=scale,
            pack_gqa=False,
            out=out,
            lse=stats.view(torch.float32),
            **_dropping(words, q, k, causal, by_mask=not causal),
        )
    return out.transpose(1, 2), stats


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, words: Tensor | None, scale: float,
    causal: bool, deterministic: bool, fill: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    from attemper.kernels.fa4.cute import mods

    dq, dk, dv = (_token_major(t, t.shape[3]) for t in (q, k, v))
    tiles: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if fill == "none" or words is None:
        told = _dropping(words, q, k, causal, by_mask=False)
    else:
        told, tiles = _hitting(words, q, k, fill)
    if "score_mod" in told:
        told["score_mod_bwd"] = mods.pass_gradient
    with torch.cuda.device(q.device), tiles:
        _flash_attn_bwd(
            *(t.detach().transpose(1, 2) for t in (q, k, v, out, dout)),
            stats.view(torch.float32),
            softmax_scale=scale,
            deterministic=deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
            **told,
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _token_major(q, v.shape[3]).transpose(1, 2), _stats(q)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_token_major(t, t.shape[3]).transpose(1, 2) for t in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # zeros for what is not differentiable would cost a launch
    q, k, v, words, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, words)


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, stats, words = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = torch.ops.attemper.fa4_attention_backward(
        dout, q, k, v, out, stats, words, ctx.scale, ctx.causal, deterministic
    )
    return (*grads, None, None, None)


def _no_second_gradients(ctx: Any, *_: object) -> None:
    raise NotImplementedError("impl='fa4' has no second derivatives; impl='reference' has")


torch.library.impl("attemper::fa4_attention", "CUDA", _forward)
torch.library.impl("attemper::fa4_attention_backward", "CUDA", _backward)
torch.library.register_fake("attemper::fa4_attention", _forward_fake)
torch.library.register_fake("attemper::fa4_attention_backward", _backward_fake)
torch.library.register_autograd("attemper::fa4_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::fa4_attention_backward", _no_second_gradients)
counted_by(torch.ops.attemper.fa4_attention, attention_flops)
counted_by(torch.ops.attemper.fa4_attention_backward, attention_backward_flops)
