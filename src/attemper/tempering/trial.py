"""A trial run at `apply`: one training pass of a copy without weights, on the meta device, on an input that is made up.

What the first training pass would refuse is refused before any training. A trial that fails in any other way says
nothing: the input was not what the model wants, or the model cannot run without values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import ConflictError, HiddenTokensError, UnmetError, UnsupportedError
from attemper.sites.base import original_class
from attemper.tempering.attention import AttentionAction
from attemper.tempering.penalties import Control
from attemper.tempering.readings import Facts
from attemper.tempering.subclassing import is_tempered, state_of

SAMPLES, TOKENS = 2, 8
SIZES = (224, 32, 64, 128, 256)
"""Image sizes to try where the model does not tell."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def try_out(model: nn.Module, impl: str) -> None:
    """Raise what a training pass of the tempered model would raise of Attemper's own errors.

    Not those that may come from an input of the wrong kind: parameters that do not fit its size, modules that only
    another input would run, and implementations that want a GPU.
    """
    key = signature(model)
    if key in passed:
        hand_over(model, passed[key])
        return
    twin = without_weights(model)
    if twin is None:
        return
    control = control_of(twin)
    control.trial, control.loss_scale = True, 1.0
    conclusive = (UnmetError, ConflictError, UnsupportedError) if impl == "auto" else (UnmetError, ConflictError)
    found: dict[str, Facts] = {}
    for guess, args, kwargs in tries(twin):
        try:
            with quietly(), guess:
                twin(*args, **kwargs)
        except conclusive as error:
            if isinstance(guess, Guess):  # another value might have led elsewhere
                continue
            error.add_note("(Found by a trial run of the model on the meta device, before any training.)")
            raise
        except Exception:  # not what the model wants
            continue
        found = {name: action.facts for name, action in attentions(twin)}
        break
    passed[key] = found
    if len(passed) > REMEMBERED:
        del passed[next(iter(passed))]
    hand_over(model, found)


def read_masks(model: nn.Module) -> None:
    """Raise where a recipe mixes tokens that the model hides from each other, in a pass of a copy in eval mode.

    Masks have to be read for that, so the copy has its weights. A larger model is looked at in its first pass only.
    """
    mixing = {name: action for name, action in attentions(model) if action.mixers}
    weights = list(model.parameters())
    if not mixing or sum(weight.numel() for weight in weights) > MOST_WEIGHTS or any(w.is_meta for w in weights):
        return
    key = signature(model)
    if key not in read:
        read[key] = _hiding_nothing(model, weights[0].device if weights else torch.device("cpu"))
        if len(read) > REMEMBERED:
            del read[next(iter(read))]
    for name in read[key] & mixing.keys():
        mixing[name].read = True


def _hiding_nothing(model: nn.Module, device: torch.device) -> frozenset[str]:
    """The attentions of which it is known that they hide nothing, whatever they are called with."""
    try:
        twin = copy.deepcopy(model).eval()
    except Exception:  # whatever a model holds that cannot be copied
        return frozenset()
    _forget_hooks(twin)
    for args, kwargs in made_up_inputs(twin):
        given = [_real("", x, device) for x in args], {name: _real(name, x, device) for name, x in kwargs.items()}
        try:
            with quietly(), torch.no_grad():
                twin(*given[0], **given[1])
        except HiddenTokensError as error:
            error.add_note("(Found by a pass of a copy of the model, on an input that was made up.)")
            raise
        except Exception:  # not what the model wants
            continue
        seen = () if _may_get_masks(twin) else attentions(twin)
        return frozenset(name for name, action in seen if action.looked)
    return frozenset()


def _may_get_masks(model: nn.Module) -> bool:
    """Whether other calls of a model may come with masks that hide tokens; those of Transformers tell of padding."""
    names = inspect.signature(model.forward).parameters
    told = any(word in name for name in names for word in ("mask", "bias", "causal"))
    return told and not hasattr(model, "main_input_name")


MOST_WEIGHTS = 10**8
read: dict[int, frozenset[str]] = {}
"""Of models and recipes whose masks were read: what `_hiding_nothing` says."""


def _real(name: str, x: Tensor, device: torch.device) -> Tensor:
    """A made-up input with values: some numbers, or words that are no padding as far as one can guess."""
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=torch.float32, device="cpu").to(device, x.dtype)
    return torch.full(x.shape, 1 if "mask" in name else WORD, dtype=x.dtype, device=device)


WORD = 5

passed: dict[int, dict[str, Facts]] = {}
"""Models and recipes that were tried out, since a study applies the same recipe to the same model many times."""
REMEMBERED = 256


def attentions(model: nn.Module) -> Iterator[tuple[str, AttentionAction]]:
    """What acts on the attention modules of a model, with their names."""
    for name, module in model.named_modules():
        for action in state_of(module).actions if is_tempered(module) else ():
            if isinstance(action, AttentionAction):
                yield name, action


def hand_over(model: nn.Module, found: dict[str, Facts]) -> None:
    """Tell the attentions of a model what a trial run found out about them."""
    for name, action in attentions(model):
        if name in found:
            action.facts = replace(copy.deepcopy(found[name]), settled=True)


def control_of(model: nn.Module) -> Control:
    """What the tempered modules of a model share."""
    return next(state_of(module).actions[0].control for module in model.modules() if is_tempered(module))


def signature(model: nn.Module) -> int:
    """What tells one model from another, and if it is tempered, how, as far as a trial is concerned."""
    tempered = any(is_tempered(module) for module in model.modules())
    parts: list[Any] = [(str(control_of(model).methods), str(control_of(model).options)) if tempered else ()]
    for name, module in model.named_modules():
        sizes = tuple(tuple(weight.shape) for weight in module._parameters.values() if weight is not None)
        parts.append((name, id(original_class(module)), sizes, module.extra_repr(), _settings(module)))
    return hash(tuple(parts))


PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _settings(holder: Any, deep: bool = True) -> str:
    """The plain values that a module or its configuration holds, by which it may compute in one way or another."""
    found = {}
    for name, value in vars(holder).items():
        if isinstance(value, PLAIN) or (isinstance(value, list | tuple) and all(isinstance(x, PLAIN) for x in value)):
            found[name] = value
        elif deep and (is_dataclass(value) or name == "config") and hasattr(value, "__dict__"):
            found[name] = _settings(value, deep=False)
    return str(found)


class Guess(TorchFunctionMode):
    """Answers for tensors without values, where a model asks for one: False, or 1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and args[0].is_meta:
            return False if args[0].dtype == torch.bool or func is Tensor.__bool__ else 1
        return func(*args, **(kwargs or {}))


class OnMeta(contextlib.ExitStack):
    """Context manager: inside it new tensors are on the meta device unless it is said where."""

    def __enter__(self) -> Self:
        self.enter_context(torch.device("meta"))
        return super().__enter__()


class GuessOnMeta(Guess):
    """Both."""

    def __enter__(self) -> Self:
        self.device = torch.device("meta")
        self.device.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.device.__exit__(*error)


ASKED = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__)


def tries(model: nn.Module) -> Iterator[tuple[contextlib.AbstractContextManager[Any], tuple[Any, ...], dict[str, Any]]]:
    """The inputs that a model may want; then once more with guesses for the values that it asks for.

    Each twice: what a model makes itself, such as a mask, may have to be on the meta device, or to have values.
    """
    for contexts in ((contextlib.nullcontext, OnMeta), (Guess, GuessOnMeta)):
        for args, kwargs in made_up_inputs(model):
            for context in contexts:
                yield context(), args, kwargs


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context manager: inside it nothing is printed or warned of, and random numbers are as they were afterwards."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)


# --------------------------------------------------------------------------------------------------- without weights
def without_weights(model: nn.Module) -> nn.Module | None:
    """A copy of a model in training mode whose tensors are on the meta device; None where it cannot be copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for value in holder.values():
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor) and id(tensor) not in memo:
                        if type(tensor) not in (Tensor, nn.Parameter):
                            return None  # a weight that is quantised or sharded
                        memo[id(tensor)] = _meta(tensor)
    kept = list(memo.values())  # ids stay taken as long as the tensors live
    try:
        twin = copy.deepcopy(model, memo)
    except Exception:  # whatever a model holds that cannot be copied
        return None
    del kept
    _forget_hooks(twin)
    return twin.train()


def _forget_hooks(twin: nn.Module) -> None:
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()  # they may note what they see


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


# --------------------------------------------------------------------------------------------------- made-up inputs
def made_up_inputs(model: nn.Module) -> Iterator[Call]:
    """Inputs that a model may want, the likeliest first."""
    with contextlib.suppress(Exception):
        yield from _of_transformers(model)
    first = next((module for module in model.modules() if isinstance(module, FIRST)), None)
    arguments = _required(model)
    for tensor in _tensors_for(model, first):
        yield (tensor,) * max(arguments, 1), {}


FIRST = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.MultiheadAttention)


def _required(model: nn.Module) -> int:
    """How many arguments a model's forward must have: an nn.Transformer has two."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _tensors_for(model: nn.Module, first: nn.Module | None) -> Iterator[Tensor]:
    if isinstance(first, nn.Embedding):
        yield torch.zeros(SAMPLES, TOKENS, dtype=torch.long, device="meta")
    elif isinstance(first, nn.Conv2d):
        for height, width in _image_sizes(model, (first.stride[0], first.stride[1])):
            yield torch.empty(SAMPLES, first.in_channels, height, width, device="meta", dtype=first.weight.dtype)
    elif isinstance(first, nn.Conv1d | nn.Conv3d):
        sizes = (64,) if isinstance(first, nn.Conv1d) else (16, 64, 64)
        yield torch.empty(SAMPLES, first.in_channels, *sizes, device="meta", dtype=first.weight.dtype)
    if isinstance(first, nn.Linear | nn.MultiheadAttention):
        width = first.in_features if isinstance(first, nn.Linear) else first.embed_dim
        dtype = next(first.parameters()).dtype
        yield torch.empty(SAMPLES, TOKENS, width, device="meta", dtype=dtype)
        for channels, patch in _patches(model, width):
            for height, across in _image_sizes(model, patch):
                yield torch.empty(SAMPLES, channels, height, across, device="meta", dtype=dtype)


def _patches(model: nn.Module, width: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Channels and size of the patches that a linear layer of this width may get, which are cut out before it."""
    for module in model.modules():  # layers of einops say p1 and p2
        lengths = getattr(module, "axes_lengths", None)
        sizes = dict(lengths) if isinstance(lengths, dict | tuple) else {}
        if isinstance(sizes.get("p1"), int) and isinstance(sizes.get("p2"), int):
            yield 3, (sizes["p1"], sizes["p2"])
            break
    for channels in (3, 1):
        side = math.isqrt(width // channels)
        if side > 1 and side * side * channels == width:
            yield channels, (side, side)


def _image_sizes(model: nn.Module, patch: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Sizes that a model tells by an attribute or by its positions, then the usual ones."""
    configuration = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(configuration, dict) and len(configuration.get("input_size") or ()) == 3:
        told: Any = configuration["input_size"][1:]
        own = getattr(getattr(model, "patch_embed", None), "img_size", None)
        yield _pair(own) or (told[0], told[1])
    for name in ("image_size", "img_size"):
        if size := _pair(getattr(model, name, None)):
            yield size
    for name, parameter in model.named_parameters():
        if "pos" in name.lower() and parameter.dim() == 3:
            for extra in (0, 1, 2):
                side = math.isqrt(max(parameter.shape[1] - extra, 0))
                if side > 1 and side * side == parameter.shape[1] - extra:
                    yield side * patch[0], side * patch[1]
    yield from ((size, size) for size in SIZES)


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[1])) if isinstance(value, list | tuple) and len(value) == 2 else None


def _of_transformers(model: nn.Module) -> Iterator[Call]:
    """By the name that a Transformers model gives its main input, and its configuration."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if not isinstance(name, str) or config is None:
        return
    dtype = next(model.parameters()).dtype
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long, device="meta")
    vision = getattr(config, "vision_config", config)
    size, channels = _pair(getattr(vision, "image_size", None)), getattr(vision, "num_channels", 3)
    bins, length = getattr(config, "num_mel_bins", 80), getattr(config, "max_length", 16)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.empty(SAMPLES, channels, *(size or (64, 64)), device="meta", dtype=dtype),
        "input_features": torch.empty(
            SAMPLES, bins, 2 * getattr(config, "max_source_positions", 8), device="meta", dtype=dtype
        ),
        "input_values": torch.empty(
            SAMPLES, *((length, bins) if hasattr(config, "frequency_stride") else (4000,)), device="meta", dtype=dtype
        ),
    }
    if name not in inputs:
        return
    chosen = {name: inputs[name]}
    if getattr(config, "is_encoder_decoder", False):
        chosen["decoder_input_ids"] = ids
    yield (), chosen
    if name == "input_ids":  # some ask for the padding among the ids unless there is a mask
        yield (), {**chosen, "attention_mask": torch.ones_like(ids)}
    yield (), {**chosen, "input_ids": ids, "pixel_values": inputs["pixel_values"]}
