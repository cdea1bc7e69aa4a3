"""Masks of passes that are long over: every one of them is a function of the seed of its pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import Source
from attemper.tempering.rates import Rates


class MaskKey(NamedTuple):
    """Where in a pass something was drawn.

    site: the module's name; behind a colon, which part of it: "input" or "output" of a layer, "weights".
    method: its name in recipes; "dropout" is the model's own attention dropout, where it takes part.
    call: how often the site drew before in the pass.
    """

    site: str
    method: str
    call: int


class Masks(Mapping[MaskKey, Tensor]):
    """What the sites of one pass drew; each tensor is made when it is asked for."""

    def __init__(self, drawn: Mapping[MaskKey, Callable[[], Tensor]]) -> None:
        self._drawn = drawn

    def __getitem__(self, key: tuple[str, str, int]) -> Tensor:
        with torch.no_grad():
            return self._drawn[MaskKey(*key)]()

    def __iter__(self) -> Iterator[MaskKey]:
        return iter(self._drawn)

    def __len__(self) -> int:
        return len(self._drawn)

    def __repr__(self) -> str:
        return f"<Masks of {len(self)} draws at {len({key.site for key in self})} sites>"


class Replay(Rates):
    """What the handle knows of passes that were."""

    @property
    def pass_seed(self) -> int | None:
        """The seed of this thread's last training pass, for a log; None: none has drawn one.

        Reading it waits for the device.
        """
        seed = self.control.ledger.last_seed
        return None if seed is None else int(seed)

    def masks(self, pass_seed: int | Tensor) -> Masks:
        """Everything that the pass of this seed drew, by (site, method, call).

        Shapes are those of this thread's last training pass, and rates are those of now: for a pass of another batch
        size run one of that size first, and where rates follow the course of training, say when (`progress`). Where
        processes share a batch, the masks are those of this process.

        Each is a boolean tensor on the device of the model, True = kept, as it was drawn and broadcastable to what it
        acted on: (B, H, Nq, Nk) in attention, tokens (B, N, C), a weight, a block. A row of attention that would lose
        every key it may see keeps all of them. Learnt rates give the share that is kept, and blur its width.

        >>> import attemper
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> tempered = attemper.apply(layer, "dropkey(0.5)")
        >>> out = layer(torch.randn(3, 5, 16))
        >>> masks = tempered.masks(tempered.pass_seed)
        >>> masks["self_attn", "dropkey", 0].shape
        torch.Size([3, 2, 5, 5])
        """
        weight = next(self.model.parameters(), None)
        seed = seed_tensor(pass_seed, torch.device("cpu") if weight is None else weight.device)
        notes = self.control.ledger.last_notes
        drawn: dict[MaskKey, Callable[[], Tensor]] = {}
        missing = []
        for _, _, action in self._actions():
            for site, name in action.sites().items():
                calls = sorted(call for noted, call in notes if noted == site)
                if not calls and site in self.control.traced:
                    missing.append(name)
                for call in calls:
                    note = notes[site, call]
                    source = Source(seed, site, call, note.at)
                    for lane, method in enumerate(action.drawing(note)):
                        key = MaskKey(name, method.name, call)
                        drawn[key] = partial(method.drawn, note.shape, source.stream(lane))
        if missing or not drawn:
            raise UnsupportedError(_unknown(missing))
        return Masks(drawn)


def _unknown(compiled: list[str]) -> str:
    why = f"{', '.join(compiled)} ran in compiled code, which notes none" if compiled else "no pass drew anything yet"
    return (
        f"masks needs to know for which shapes the sites draw, and {why}. Run one training pass without a compiler "
        'before (`with torch.compiler.set_stance("force_eager"): model(x)`), or make a single mask by '
        "attemper.keep_mask(seed, shape, p, site=…, call=…, lane=…)."
    )
