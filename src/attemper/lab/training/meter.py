"""What a training epoch measures, summed up on the device so that no step waits for it."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a meter says: means over the batches so far."""

    loss: float
    accuracy: float
    penalty: float
    """What the recipe added to the loss: penalties, or the comparison of passes."""
    bad_batch: int | None
    """The first batch, counted from 1, whose loss was no number or above the bound."""
    bad_loss: float | None


class Meter:
    """Sums over the batches of an epoch. `update` waits for nothing and can be captured in a CUDA graph."""

    def __init__(self, bound: float, device: torch.device) -> None:
        self.bound = bound
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Of loss, accuracy and penalty."""
        self.batches = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_batch = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_loss = torch.zeros((), device=device)

    def reset(self) -> None:
        for tensor in self._tensors().values():
            tensor.zero_()

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("sums", "batches", "bad_batch", "bad_loss")}

    def state(self) -> dict[str, Tensor]:
        """What has been counted so far, for a checkpoint inside of an epoch."""
        return {name: tensor.cpu() for name, tensor in self._tensors().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Count on from there. In place: a CUDA graph has the tensors by their addresses."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def update(self, total: Tensor, loss: Tensor, right: Tensor) -> None:
        """Count one batch.

        total: the whole loss, a scalar; loss: the task's own part of it; right: the share that is right.
        """
        self.batches += 1
        self.sums += torch.stack([loss.double(), right.double(), (total - loss).double()])
        first = ~(total <= self.bound) & (self.bad_batch == 0)  # NaN is not ≤ anything
        self.bad_batch.copy_(torch.where(first, self.batches, self.bad_batch))
        self.bad_loss.copy_(torch.where(first, total.float(), self.bad_loss))

    def read(self) -> Reading:
        """The means so far; this one waits for the device."""
        batches = int(self.batches)
        loss, accuracy, penalty = (self.sums / max(batches, 1)).tolist()
        bad = int(self.bad_batch)
        return Reading(loss, accuracy, penalty, bad or None, float(self.bad_loss) if bad else None)
