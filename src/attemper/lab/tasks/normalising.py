"""What is taken out of the colours of an image before a model sees it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attemper.errors import ParameterError, shown, suggestion


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """Mean and deviation of every channel, of pixels from 0 to 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, stored: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → float32."""
        mean, deviation = (
            255 * torch.tensor(each, device=stored.device)[:, None, None] for each in (self.mean, self.deviation)
        )
        return (stored.float() - mean) / deviation


NORMALISATIONS = {
    "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""As trained models want them; half: to between −1 and 1."""


def read_normalisation(given: Any, channels: int) -> Normalisation | None:
    """What `normalise=` of a task says: a name, 'data' for the training set's own, or ((means), (deviations)).

    channels: of the images. For gray ones, numbers of three colours are averaged.
    """
    if given == "data":
        return None
    if isinstance(given, str):
        if given not in NORMALISATIONS:
            known = ["data", *NORMALISATIONS]
            raise ParameterError(f"normalise is '{given}'.{suggestion(given, known)} It can be: {', '.join(known)}.")
        found = NORMALISATIONS[given]
    else:
        found = _of_numbers(given)
    if channels == 1 and len(found.mean) == 3:
        return Normalisation((sum(found.mean) / 3,), (sum(found.deviation) / 3,))
    if len(found.mean) != channels:
        raise ParameterError(f"normalise has numbers for {len(found.mean)} channels, and the images have {channels}.")
    return found


def _of_numbers(given: Any) -> Normalisation:
    try:
        mean, deviation = (tuple(float(each) for each in part) for part in given)
    except (TypeError, ValueError):
        raise ParameterError(
            f"normalise is {shown(given)}; it must be a name such as imagenet, or means and deviations such as "
            "((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))."
        ) from None
    if len(mean) != len(deviation) or not mean or min(deviation) <= 0:
        raise ParameterError(f"normalise is {shown(given)}; it needs as many deviations above 0 as means.")
    return Normalisation(mean, deviation)


def name_of(mean: tuple[float, ...], deviation: tuple[float, ...]) -> Any:
    """How `normalise=` is written for these numbers: by a name where there is one."""
    known = {(each.mean, each.deviation): name for name, each in NORMALISATIONS.items()}
    return known.get((tuple(mean), tuple(deviation)), (tuple(mean), tuple(deviation)))
