"""Where seeds come from: one 64-bit draw from torch's generator, on the device where it is used.

The draw is an operator of its own because compilers replace torch's random functions by their own. Its tag,
`nondeterministic_seeded`, keeps a compiler from merging two draws and from drawing again where it recomputes a
checkpointed block: there the state of the generator is saved and put back. Only a draw whose result nobody uses may be
removed, and none of ours is.
"""

from typing import Any

import torch
from torch import Tensor

RANK_STEP = 0x2545F4914F6CDD1D  # odd, so that different ranks never share a seed


def _draw(after: Tensor | None = None, *, device: torch.device) -> Tensor:
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        seed = seed + ((torch.distributed.get_rank() * RANK_STEP + 2**63) % 2**64 - 2**63)
    return seed


def _draw_fake(after: Tensor | None = None, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


torch.library.define(
    "attemper::draw_seed", "(Tensor? after=None, *, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.impl("attemper::draw_seed", "CompositeExplicitAutograd", _draw)
torch.library.register_fake("attemper::draw_seed", _draw_fake)


def _draw_mapped(
    info: Any, in_dims: tuple[int | None], after: Tensor, *, device: torch.device
) -> tuple[Tensor, int | None]:
    """Under `torch.func.vmap`: one seed for all mapped calls, one for each, or an error, by vmap's `randomness`."""
    if info.randomness == "error":
        raise RuntimeError(
            "vmap: methods that draw random numbers need randomness='same' or 'different', or a seed of their own"
        )
    if info.randomness == "same":
        return torch.ops.attemper.draw_seed(after.select(in_dims[0] or 0, 0), device=device), None
    return torch.stack([torch.ops.attemper.draw_seed(device=device) for _ in range(info.batch_size)]), 0


torch.library.register_vmap("attemper::draw_seed", _draw_mapped)


def draw_seed(where: torch.device | Tensor) -> Tensor:
    """A fresh 0-dim int64 seed from the default generator of a device; distributed ranks get different ones.

    where: the device, or a tensor on it. Under a compiler, which may move operators that do not depend on each other,
        a tensor keeps the draws of successive layers in their order: the draw then comes after it.
    """
    seed: Tensor
    if isinstance(where, Tensor):
        seed = torch.ops.attemper.draw_seed(where.detach(), device=where.device)
    else:
        seed = torch.ops.attemper.draw_seed(device=where)
    return seed


def seed_tensor(seed: int | Tensor | None, device: torch.device | str | None = None) -> Tensor:
    """`seed` as the 0-dim int64 tensor that a stream starts from; None draws one."""
    if seed is None:
        return draw_seed(torch.device(device or "cpu"))
    if isinstance(seed, Tensor):
        if seed.dim() != 0 or seed.dtype != torch.int64:
            raise ValueError(
                f"seed must be an int or a 0-dim int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        return seed if device is None else seed.to(device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int or a 0-dim int64 tensor, got {seed!r}")
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return torch.tensor(wrapped, dtype=torch.int64, device=device)
