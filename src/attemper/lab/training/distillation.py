"""Learning from a teacher beside the labels, as in "Training data-efficient image transformers & distillation through
attention" (Touvron et al., ICML 2021), https://arxiv.org/abs/2012.12877.
"""

from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from attemper.tempering.outputs import logits_of


def distillation_loss(
    student: Tensor, teacher: Tensor, kind: Literal["hard", "soft"], temperature: float = 1.0
) -> Tensor:
    """How far a student is from its teacher: a scalar, the mean over the samples.

    student, teacher: logits (B, classes).
    kind: "hard", the cross-entropy with the class that the teacher finds likeliest; "soft", τ² KL(teacher ‖ student) of
        the probabilities at temperature τ. (The authors' code also divides the latter by the number of classes.)

    >>> import torch
    >>> far = distillation_loss(torch.zeros(1, 2), torch.tensor([[0.0, 3.0]]), "hard")
    >>> round(float(far), 4)  # log 2
    0.6931
    """
    if kind == "hard":
        return F.cross_entropy(student, teacher.argmax(-1))
    ours, theirs = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def prepare_student(model: nn.Module) -> None:
    """Make a model with a distillation token, such as timm's, give the predictions of both heads in training."""
    if hasattr(model, "set_distilled_training"):
        cast(Any, model).set_distilled_training(True)


def answer(out: Any) -> Tensor:
    """What a student says to its teacher: the head of its distillation token where it has one, else its predictions."""
    logits = logits_of(out)
    heads = [part for part in out if isinstance(part, Tensor)] if isinstance(out, tuple) else []
    return heads[1] if len(heads) == 2 and heads[1].shape == logits.shape else logits
