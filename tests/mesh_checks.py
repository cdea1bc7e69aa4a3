"""What ranks of a mesh are asked beside the cases that are compared with one process: refusals, numbers of samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attemper
from attemper.ops.seeds import draw_seed
from attemper.tempering import even
from attemper.tempering.mesh import find_position, read_mesh
from mesh_cases import (
    KINDS,
    MODELS,
    SEED,
    Case,
    Outcome,
    Words,
    alone,
    attempt,
    context_parallel,
    group,
    llama,
    parallelise,
    parallelise_with_dtensors,
    quickly,
    recorded,
    sequences,
    step,
    tensor_parallel,
    written,
)  # fmt: skip


def words_of(tempered: attemper.Tempered, x: Tensor) -> Words:
    torch.manual_seed(SEED)
    with recorded() as words:
        tempered.model(x)
    return words


def data_rows(sizes: list[tuple[int, ...]], told: bool = False) -> list[Any]:
    """One pass after the other with so many samples on each rank: the first samples of draws, or errors."""
    tempered = attemper.apply(written().train(), "dropkey(0.3)")
    found = []
    for each in sizes:
        first, many = sum(each[: dist.get_rank()]), each[dist.get_rank()]
        if told:
            tempered.samples(first=first, count=many)
        words = attempt(words_of, tempered, torch.zeros(many, 5, 16, dtype=torch.float64))
        found.append(words if isinstance(words, tuple) else sorted({at[0] for at, _ in words.values()}))
    return found


def uneven() -> list[Any]:
    """A last batch that one rank has less of."""
    before, even.PATIENCE = even.PATIENCE, 1.0
    found = data_rows([(2, 2), (2, 2), (2, 1)])
    even.PATIENCE = before
    return found


def apart() -> tuple[list[Any], list[Any]]:
    """Both change, to different sizes; both change, to the same."""
    return data_rows([(2, 2), (3, 4)]), data_rows([(4, 4), (3, 3), (4, 4)])


def unknown_mesh() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    named = init_device_mesh("cpu", (2,), mesh_dim_names=("island",))
    return [
        attempt(attemper.apply, written(), "dropkey(0.1)", mesh=mesh)
        for mesh in (init_device_mesh("cpu", (2,)), named, {"island": named}, {"tensor": 3})
    ]


def told_by_role() -> list[int]:
    """A mesh whose names say nothing, told as one per role."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = {"data": init_device_mesh("cpu", (2,), mesh_dim_names=("island",))}
    tempered = attemper.apply(written().train(), "dropkey(0.1)", mesh=mesh)
    return sorted({at[0] for at, _ in words_of(tempered, sequences()).values()})


def mixing_tokens() -> Any:
    """Context Broadcasting where every rank has some of the tokens only."""
    return attempt(context_parallel, "written", "cb")


def local_attention() -> Any:
    """Attention between the tokens of one rank only, which is no attention of the whole."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return attempt(words_of, attemper.apply(written().train(), "dropkey(0.1)", mesh=mesh), sequences())


def torch_context_parallel() -> Any:
    """torch's own context manager, which puts ring attention in the place of the fused call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torchs

    tempered = attemper.apply(written().train(), "dropkey(0.1)")
    x = sequences()[:, :4].clone()
    with torchs(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]):
        return attempt(words_of, tempered, x)


def plain_parameters() -> Any:
    """A tensor dimension, and parameters of which nobody knows whether they are parts."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return attempt(words_of, attemper.apply(written().train(), "dropkey(0.1)", mesh=mesh), sequences())


def penalties() -> Any:
    return attempt(tensor_parallel, "llama", "explicit(v=0.1)")


def learnt() -> Any:
    return attempt(tensor_parallel, "llama", "dropkey(learn)")


def drawn_after() -> list[Any]:
    """What a draw after a DTensor comes to, by the placement of the DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, found = init_device_mesh("cpu", (2,)), []
    for placement in (Replicate(), Shard(1), Partial()):
        torch.manual_seed(SEED)
        seed = draw_seed(DTensor.from_local(torch.zeros(2, 3), mesh, [placement]))
        found.append((type(seed).__name__, seed.item()))
    return found


def sequence_parallel() -> list[bool]:
    """Whether it is seen that norms split tokens between layers."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, split, whole = init_device_mesh("cpu", (2,)), written(), llama()
    parallelise_with_dtensors(split, mesh)
    parallelise(whole, mesh)
    return [find_position(model).splits_tokens for model in (split, whole)]


def positions() -> list[Any]:
    """Of meshes with names: the axes of the roles, and who holds the same part of other samples."""
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    for names in (("dp", "tp"), ("cp", "dp_shard"), ("pp", "fsdp")):
        position = read_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=names))
        found.append(([(axis.role, axis.rank, axis.size) for axis in position.axes], position.ranks))
    return found


CHECKS: dict[str, Callable[[], Any]] = {
    check.__name__: check
    for check in (
        uneven, apart, unknown_mesh, told_by_role, mixing_tokens, local_attention, torch_context_parallel, penalties,
        learnt, drawn_after, plain_parameters, sequence_parallel, positions,
    )
}  # fmt: skip
CHECKS["told"] = lambda: data_rows([(2, 2), (2, 1), (3, 1)], told=True)


def run_all(cases: list[Case], checks: bool = True) -> tuple[list[Any], dict[tuple[str, str], Outcome], dict[str, Any]]:
    """The outcome or the error of each case; what one process computes, of which every rank does a part; the checks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    compared = sorted({(model, recipe) for _, model, recipe, _ in cases})
    with quickly():
        whole = {pair: alone(*pair) for pair in compared[rank::size]}
        with group():
            outcomes = [attempt(KINDS[kind], model, recipe, **options) for kind, model, recipe, options in cases]
            checked = {name: attempt(check) for name, check in CHECKS.items() if checks}
    return outcomes, whole, checked


def run_on_gpu(cases: list[tuple[str, str]]) -> list[tuple[Outcome, Outcome]]:
    """For each model and recipe: what a GPU computes by itself, and as a mesh of one, over NCCL."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    found = []
    try:
        for name, recipe in cases:
            build, data = MODELS[name]
            plain, split = build().cuda().train(), build().cuda().train()
            for model in (plain, split):
                attemper.apply(model, recipe)
            parallelise(split, init_device_mesh("cuda", (1,), mesh_dim_names=("tp",)))
            found.append((step(plain, data().cuda()), step(split, data().cuda())))
    finally:
        dist.destroy_process_group()
    return [(on_cpu(plain), on_cpu(split)) for plain, split in found]


def on_cpu(outcome: Outcome) -> Outcome:
    loss, gradients, words = outcome
    moved = {key: (at, word.cpu()) for key, (at, word) in words.items()}
    return loss, {name: gradient.cpu() for name, gradient in gradients.items()}, moved
