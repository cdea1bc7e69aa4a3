"""Weights from a file into a model; those of another model are refused."""

from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.files import Weights

HEADS = ("head.weight", "head.fc.weight", "classifier.weight", "heads.head.weight", "fc.weight")


def classes_in(tensors: dict[str, Tensor]) -> int | None:
    """How many classes the head has, if it has a usual name."""
    return next((int(tensors[name].shape[0]) for name in HEADS if name in tensors), None)


def load_weights(model: nn.Module, weights: Weights, of: str, *, optional: str | None = None) -> None:
    """Put weights into a model, all or none.

    of: what the model is called in messages. optional: a prefix of names that may be missing.
    """
    own, given = model.state_dict(), weights.tensors
    wrong = [
        f"'{name}' is missing" for name in own if name not in given and not (optional and name.startswith(optional))
    ]
    wrong += [f"'{name}' is not in the model" for name in given if name not in own]
    wrong += [
        f"'{name}' is {tuple(given[name].shape)} and must be {tuple(value.shape)}"
        for name, value in own.items()
        if name in given and given[name].shape != value.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ParameterError(f"The weights '{weights.path}' are not those of {of}: {wrong[0]}{more}.")
    model.load_state_dict(given)
