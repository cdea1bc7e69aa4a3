"""Where seeds come from: one 64-bit draw from torch's generator, on the device where it is used.

The draw is an operator of its own because compilers replace torch's random functions by their own. Its tag,
`nondeterministic_seeded`, keeps a compiler from merging two draws, and from drawing again where it recomputes. Only a
draw whose result nobody uses may be removed, and none of ours is.

A draw inside of an activation checkpoint is noted, and found again when the checkpoint is computed again: the state of
the generator need not be saved for it.
"""

import functools
from typing import Any, cast

import torch
from torch import Tensor

from attemper.ops.regions import Drawn, may_repeat, note_of, noted, regions


def _draw(after: Tensor | None = None, *, device: torch.device) -> Tensor:
    if device.type == "meta" or not may_repeat():
        return _fresh(device)
    enclosing = regions()
    drawn = _drawn_before(enclosing.pop().holder, device) if enclosing and enclosing[-1].again else None
    if drawn is None:
        if not enclosing:
            return _fresh(device)
        drawn = Drawn(state=_generator_state(device), seed=_fresh(device))
    for region in enclosing:
        noted(region.holder).seeds.append(drawn)
    return drawn.seed.clone()  # compiled code may write over its own


def _fresh(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def _drawn_before(holder: Any, device: torch.device) -> Drawn | None:
    """What a region that is computed again drew at this point; None: it drew nothing then."""
    note = note_of(holder)
    if note is None:
        return None
    note.begin()
    if note.taken == len(note.seeds):
        return None
    drawn = note.seeds[note.taken]
    note.taken += 1
    if drawn.state is not None and drawn.state == _generator_state(device):
        _fresh(device)  # somebody put the generator back: whatever else draws from it must find it as it was
    return drawn


def _generator_state(device: torch.device) -> Any:
    """Something that is equal only where the generator of a device is in the same state; None: not known."""
    if device.type == "cpu":
        return torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        return generator.initial_seed(), generator.get_offset()
    return None


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


@functools.cache
def _know_sharding() -> None:
    """Let DTensors know that a draw comes to a whole seed, however what it comes after is placed."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.attemper.draw_seed.default)  # type: ignore[untyped-decorator]
    def placements(after: Any, *, device: torch.device) -> list[tuple[list[Any], list[Any]]]:
        shards: list[Any] = [Shard(axis) for axis in range(after.ndim)]
        return [([Replicate()], [each, None]) for each in (Replicate(), Partial(), *shards)]


def draw_seed(where: torch.device | Tensor) -> Tensor:
    """A fresh 0-dim int64 seed from the default generator of a device.

    where: the device, or a tensor on it. Under a compiler, which may move operators that do not depend on each other,
        a tensor keeps the draws of successive layers in their order: the draw then comes after it.
    """
    seed: Tensor
    if type(where).__name__ == "DTensor":  # the class is expensive to import, and then nobody has one
        _know_sharding()
        placed: Any = torch.ops.attemper.draw_seed(cast(Tensor, where).detach(), device=cast(Tensor, where).device)
        seed = placed.to_local()
        return seed
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
