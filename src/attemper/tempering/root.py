"""What happens round the whole model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from attemper.tempering.penalties import Control, share_of_step, with_penalty
from attemper.tempering.subclassing import Action


@dataclass
class RootAction(Action):
    """Stands at the way in and out of the whole model."""

    control: Control

    def acts(self, training: bool) -> bool:
        return training and (torch.compiler.is_compiling() or self.control.auto_penalty)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Compiled activation checkpointing refuses a mode that is entered inside a checkpointed block, unless the
            # mode stack was touched before.
            with Touch():
                pass
        if not self.control.auto_penalty:
            return forward(*args, **kwargs)
        self.control.ledger.clear()
        out = forward(*args, **kwargs)
        if not self.control.ledger:
            return out
        penalty = torch.stack([entry.value for entry in self.control.ledger]).sum()
        self.control.ledger.clear()
        return with_penalty(out, penalty * share_of_step(module, kwargs), self.control)


class Touch(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
