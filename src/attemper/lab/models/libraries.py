"""Models of timm and Transformers, built for a task's inputs: untrained and without any download, unless asked for."""

import inspect
from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from attemper.errors import ParameterError, first_line, suggestion
from attemper.lab.tasks.base import InputShape


class Images(Protocol):
    """The part of a shape that a model for images is built for."""

    @property
    def channels(self) -> int: ...

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def classes(self) -> int: ...


def from_timm(name: str, shape: InputShape, options: dict[str, Any], *, pretrained: bool = False) -> nn.Module:
    """`timm.create_model` with the task's channels and classes, and with its image size where the model wants one.

    pretrained: with timm's weights, which must have been trained for as many classes as the task has.
    """
    import timm

    if not timm.is_model(name):
        raise ParameterError(f"timm has no model '{name}'.{suggestion(name, timm.list_models())}")
    given: dict[str, Any] = {"in_chans": shape.channels, "num_classes": shape.classes, **options}
    if pretrained:
        _check_trained(name, shape)
        given["pretrained"] = True
    try:
        try:
            return _timm(name, img_size=(shape.height, shape.width), **given)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return _timm(name, **given)  # a network for images of any size
    except ParameterError:
        raise
    except TypeError as error:
        word = str(error).rpartition(" ")[2].strip("'")
        if word not in options:
            raise _not_built(name, shape, options, error) from error
        known = inspect.signature(type(timm.create_model(name)).__init__).parameters
        raise ParameterError(f"timm's {name} has no option '{word}'.{suggestion(word, known)}") from None
    except Exception as error:  # what a model makes of options that it does not check
        raise _not_built(name, shape, options, error) from error


def _not_built(name: str, shape: InputShape, options: dict[str, Any], error: Exception) -> ParameterError:
    return ParameterError(
        f"timm could not build {name} for images of {shape.height} × {shape.width} with {options}: "
        f"{type(error).__name__}: {first_line(error)}"
    )


def _timm(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    except TypeError:
        raise  # an option that there is not
    except Exception as error:  # without a network, the hub's client fails in many ways
        if not pretrained:
            raise
        why = str(error).rstrip(".")
        raise ParameterError(
            f"The trained weights of timm's {name} could not be had: {why}. They are downloaded when they are first "
            "asked for. Do that on a machine with a network and bring its cache along (the variable HF_HOME), or give "
            "the weights as a safetensors file."
        ) from error
    return model


def _check_trained(name: str, shape: InputShape) -> None:
    """Raise unless timm has weights for as many classes; for another number it would draw the last layer at random."""
    import timm

    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a tag that there is not
        config = None
    if config is None or not config.has_weights:
        known = timm.list_pretrained(f"{name.partition('.')[0]}*")
        raise ParameterError(
            f"timm has no trained weights of {name}. It has: {', '.join(known) or 'none of its kind'}."
        )
    if config.num_classes != shape.classes:
        raise ParameterError(
            f"The trained weights of timm's {name} are for {config.num_classes} classes, and the task has "
            f"{shape.classes}."
        )


def from_transformers(kind: str, shape: InputShape, options: dict[str, Any]) -> nn.Module:
    """Transformers' image classifier, untrained: the default configuration of a model type such as 'vit', or that of a
    model 'OWNER/NAME' of the hub or in a folder, changed by options.
    """
    from transformers import AutoModelForImageClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    return built_from_config(kind, shape, options, AutoModelForImageClassification, KNOWN, "image classifier")


def built_from_config(
    kind: str, shape: Images, options: dict[str, Any], auto: Any, known: Collection[str], what: str
) -> nn.Module:
    """What one of Transformers' Auto classes makes of a configuration, untrained.

    known: the model types that it has. what: it makes, for messages.
    """
    from transformers import AutoConfig

    from attemper.lab.models.trained import transformers_config

    named = "/" in kind
    if not named and kind not in known:
        raise ParameterError(
            f"Transformers has no {what} of the model type '{kind}'.{suggestion(kind, known)} "
            f"There are: {', '.join(sorted(known))}. A model of the hub is named as OWNER/NAME."
        )
    attributes = (transformers_config(kind) if named else AutoConfig.for_model(kind)).to_dict()
    for option in options:
        if option not in attributes:
            raise ParameterError(f"The configuration of '{kind}' has no '{option}'.{suggestion(option, attributes)}")
    side: Any = shape.height if shape.height == shape.width else (shape.height, shape.width)
    ours = {"image_size": side, "num_channels": shape.channels}
    given = {**{key: value for key, value in ours.items() if key in attributes}, **options}
    try:
        given = {**given, "num_labels": shape.classes}
        config = transformers_config(kind, **given) if named else AutoConfig.for_model(kind, **given)
        model: nn.Module = auto.from_config(config)
    except ParameterError:
        raise
    except Exception as error:  # configurations check themselves, each in its own way
        raise ParameterError(f"Transformers could not build '{kind}' with {given}: {error}") from error
    return model
