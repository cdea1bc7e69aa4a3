"""What happens round one convolution: its penalty is taken from the call that it makes."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import NoSiteError, UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import ConvolutionRecord, Penalty, WeightMap
from attemper.sites.base import Slot
from attemper.tempering.ledger import Entry
from attemper.tempering.parts import refuse_parts
from attemper.tempering.penalties import Control
from attemper.tempering.root import run_pass
from attemper.tempering.subclassing import Action
from attemper.tempering.wrapped import addition, effective, refuse_unknown_weight

PLAIN = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


class ConvolutionWatch(TorchFunctionMode):
    """Sees the convolutions of one forward pass of one module, with the weights that they really multiply with.

    So padding of any kind, a weight that is standardised or normalised at every use, and classes of other libraries
    need no further knowledge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[ConvolutionRecord] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PLAIN:
            self.records.append(_plain(out, *args, **(kwargs or {})))
        elif func in TRANSPOSED:
            self.records.append(_transposed(out, *args, **(kwargs or {})))
        return out


def _plain(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> ConvolutionRecord:
    x, y = (t if t.dim() == weight.dim() else t[None] for t in (input, out))
    positions = y.shape[2:].numel()
    return ConvolutionRecord(x, weight, positions, stride, padding, dilation, groups, output=y, bias=bias)


def _transposed(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> ConvolutionRecord:
    record = _plain(out, input, weight, bias, stride, padding, dilation, groups)
    return replace(record, transposed=True, output_padding=output_padding)


@dataclass
class ConvolutionAction(Action):
    """Takes the penalty of one convolution."""

    control: Control
    place: Place
    method: Method
    slot: Slot | None
    """Where the convolution stands; what adapters add to it there belongs to its weight."""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.penalises(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        def penalised(*args: Any, **kwargs: Any) -> Any:
            return self.penalise(module, forward, args, kwargs)

        return run_pass(self.control, module, penalised, args, kwargs)

    def penalise(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the convolution, and enter what it adds to the loss."""
        watch = ConvolutionWatch()
        with watch:
            out = forward(*args, **kwargs)
        if len(watch.records) != 1:
            raise UnmetError(
                f"{self.place.where} ({type(module).__name__}) computed {len(watch.records)} convolutions by torch's "
                f"functions where one was expected: {self.method.name}(conv=…) cannot tell which is meant. Leave it "
                "out with targets=."
            )
        method = cast(Penalty, self.method)
        record = self.with_adapters(module, watch.records[0])
        for component, term in method.convolution_terms(record, self.place).items():
            refuse_parts(self.control, self.method, self.place)
            self.control.enter(Entry(self.place.name, self.place.block, self.method.name, component, term, method.sums))
        return out

    def with_adapters(self, module: nn.Module, record: ConvolutionRecord) -> ConvolutionRecord:
        """The record with what adapters add to the weight; its output is left out where it has another weight's."""
        added = None
        if _is_wrapped(self.slot, module):
            if record.groups > 1:
                raise UnmetError(_grouped(self.method.name, self.place.name))
            added = addition(self.method.name, self.place.name, self.slot, module)
        if added is not None:
            return replace(record, weight=effective(record.weight, added), output=None)
        if any(isinstance(method, WeightMap) for method in self.control.methods):
            return replace(record, output=None)
        return record


def refuse_unknown_convolution(method: str, where: str, slot: Slot | None, layer: nn.Module) -> None:
    """At apply: raise where the weight that a convolution multiplies with will not be known.

    One that is computed anew at every use is, whatever it is computed from: it is seen when it is used.
    """
    if _is_wrapped(slot, layer):
        refuse_unknown_weight(method, where, slot, layer)
        if cast(int, layer.groups) > 1:
            raise NoSiteError(_grouped(method, where))


def _is_wrapped(slot: Slot | None, layer: nn.Module) -> bool:
    """Whether something else stands where the convolution stood, an adapter round it for one."""
    return slot is not None and slot.layer is not layer


def _grouped(method: str, where: str) -> str:
    return (
        f"{method} needs the weight that the convolution '{where}' multiplies with, and what an adapter adds to one "
        "with groups is not known. Merge what was added, or leave the layer out with targets=."
    )
