"""The weights of a sharded run on disk: every rank writes its part, and any number of ranks can read them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.errors import DamagedError, StorageError
from attemper.lab.training.learner import Learner
from attemper.lab.training.spec import RunSpec

PREFIX = "checkpoint-shards-"


def refuse_sharded(spec: RunSpec, probe_every: int | None) -> None:
    """Raise if a run asks for what needs the whole model in one process."""
    for option, given in (("--evaluate", ",".join(spec.evaluate)), ("--probe-every", probe_every)):
        if given:
            raise ParameterError(
                f"{option} is {given}, which needs the whole model in one process; --parallel fsdp leaves a part of it "
                "in each. 'attemper evaluate' and 'attemper diagnose' can look at the finished run."
            )


def save_shards(folder: Path, place: str, learner: Learner, best: Mapping[str, Tensor]) -> str:
    """Write all tensors of a run into a folder of their own, by all ranks together, and give its name.

    The checkpoint that names it is written afterwards: until then the shards of the one before are those that count.

    place: where the run is, a part of the name.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    name = f"{PREFIX}{place}"
    try:
        save(tensors_of(learner, best), checkpoint_id=folder / name)
    except (OSError, CheckpointException) as error:
        raise StorageError(
            f"The shards '{folder / name}' could not be written: {error}. Those before are unharmed."
        ) from error
    return name


def load_shards(folder: Path, name: str, learner: Learner, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the tensors of a run back, and give the best weights. Nothing is changed unless all can be read."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    fill_optimizer(learner)
    live = tensors_of(learner, best)
    read = {key: torch.empty_like(tensor) for key, tensor in live.items()}
    try:
        load(read, checkpoint_id=folder / name)
    except (OSError, KeyError, ValueError, RuntimeError, CheckpointException) as error:
        raise DamagedError(f"The shards '{folder / name}' cannot be read ({_reason(error)})") from error
    with torch.no_grad():
        for key, tensor in live.items():
            tensor.copy_(read[key])
    return {key: read[f"best/{key}"] for key in best}


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank on which it did, in a sentence; torch itself only gives the rank's number."""
    failures = getattr(error, "failures", {})
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0].partition(". ")[0].rstrip(": .")


def remove_shards(folder: Path, but: str) -> None:
    """Remove the shards that the checkpoint does not name any more."""
    for found in folder.glob(f"{PREFIX}*"):
        if found.name != but:
            shutil.rmtree(found, ignore_errors=True)


def tensors_of(learner: Learner, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that the rest of a run depends on, by a path that does not depend on the ranks."""
    state = learner.state()
    found = {f"model/{name}": value for name, value in state["model"].items()}
    for index, slots in state["optimizer"].items():
        found |= {f"optimizer/{index}/{slot}": value for slot, value in slots.items()}
    found |= {f"average/{index}": value for index, value in enumerate(state["average"] or [])}
    return found | {f"best/{name}": value for name, value in best.items()}


def fill_optimizer(learner: Learner) -> None:
    """Give the optimiser the state that its first step would make, so that there is something to read into."""
    parameters: list[Any] = [p for group in learner.optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        learner.optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=learner.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
