"""How a model lies over the ranks: whole on each of them (DDP), or in parts (FSDP2)."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.lab.training.ranks import Ranks


class Objective(nn.Module):
    """A model and its training loss in one: (inputs, targets) → a scalar.

    DDP follows what a module gives back. It must see all passes of a comparison at once, and penalties too.

    loss: a method of the object that has the model.
    """

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.loss = weakref.WeakMethod(loss)  # its object has this module: both shall go at once
        # DDP warns where parameters may go unused and none does.
        self.unused = nn.Parameter(torch.zeros((), device=next(network.parameters()).device))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss()
        assert loss is not None
        return loss(inputs, targets)


def connect(objective: Objective, ranks: Ranks, device: torch.device) -> nn.Module:
    """The objective, with gradients that are means over the ranks. A sharded model sees to that by itself."""
    if ranks.alone or ranks.sharded:
        return objective
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # the budget decides, run by run; accelerate would decide once per process
        device_placement=False,
        # Models have parameters that no pass uses. And only so do the buckets keep their first order, without which
        # a run that goes on from a checkpoint would add up in another one than a run that was never interrupted.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    connected: nn.Module = accelerator.prepare_model(objective)
    return connected


@contextlib.contextmanager
def without_sync(objective: nn.Module, model: nn.Module) -> Iterator[None]:
    """Context manager: gradients inside it stay on their rank, to be added up before they are exchanged."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(objective, nn.parallel.DistributedDataParallel):
        with objective.no_sync():
            yield
    else:
        yield


def synchronised(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """The model with batch norms that see the whole batch, which torch has on GPUs only."""
    if ranks.alone or device.type == "cpu":
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


# ------------------------------------------------------------------------------------------------------------- sharding
def shard(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Leave a part of every weight on each rank: one unit per block, and one for the rest.

    This is what accelerate calls as well; but accelerate does so on GPUs only, and could not be tested without one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.size,))
    # Units gather their weights for each pass and let them go afterwards, the outermost too: what evaluates or
    # averages the weights between two passes then never meets a copy that was left behind.
    for block in [*blocks_of(model), model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, innermost first: members of lists whose members are all of one kind."""
    found = []
    for module in model.modules():
        members = list(module.children())
        alike = len({type(member) for member in members}) == 1 and len(members) > 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike:
            found += [member for member in members if any(True for _ in member.children())]
    return found[::-1]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU, where this rank may have a part of it. Every rank must ask."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def copy_of(tensor: Tensor) -> Tensor:
    """A copy to keep: on the CPU, but for a part of a sharded tensor, which stays where it is."""
    from torch.distributed.tensor import DTensor

    kept: Any = tensor.detach()
    return kept.clone() if isinstance(kept, DTensor) else kept.cpu().clone()
