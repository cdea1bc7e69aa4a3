"""One seed, many independent streams: each random thing in a run has its own, so that no other thing can shift it."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive(seed: int, *path: str | int) -> int:
    """A seed of 63 bits for one stream of a run, named by words and numbers.

    >>> derive(0, "order", 1) == derive(0, "order", 1)
    True
    >>> derive(0, "order", 1) == derive(0, "order", 2)
    False
    """
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """A generator on the CPU for one stream, so that every device sees the same draws."""
    return torch.Generator().manual_seed(derive(seed, *path))


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Context manager: inside it, torch's CPU generator is another stream.

    `torch.manual_seed` would do the same to every GPU's generator, which belongs to the stochastic methods.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
