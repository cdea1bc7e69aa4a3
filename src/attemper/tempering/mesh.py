"""Where a process stands among those that compute one batch together.

Processes along a *data* axis hold other samples, along a *tensor* axis other heads and channels of the same samples,
along a *context* axis other tokens of them, along a *pipeline* axis other blocks. Masks are those that one process
would draw for the whole batch, so each process has to know its place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from attemper.errors import MeshError, ParameterError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Role = Literal["data", "tensor", "context", "pipeline"]
NAMES: dict[Role, tuple[str, ...]] = {
    "data": ("data", "dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "replicate", "shard", "batch"),
    "tensor": ("tensor", "tp", "model"),
    "context": ("context", "cp", "sequence", "sp"),
    "pipeline": ("pipeline", "pp", "pipe"),
}
"""The names of mesh dimensions that are understood."""


class Axis(NamedTuple):
    """One dimension of the mesh.

    rank, size: of this process along it, and of all. group: the name of its process group; "" where none is known.
    """

    role: Role
    rank: int
    size: int
    group: str = ""


class Position(NamedTuple):
    """The place of this process: one axis for each dimension of the mesh, the slowest first."""

    axes: tuple[Axis, ...] = ()
    ranks: tuple[int, ...] = ()
    """The processes that hold the same part of other samples, and this one, by their numbers in the world."""
    base: int = 0
    """From where this process counts its samples beside."""
    splits_tokens: bool = False
    """Whether tensors between layers hold a part of the tokens each, along the tensor axis (sequence parallelism)."""

    def along(self, *roles: Role) -> Axis:
        """The axes of these roles as one."""
        rank, size = 0, 1
        for axis in self.axes:
            if axis.role in roles:
                rank, size = rank * axis.size + axis.rank, size * axis.size
        return Axis(roles[0], rank, size)

    def has(self, *roles: Role) -> bool:
        return any(axis.role in roles and axis.size > 1 for axis in self.axes)

    def agree(self, seed: Tensor) -> Tensor:
        """One seed for all who hold parts of the same samples: that of the first of them. seed: 0-dim."""
        for axis in self.axes if not seed.is_meta else ():
            if axis.role in ("tensor", "context") and axis.size > 1:
                sent = torch.ops._c10d_functional.broadcast(seed, 0, axis.group)
                seed = torch.ops._c10d_functional.wait_tensor(sent)
        return seed


ALONE = Position()
AVAILABLE = torch.distributed.is_available()


def is_distributed() -> bool:
    """Whether there are processes beside this one."""
    return AVAILABLE and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def is_sharded(x: object) -> bool:
    """Whether a tensor is a DTensor."""
    return type(x).__name__ == "DTensor"  # the class is expensive to import, and then nobody has one


def read_mesh(mesh: DeviceMesh | Mapping[str, DeviceMesh]) -> Position:
    """The place of this process in a mesh that somebody described: one with named dimensions, or one mesh per role."""
    if isinstance(mesh, Mapping):
        for role, part in mesh.items():
            if role not in NAMES:
                raise ParameterError(f"mesh= has roles {', '.join(NAMES)} as its keys; got {role!r}")
            _check_mesh(part)
        axes = [axis for role, part in mesh.items() for axis in _axes(part, [cast(Role, role)] * part.ndim)]
        peers = mesh["data"].mesh.flatten().tolist() if "data" in mesh else [torch.distributed.get_rank()]
        return Position(tuple(axes), tuple(peers))
    _check_mesh(mesh)
    if mesh.mesh_dim_names is None:
        raise ParameterError(
            "mesh= has dimensions without names, so what they are for is not known. Give init_device_mesh "
            f"mesh_dim_names=, or write mesh={{'data': …, 'tensor': …}}. {_understood()}"
        )
    roles = [role_of(name) for name in mesh.mesh_dim_names]
    unknown = [name for name, role in zip(mesh.mesh_dim_names, roles, strict=True) if role is None]
    if unknown:
        raise ParameterError(
            f"mesh= has a dimension '{unknown[0]}', and what it is for is not known. {_understood()} Others can be "
            "told as mesh={'data': …, 'tensor': …}."
        )
    ranks = mesh.mesh
    for dim in reversed(range(mesh.ndim)):
        ranks = ranks if roles[dim] == "data" else ranks.select(dim, mesh.get_local_rank(dim))
    return Position(tuple(_axes(mesh, cast("list[Role]", roles))), tuple(ranks.flatten().tolist()))


def _check_mesh(mesh: object) -> None:
    if type(mesh).__name__ != "DeviceMesh":
        raise ParameterError(f"mesh= takes a DeviceMesh, or one for each role; got {type(mesh).__name__}")
    if cast("DeviceMesh", mesh).get_coordinate() is None:
        raise ParameterError("this process is no part of the mesh that mesh= was given")


def _understood() -> str:
    listed = "; ".join(f"{role}: {', '.join(names)}" for role, names in NAMES.items())
    return f"Names that are understood: {listed}."


def role_of(name: str) -> Role | None:
    """What a mesh dimension is for, by its name."""
    return next((role for role, names in NAMES.items() if name.lower() in names), None)


def _axes(mesh: DeviceMesh, roles: list[Role]) -> Iterator[Axis]:
    for dim, role in enumerate(roles):
        yield Axis(role, mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim).group_name)


# ---------------------------------------------------------------------------------------- what the parameters tell
def find_position(model: nn.Module) -> Position:
    """The place of this process as the model's parameters tell it; where they tell nothing, all share the data."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    everyone = tuple(range(world))
    meshes: dict[DeviceMesh, None] = {cast(Any, p).device_mesh: None for p in model.parameters() if is_sharded(p)}
    data = _fsdp_groups(model)
    found: dict[str, Axis] = {}
    for mesh in meshes:
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim).group_name
            if group not in data and group not in found:
                name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dim]
                found[group] = Axis(_role_found(name), mesh.get_local_rank(dim), mesh.size(dim), group)
    parts = tuple(axis for axis in found.values() if axis.role != "data" and axis.size > 1)
    if not parts:
        return Position((Axis("data", rank, world),), everyone)
    roots = {mesh._get_root_mesh(): None for mesh in meshes}
    told = next((root for root in roots if root.size() == world and root.mesh_dim_names is not None), None)
    if told is not None and all(role_of(name) is not None for name in told.mesh_dim_names or ()):
        return read_mesh(told)._replace(splits_tokens=_splits_tokens(model))
    return Position((_rest(parts, rank, world), *parts), everyone, splits_tokens=_splits_tokens(model))


def _splits_tokens(model: nn.Module) -> bool:
    """Whether norms are distributed, which is done to let every process norm its part of the tokens."""
    for module in model.modules():
        own = list(module._parameters.values())
        if "Norm" in type(module).__name__ and any(is_sharded(param) for param in own):
            if all(each.is_replicate() for param in own if is_sharded(param) for each in cast(Any, param).placements):
                return True
    return False


def _role_found(name: str | None) -> Role:
    """What a dimension that parameters are sharded on is for: heads and channels, unless its name says otherwise."""
    role: Role | None = "tensor" if name is None else role_of(name)
    if role is None:
        raise MeshError(
            f"the model's parameters are sharded on a mesh dimension '{name}', and what it is for is not known: say it "
            f"by attemper.apply(model, recipe, mesh={{'data': …, 'tensor': …}}). {_understood()}"
        )
    return role


def _rest(parts: tuple[Axis, ...], rank: int, world: int) -> Axis:
    """The data axis, where the groups that hold parts of the same samples are all that is known."""
    if len(parts) == 1:
        group = cast(Any, torch.distributed.distributed_c10d)._resolve_process_group(parts[0].group)
        ranks, size = torch.distributed.get_process_group_ranks(group), parts[0].size
        many = world // size
        if many * size == world and ranks == list(range(ranks[0], ranks[0] + size)) and ranks[0] % size == 0:
            return Axis("data", ranks[0] // size, many)
        if many * size == world and ranks == list(range(ranks[0], world, many)):
            return Axis("data", ranks[0], many)
    raise MeshError(
        "which processes share the batch cannot be told from the model's parameters: give the mesh to "
        "attemper.apply(model, recipe, mesh=mesh)"
    )


def _fsdp_groups(model: nn.Module) -> set[str]:
    """The process groups over which FSDP2 shards or replicates parameters."""
    found = set()
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = cast(Any, module)._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for info in (each.mesh_info for each in groups if each is not None):
            dims = (info.shard_mesh_dim, info.replicate_mesh_dim)
            found |= {info.mesh.get_group(dim).group_name for dim in dims if dim is not None}
    return found


class Locator:
    """Finds the place of this process, once for every module that passes begin with, and again where its parameters
    have become sharded since."""

    def __init__(self, given: Position | None = None, model: nn.Module | None = None) -> None:
        self.given = given
        self.model = None if model is None else weakref.ref(model)
        """The whole model, for sites that run without it."""
        self.last = ALONE
        self._found: weakref.WeakKeyDictionary[nn.Module, _Found] = weakref.WeakKeyDictionary()

    def find(self, module: nn.Module) -> Position:
        """The place of this process in a pass that begins with a module."""
        if not is_distributed():
            return ALONE
        if self.given is not None and not self.given.has("tensor"):
            return self.given
        found = self._found.get(module)
        if found is None:
            found = self._found[module] = _Found([m._parameters for m in module.modules() if m._parameters])
        sharded = found.count()
        if self.given is not None:
            return _checked(self.given, sharded)
        if sharded != found.sharded:
            found.position, found.sharded = find_position(module), sharded
        self.last = found.position
        return found.position

    def find_again(self) -> Position:
        """The place of this process for a site that runs by itself, or draws nothing."""
        if not is_distributed():
            return ALONE
        if self.given is not None or self.last.axes:
            return self.given or self.last
        model = None if self.model is None else self.model()
        if model is not None:
            return self.find(model)
        return Position((Axis("data", torch.distributed.get_rank(), torch.distributed.get_world_size()),))

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a file: another process may read it
        self.__init__()  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Locator:
        return Locator(self.given)  # of a model that is being copied


def _checked(given: Position, sharded: int) -> Position:
    """A mesh that somebody described, as far as it fits a model with so many DTensors among its parameters."""
    if sharded == 0:
        raise MeshError(
            "mesh= has a tensor dimension, and the model's parameters are plain tensors: which heads and channels a "
            "process holds is not known. Shard them as DTensors, as parallelize_module does. Code that splits "
            "attention in a way of its own calls attemper.attention(…, seed=…, at=…)."
        )
    return given


@dataclass
class _Found:
    """What is known of one module."""

    holders: list[dict[str, Any]]
    """Where its parameters stand."""
    sharded: int = -1
    """How many of them were DTensors when the position was found."""
    position: Position = ALONE

    def count(self) -> int:
        """How many are DTensors now."""
        if "torch.distributed.tensor" not in sys.modules:
            return 0
        return sum(is_sharded(param) for holder in self.holders for param in holder.values())
