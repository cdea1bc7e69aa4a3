"""Adversarial images: FGSM (Goodfellow et al., ICLR 2015) and PGD (Madry et al., ICLR 2018), in the maximum norm.

An attack moves pixels in [0, 1]. Whatever the model needs of them, normalisation above all, belongs into the function
that is attacked: an ε is then the same amount of light for every data set.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.call_syntax import check_count

Classifier = Callable[[Tensor], Tensor]
"""Pixels (B, C, H, W) in [0, 1] → logits (B, classes), differentiable."""


def check_epsilon(epsilon: float) -> float:
    """The largest change of a pixel, where pixels are in [0, 1]."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not math.isfinite(epsilon) or epsilon < 0:
        raise ParameterError(
            f"ε is {epsilon!r}; it must be a number of at least 0, in pixel values from 0 to 1 (8/255 is 0.0314)."
        )
    return float(epsilon)


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager: inside it, the model is in eval mode and gradients pass through it without reaching parameters.

    Afterwards every module is in the mode that it was in, and every parameter wants a gradient or not, as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for parameter, _ in wanted:
        parameter.requires_grad_(False)
    try:
        yield model
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, wants in wanted:
            parameter.requires_grad_(wants)


def gradient(classifier: Classifier, pixels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (B, classes) in float64, and the gradient of the loss by the pixels, (B, C, H, W).

    The losses of a batch are added, so that no image's gradient depends on how many others there are. They are computed
    in float64: in float32 the gradient of an image that the model is sure of is exactly zero, and the attack would
    stand still where it is needed most.
    """
    with torch.enable_grad():
        x = pixels.detach().clone().requires_grad_()
        logits = classifier(x).double()
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), x)
    return logits.detach(), slope.nan_to_num(0.0)


def fgsm(classifier: Classifier, pixels: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """One step of ε along the sign of the loss's gradient: clip(x + ε · sign ∇ₓ loss, 0, 1).

    classifier: the model with everything between pixels and logits, in eval mode.
    pixels: (B, C, H, W) in [0, 1]. targets: int64 (B).
    """
    check_epsilon(epsilon)
    _, slope = gradient(classifier, pixels, targets)
    return (pixels + epsilon * slope.sign()).clamp(0, 1)


def pgd(
    classifier: Classifier,
    pixels: Tensor,
    targets: Tensor,
    epsilon: float,
    *,
    steps: int = 10,
    step_size: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Steps along the sign of the gradient, each projected back into the ball of radius ε and into [0, 1].

    Of all images on the way, each sample keeps the one in which a wrong class stands out most against its own: an image
    that was once classified wrongly is not given up for one with a larger loss.

    steps: how many. step_size: how far each goes; none: 2.5 ε / steps, so that every corner of the ball can be reached.
    generator: draws the starting points in the ball, on the CPU; none: start from the images themselves.
    """
    check_epsilon(epsilon)
    check_count("steps", steps)
    size = 2.5 * epsilon / steps if step_size is None else step_size
    low, high = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
    x = pixels
    if generator is not None:
        noise = torch.rand(pixels.shape, generator=generator).to(pixels)
        x = low + (high - low) * noise
    worst, largest = x, torch.full((len(pixels),), -math.inf, dtype=torch.float64, device=pixels.device)
    for _ in range(steps):
        logits, slope = gradient(classifier, x, targets)
        worst, largest = _worse(worst, largest, x, margin(logits, targets))
        x = torch.minimum(torch.maximum(x + size * slope.sign(), low), high)
    with torch.no_grad():
        logits = classifier(x).double()
    return _worse(worst, largest, x, margin(logits, targets))[0]


def margin(logits: Tensor, targets: Tensor) -> Tensor:
    """The largest logit of the other classes less that of the own one, (B): above 0 where the answer is wrong."""
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, targets[:, None], True)
    return logits.masked_fill(own, -math.inf).amax(1) - logits.gather(1, targets[:, None]).squeeze(1)


def _worse(worst: Tensor, largest: Tensor, x: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample, the image with the larger margin."""
    better = here > largest
    return torch.where(better[:, None, None, None], x, worst), torch.where(better, here, largest)
