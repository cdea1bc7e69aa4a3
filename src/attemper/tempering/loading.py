"""`attemper.load`: a model as its files say that it was tempered, with its weights."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attemper.errors import AlreadyAppliedError, NoSiteError, ParameterError, RecipeWarning, UnreadableError, first_line
from attemper.files import WEIGHTS, read_json_object, read_weights
from attemper.tempering.applying import apply
from attemper.tempering.handle import Tempered
from attemper.tempering.pretrained import config_entry, entry_of, is_pretrained, read_parameters, source_name, source_of
from attemper.tempering.records import (
    Record,
    added_parameters,
    architecture,
    base_of,
    read_record,
    record_of,
    same_recipe,
)
from attemper.tempering.saving import RECORD, tempered_root
from attemper.tempering.subclassing import is_tempered


def load(model: nn.Module, folder: str | Path | None = None) -> Tempered:
    """Restore a tempered model from its files: weights, recipe, and parameters that methods added. Gives the handle.

    model: a plain model, which is tempered as the saved one was; or one that is tempered with the same architecture.
        A model of Transformers that was saved by `save_pretrained` is first loaded by `from_pretrained`.
    folder: what `Tempered.save` or `save_pretrained` wrote. None: where `from_pretrained` found the model.

    A model that is tempered already keeps its recipe: another one that acts in training only is a warning, one that
    changes the architecture an error. Whatever is missing, damaged or does not fit is an `UnreadableError`, and leaves
    the model as it was.

    >>> import tempfile
    >>> def build():
    ...     layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ...     return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     apply(build(), "cb + dropkey(0.2)").save(folder)
    ...     load(build(), folder)
    <Tempered TransformerEncoder: cb(cb) + dropkey(0.2)>
    """
    if not isinstance(model, nn.Module):
        raise ParameterError(f"load needs a torch.nn.Module, got {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ParameterError("the model is on the meta device, where nothing can be loaded; to_empty() gives it memory")
    if folder is not None and (Path(folder) / RECORD).is_file():
        return _load_own(model, Path(folder))
    if is_pretrained(model):
        return _load_pretrained(model, None if folder is None else Path(folder))
    if folder is not None:
        raise UnreadableError(f"'{folder}' has no {RECORD}: it was not written by Tempered.save.")
    parts = [name for name, module in model.named_modules() if isinstance(entry_of(module), dict)]
    hint = f" Its part '{parts[0]}' was saved by itself: attemper.load(model.{parts[0]})." if parts else ""
    raise ParameterError(f"this {type(model).__name__} does not say where it came from; name the folder.{hint}")


def _load_own(model: nn.Module, folder: Path) -> Tempered:
    path = folder / RECORD
    weights = folder / WEIGHTS
    record = _record(read_json_object(path), f"'{path}'")
    try:
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UnreadableError(f"'{folder}' has no {WEIGHTS}: it is damaged, or not whole.") from None
    except OSError as error:
        raise UnreadableError(f"'{folder}' cannot be read: {error.strerror or error}.") from error
    if digest != record.digest:
        raise UnreadableError(
            f"'{weights}' is not what '{path}' was written with: its SHA-256 is {digest[:12]}…, and should be "
            f"{record.digest[:12] or 'there'}…. It is damaged, or another program wrote it."
        )
    tensors = read_weights(weights).tensors
    missing = [name for name in record.tied.values() if name not in tensors]
    if missing:
        raise UnreadableError(f"'{path}' is damaged: it names {missing[0]}, which '{weights}' does not have.")
    tensors |= {name: tensors[kept] for name, kept in record.tied.items()}
    return _restore(model, record, tensors, f"'{folder}'", whole=True)


def _load_pretrained(model: nn.Module, folder: Path | None) -> Tempered:
    entry = entry_of(model)
    if folder is None and entry is None:
        raise UnreadableError(
            f"the config of this {type(model).__name__} says nothing of a recipe: it was not tempered when it was saved"
        )
    where = f"config.attemper of this {type(model).__name__}"
    if folder is not None:
        where, theirs = f"'{folder / 'config.json'}'", config_entry(folder)
        if theirs != entry and (not source_name(model) or Path(source_name(model)).resolve() != folder.resolve()):
            raise UnreadableError(
                f"this {type(model).__name__} was not loaded from '{folder}', where only the parameters of methods are "
                "read: call from_pretrained(folder) first"
            )
        entry = theirs
    record = _record(entry, where)
    tensors = read_parameters(folder or source_of(model), record) if record.parameters else {}
    return _restore(model, record.moved(base_of(model)), tensors, where, whole=False)


def _record(data: Any, where: str) -> Record:
    keywords = [each for each in inspect.signature(apply).parameters.values() if each.kind == each.KEYWORD_ONLY]
    return read_record(data, where, {each.name: each.default for each in keywords})


def _restore(model: nn.Module, record: Record, tensors: dict[str, Tensor], where: str, whole: bool) -> Tempered:
    """Temper the model as the record says, unless it is already, and put the tensors in.

    whole: whether the tensors are all that the model has; otherwise they are those that methods added.
    """
    fresh = not any(is_tempered(module) for module in model.modules())
    if fresh:
        tempered = _tempered(model, record, where)
    else:
        tempered = Tempered.of(model)
        _compare(tempered, record, where)
    try:
        names = _names(model, record, where)
        state = {names.get(name, name): value for name, value in tensors.items()}
        _check_state(model, state, list(names.values()), where, whole)
        model.load_state_dict(state, strict=whole)
    except BaseException:
        if fresh:
            tempered.remove()
        raise
    return tempered


def _tempered(model: nn.Module, record: Record, where: str) -> Tempered:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)  # what the config says is what is applied
        try:
            tempered = apply(model, record.methods, **record.options)
        except (NoSiteError, ParameterError) as error:
            raise UnreadableError(
                f"{record.wording}, which {where} holds, does not fit this {type(model).__name__}: {first_line(error)}"
            ) from error
    blocks = record_of(model, tempered.control).blocks
    if blocks == record.blocks:
        return tempered
    tempered.remove()
    part = f" ('{record.part}' of it was saved)" if record.part else ""
    raise UnreadableError(
        f"{record.wording}, which {where} holds, was applied to a model of {record.blocks} blocks{part}; this "
        f"{type(model).__name__} has {blocks}, and methods would act in others than they did"
    )


def _compare(tempered: Tempered, record: Record, where: str) -> None:
    """Refuse another architecture, and warn of another recipe."""
    now = record_of(tempered.model, tempered.control, strict=False)
    changes = architecture(tempered.methods), architecture(record.methods)
    targets = now.options["targets"], record.options.get("targets")
    if root := tempered_root(tempered.model):
        raise AlreadyAppliedError(
            f"{where} is of a whole model, and of this {type(tempered.model).__name__} the part '{root}' is tempered. "
            f"Call Tempered.of(model.{root}).remove(), then load."
        )
    if changes[0] != changes[1] or (changes[0] and targets[0] != targets[1]):
        raise AlreadyAppliedError(
            f"{where} was trained with {record.wording}, and this {type(tempered.model).__name__} is tempered with "
            f"{now.wording}, which computes something else in eval mode. Call remove() on its handle "
            "(Tempered.of(model) finds it), then load."
        )
    if not same_recipe(now.recipe, record.recipe) or targets[0] != targets[1]:
        warnings.warn(
            f"{where} was trained with {record.wording}; the model stays tempered with {now.wording}",
            RecipeWarning,
            stacklevel=5,
        )


def _names(model: nn.Module, record: Record, where: str) -> dict[str, str]:
    """Name in the file → name in the model, of the parameters that methods added."""
    here = {added.key: added for added in added_parameters(model)}
    there = {added.key: added for added in record.parameters}
    if {key: added.shape for key, added in here.items()} != {key: added.shape for key, added in there.items()}:
        raise UnreadableError(
            f"{where} has {_listed(there)} as parameters of {record.wording}; in this {type(model).__name__} they are "
            f"{_listed(here)}"
        )
    return {added.name: here[key].name for key, added in there.items()}


def _listed(parameters: dict[Any, Any]) -> str:
    texts = [f"{added.place} {list(added.shape)}" for added in parameters.values()]
    return (", ".join(texts[:3]) + (", …" if len(texts) > 3 else "")) or "none"


def _check_state(model: nn.Module, state: dict[str, Tensor], added: list[str], where: str, whole: bool) -> None:
    """Refuse tensors that are not those of the model, before any is changed."""
    own = model.state_dict()
    wanted = own if whole else {name: own[name] for name in added}
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [name for name in wanted if name in state and state[name].shape != wanted[name].shape]
    reasons = [
        f"{what} {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in (("it lacks", missing), ("it has besides", unknown), ("other shapes have", shapes))
        if names
    ]
    if reasons:
        raise UnreadableError(f"{where} does not fit this {type(model).__name__}: {'; '.join(reasons)}")
