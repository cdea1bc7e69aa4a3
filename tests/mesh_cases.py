"""What ranks of a mesh compute, for the tests that compare it with what one process computes on the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.ops.stream import Stream
from attemper.tempering import applying

BATCH, SEED = 4, 7
Words = dict[tuple[int, int, int], tuple[tuple[int, ...], Tensor]]
"""(site, call, lane) → where a draw stood, and its words."""
Outcome = tuple[float, dict[str, Tensor], Words]
"""A loss, gradients, words."""

RECIPES = {
    "dropkey": "dropkey(0.3)",
    "dropkey-queries": "dropkey(0.3, share=queries)",
    "dropkey-heads": "dropkey(0.3, share=heads)",
    "dropattention": "dropattention(0.3, rescale=inverted)",
    "dropattention-column": "dropattention(0.3, unit=column, w=2)",
    "hardmask": "hardmask(0.5, k=3)",
    "hardmask-heads": "hardmask(0.5, k=3, share=heads)",
    "drophead": "drophead(0.5)",
    "droppath": "droppath(0.4)",
    "layerdrop": "layerdrop(0.5)",
    "ffdropout": "ffdropout(0.3)",
    "dropconnect": "dropconnect(0.3)",
    "blur": "blur(1.0)",
    "many": "dropkey(0.2) + dropattention(0.2) + drophead(0.3) + droppath(0.2) + ffdropout(0.2)",
}


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=options.pop("dropout", 0.0), **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config).double()
    return model


def vit(**options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    model: nn.Module = timm.models.VisionTransformer(**shape, mlp_ratio=2, **options).double()
    return model


def tokens() -> Tensor:
    return torch.randint(0, 32, (BATCH, 6), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "llama": (llama, tokens),
    "vit": (vit, images),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples, so that the mean over ranks is that over the batch."""
    out = model(x)
    logits: Tensor = out.logits if hasattr(out, "logits") else out
    return logits.sin().flatten(1).sum(1).mean()


@contextlib.contextmanager
def recorded() -> Iterator[Words]:
    """Context manager: gives the words of all that is drawn inside."""
    plain, words = Stream.products, Words()

    def products(self: Stream, *shape: int) -> Tensor:
        out = plain(self, *shape)
        if not out.is_meta:
            words[self.site, self.call, self.lane] = (tuple(self.at[:4]), out)
        return out

    Stream.products = products  # type: ignore[method-assign]
    try:
        yield words
    finally:
        Stream.products = plain  # type: ignore[method-assign]


def step(model: nn.Module, x: Tensor, seed: int = SEED, state: Tensor | None = None) -> Outcome:
    """A forward and a backward pass; gradients are those of the whole weights.

    seed: where the generator stands; ranks that hold parts of the same samples must agree wherever theirs are.
    state: the same, as it was saved.
    """
    if state is None:
        torch.manual_seed(seed)
    else:
        torch.set_rng_state(state)
    with recorded() as words:
        loss = loss_of(model, x)
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        if grad is not None:
            gradients[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return loss.item(), gradients, words


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Context manager: inside it models are not tried out when they are tempered."""
    before = applying.try_out, applying.look_at
    applying.try_out, applying.look_at = (lambda model, impl: None), (lambda model: None)
    try:
        yield
    finally:
        applying.try_out, applying.look_at = before


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Context manager: inside it the ranks of a team know each other."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone(model: str, recipe: str, **options: Any) -> Outcome:
    """What one process computes."""
    build, data = MODELS[model]
    network = build(**options).train()
    attemper.apply(network, recipe)
    return step(network, data())


class Again(nn.Module):
    """Something that is computed again in backward, without the state of the generator."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # no part of the model: names stay what they are

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner[0], *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def checkpointed(model: str, recipe: str, **options: Any) -> Outcome:
    """What one process computes with every block checkpointed."""
    build, data = MODELS[model]
    network: Any = build(**options).train()
    attemper.apply(network, recipe)
    if model == "llama":
        network.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        return step(network, data())
    again = [Again(block) for block in blocks_of(network)]

    def run(x: Tensor) -> Tensor:
        for block in again:
            x = block(x)
        return x

    (network if model == "written" else network.blocks).forward = run
    return step(network, data())


def resumed(model: str, recipe: str, **options: Any) -> Outcome:
    """What one process computes that goes on from another's weights and generator, in the middle of a run."""
    build, data = MODELS[model]
    first = build(**options).train()
    attemper.apply(first, recipe)
    torch.manual_seed(SEED)
    state = torch.get_rng_state()
    first(data())  # the pass that is computed once more behind
    second = build(**options).train()
    attemper.apply(second, recipe)
    torch.manual_seed(SEED + 1)
    second(data())  # its first pass is another one
    second.load_state_dict(first.state_dict())
    return step(second, data(), state=state)


class Attention(nn.Module):
    """Attention of queries, keys and values in weights of their own; `gather` brings the keys of all ranks together."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.gather: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, self.gather(k), self.gather(v))
        joined: Tensor = self.proj(out.transpose(1, 2).contiguous().flatten(2))
        return joined


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def written(**options: Any) -> nn.Module:
    """Blocks as one writes them by hand."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16, 4) for _ in range(2))).double()


def sequences() -> Tensor:
    return torch.randn(BATCH, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


MODELS["written"] = (written, sequences)


# ------------------------------------------------------------------------------------------------------------- meshes
def parallelise(model: nn.Module, mesh: Any) -> None:
    """Tensor parallelism as people write it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if hasattr(model, "blocks"):  # heads stay whole, since one weight makes Q, K and V
        plan = {"attn.qkv": ColwiseParallel(output_layouts=Replicate())}
        plan |= {"attn.proj": RowwiseParallel(input_layouts=Replicate())}
        plan |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
    else:
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in names}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan)


def parallelise_with_dtensors(model: nn.Module, mesh: Any) -> None:
    """The same where what passes between layers are DTensors: norms split tokens, attention gets split heads."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    split, last = Shard(1), ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    end = RowwiseParallel(output_layouts=split, use_local_output=False)
    plan = dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.fc1"), last) | {"attn.proj": end, "mlp.fc2": end}
    plan |= {name: SequenceParallel(use_local_output=False) for name in ("norm1", "norm2")}
    for block in model.children():
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=split, use_local_output=False)
    whole = PrepareModuleOutput(output_layouts=split, desired_output_layouts=Replicate())
    parallelize_module(model, mesh, {"0": first, "1": whole})


def tensor_parallel(
    model: str, recipe: str, later: bool = True, given: bool = False, compiled: bool = False, **options: Any
) -> Outcome:
    """later: whether the model is made parallel when it is tempered already. given: whether apply is told the mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    build, data = MODELS[model]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    network = build(**options).train()
    if not later:
        parallelise(network, mesh)
    attemper.apply(network, recipe, mesh=mesh if given else None)
    if later:
        parallelise(network, mesh)
    if compiled:
        network.compile(fullgraph=True, backend="aot_eager")
    return step(network, data(), SEED + dist.get_rank())


def planned(model: str, recipe: str, **options: Any) -> Outcome:
    """Tensor parallelism by the plan that Transformers has for a model."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    build, data = MODELS[model]
    network = build(**options).train()
    attemper.apply(network, recipe)
    apply_tensor_parallelism(network, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return step(network, data(), SEED + dist.get_rank())


def dtensors(model: str, recipe: str, **options: Any) -> Outcome:
    """Tensor and sequence parallelism with DTensors everywhere."""
    from torch.distributed.device_mesh import init_device_mesh

    build, data = MODELS[model]
    network = build(**options).train()
    attemper.apply(network, recipe)
    parallelise_with_dtensors(network, init_device_mesh("cpu", (dist.get_world_size(),)))
    return step(network, data(), SEED + dist.get_rank())


class Gather(torch.autograd.Function):
    """(B, H, n, e) of each rank → (B, H, N, e) of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def context_parallel(model: str, recipe: str, **options: Any) -> Outcome:
    """Every rank has a part of the tokens, and the keys of all."""
    from torch.distributed.device_mesh import init_device_mesh

    build, data = MODELS[model]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    network = build(**options).train()
    attemper.apply(network, recipe, mesh=mesh)
    for module in network.modules():
        if isinstance(module, Attention):
            module.gather = Gather.apply
    part = data().chunk(dist.get_world_size(), 1)[dist.get_rank()]
    loss, gradients, words = step(network, part, SEED + dist.get_rank())
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return loss * dist.get_world_size(), gradients, words


def data_parallel(model: str, recipe: str, compiled: bool = False, **options: Any) -> Outcome:
    build, data = MODELS[model]
    network = build(**options).train()
    attemper.apply(network, recipe)
    if compiled:
        network.compile(fullgraph=True, backend="aot_eager")
    return step(nn.parallel.DistributedDataParallel(network), data().chunk(dist.get_world_size())[dist.get_rank()])


def blocks_of(model: Any) -> Any:
    return model.blocks if hasattr(model, "blocks") else model.model.layers if hasattr(model, "model") else model


def fully_sharded(model: str, recipe: str, **options: Any) -> Outcome:
    from torch.distributed.fsdp import fully_shard

    build, data = MODELS[model]
    network = build(**options).train()
    attemper.apply(network, recipe)
    for block in blocks_of(network):
        fully_shard(block)
    fully_shard(network)
    return step(network, data().chunk(dist.get_world_size())[dist.get_rank()])


def both(model: str, recipe: str, fsdp: bool = True, given: bool = False, **options: Any) -> Outcome:
    """Data × tensor: samples over one dimension, heads and channels over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    build, data = MODELS[model]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = build(**options).train()
    attemper.apply(network, recipe, mesh=mesh if given else None)
    parallelise(network, mesh["tp"])
    for block in (*blocks_of(network), network) if fsdp else ():
        fully_shard(block, mesh=mesh["dp"])
    samples = mesh["dp"].get_local_rank()
    loss, gradients, words = step(network, data().chunk(2)[samples], SEED + mesh["tp"].get_local_rank())
    if not fsdp:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=mesh.get_group("dp"))
            gradient.div_(2)
    return loss, gradients, words


KINDS = {
    "tensor": tensor_parallel,
    "planned": planned,
    "dtensors": dtensors,
    "context": context_parallel,
    "data": data_parallel,
    "fsdp": fully_sharded,
    "both": both,
}
Case = tuple[str, str, str, dict[str, Any]]
"""Kind, model, recipe, options of the kind."""


def attempt(check: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a check gives, or its error."""
    try:
        return check(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
