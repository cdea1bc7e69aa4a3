"""Trained weights of libraries and hubs, as plain tensors."""

import contextlib
import logging
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from attemper.errors import ParameterError, first_line, suggestion
from attemper.lab.call_syntax import parse_call


def library_weights(text: str) -> dict[str, Tensor]:
    """The weights that a library has for a model such as 'timm:NAME(pretrained=true)' or 'hf:OWNER/NAME'.

    What is not on this machine yet is downloaded by the library. Without a network that is one line of an error.
    """
    name, _ = parse_call(text)
    library, _, rest = name.partition(":")
    model = _timm(rest) if library == "timm" else _transformers(rest)
    return model.state_dict()


def _timm(name: str) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise ParameterError(f"timm has no model '{name}'.{suggestion(name, timm.list_models())}")
    if not timm.is_model_pretrained(name):
        known = timm.list_pretrained(f"{name.partition('.')[0]}*")
        raise ParameterError(
            f"timm has no trained weights of {name}. It has: {', '.join(known) or 'none of its kind'}."
        )
    model: nn.Module = _fetched(lambda: timm.create_model(name, pretrained=True), f"timm's {name}")
    return model


def _transformers(name: str) -> nn.Module:
    from transformers import AutoModelForImageClassification

    model: nn.Module = _fetched(lambda: AutoModelForImageClassification.from_pretrained(name), f"'{name}'")
    return model


def transformers_config(name: str, **changes: Any) -> Any:
    """The configuration of a model on the hub or in a folder."""
    from transformers import AutoConfig

    return _fetched(lambda: AutoConfig.from_pretrained(name, **changes), f"'{name}'", "configuration")


def _fetched(fetch: Callable[[], Any], what: str, kind: str = "trained weights") -> Any:
    quiet = [logging.getLogger(name) for name in ("huggingface_hub", "timm", "transformers")]
    levels = [logger.level for logger in quiet]
    for logger in quiet:  # each failed attempt is a warning of its own, and all are one error
        logger.setLevel(logging.ERROR)
    try:
        with _offline_where_nothing_answers():
            return fetch()
    except Exception as error:  # without a network, the hub's client fails in many ways
        raise ParameterError(
            f"The {kind} of {what} could not be had ({type(error).__name__}: {first_line(error)}). They are "
            "downloaded when they are first asked for. Do that on a machine with a network and bring its cache along "
            "(the variable HF_HOME), or give a file of weights with --init."
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _offline_where_nothing_answers() -> Iterator[None]:
    """Context manager: inside it, the hub's client looks into its cache alone if the hub's name cannot be resolved.

    It would try again and again, for most of a minute. Behind a proxy, names may be resolved elsewhere.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    host = urllib.parse.urlparse(constants.ENDPOINT).hostname
    if not before and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
