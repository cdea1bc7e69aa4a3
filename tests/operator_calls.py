"""Every operator of ours in the calls that models make of it, and what `torch.library.opcheck` says to each.

The calls are not written down here: models are trained for a step, and a dispatch mode keeps what the operators were
given, once for every combination of layouts and options. So an operator that nothing here calls is found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper.methods import DropKey
from attemper.ops.softmax import softmax_with
from attemper.ops.stream import Source
from repeats import Attention

NAMESPACE = "attemper"
NOT_HERE = {"fa4_attention", "fa4_attention_backward", "fa4_restated", "fa4_words", "mixed_attention"}
"""Those of FlashAttention-4, which `test_fa4.py` checks."""
DECIDING = {"attention_with_squares", "packed_or_fused_attention"}
"""Those that are made of others, which is what a dispatch mode sees."""
RECIPES = {
    "dropkey(0.3)": "triton",
    "dropkey(0.3, share=heads)": "gather",
    "dropkey(0.3, structure=block, w=3, grid=[3, 3])": "triton",
    "dropkey(0.3, structure=cross, w=1, grid=[3, 3])": "triton",
    "dropattention(0.3)": "triton",
    "hardmask(0.4, k=2)": "triton",
    "hardmask(0.4, k=2) + dropkey(0.2)": "triton",
    "blur(1.0)": "triton",
    "explicit(v=0.3)": "triton",
    "explicit(q=0.1, k=0.2, v=0.3, av=0.1)": "triton",
    "explicit(v=0.3, q=0.1) + dropkey(0.3)": "triton",
}
"""Recipes with the implementation that serves them."""
FEW = (
    ("dropkey(0.3)", "apart"),
    ("dropkey(0.3)", "biased"),
    ("hardmask(0.4, k=2)", "packed"),
    ("dropkey(0.3, share=heads)", "apart"),
    ("dropkey(0.3, structure=cross, w=1, grid=[3, 3])", "packed"),
    ("blur(1.0)", "packed"),
    ("explicit(q=0.1, k=0.2, v=0.3, av=0.1)", "packed"),
    ("explicit(q=0.1, k=0.2, v=0.3, av=0.1)", "apart"),
)
"""Recipes and kinds of attention in which every operator is called."""
KEPT: list[attemper.Tempered] = []
"""Models whose keys are in calls that were kept."""
KINDS = ("packed", "apart", "causal", "padded", "biased")


@dataclass
class Calls(TorchDispatchMode):
    """The calls of our operators, as they came."""

    found: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = (func, *(described(each) for each in (*args, *kwargs.values())))
        if key not in self.found:
            self.found[key] = (func, copied(args), {name: copied(value) for name, value in kwargs.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            self.keep(func, args, kwargs)
        return func(*args, **kwargs)

    def deciding(self, name: str) -> Any:
        """An operator of `DECIDING` that is kept as well."""
        operator = getattr(torch.ops.attemper, name).default

        def called(*args: Any) -> Any:
            self.keep(operator, args, {})
            return operator(*args)

        return called

    @property
    def names(self) -> set[str]:
        return {name_of(func) for func, _, _ in self.found.values()}


def name_of(func: Any) -> str:
    name: str = func.name().split("::")[1]
    return name.split(".")[0]


def described(value: Any) -> Any:
    """What tells a call from others: which tensors there are and how they lie, which options are on."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim, value.is_contiguous()
    return type(value), value if isinstance(value, bool | str) or value is None else None


def copied(value: Any) -> Any:
    """Arguments that outlive the step: views stay views of the same layout."""
    if isinstance(value, Tensor):
        size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        held = value.detach().as_strided((size,), (1,), value.storage_offset()).clone()
        return held.as_strided(value.shape, value.stride(), 0)
    if isinstance(value, tuple | list):
        return type(value)(copied(each) for each in value)
    return value


class Masked(Attention):
    """Attention under a mask, where its kind asks for one."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("packed", "apart", "causal"):
            return super().forward(x)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))

    def mask(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        if self.kind == "padded":
            return (torch.arange(tokens, device=x.device) < tokens - 2).view(1, 1, 1, tokens)
        if not hasattr(self, "bias"):
            self.bias = nn.Parameter(torch.randn(1, 2, tokens, tokens, device=x.device, dtype=x.dtype))
        return self.bias


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), Masked(16, kind))])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def step(recipe: str, kind: str, device: str) -> None:
    """One training step of a small model, with the kernels."""
    torch.manual_seed(0)
    model = Net(kind).to(device).train()
    tempered = attemper.apply(model, recipe, impl=RECIPES[recipe])
    x = torch.randn(2, 9, 16, device=device, requires_grad=True)
    tempered.loss(lambda: model(x), lambda out: out.square().mean()).backward()


def direct(device: str) -> None:
    """Calls that no model of these makes: packed documents, log-sum-exps, a softmax with its methods."""
    q, k, v = (torch.randn(1, 2, 9, 8, device=device, requires_grad=True) for _ in range(3))
    methods = [DropKey(0.3)]
    lengths = torch.tensor([0, 4, 9], device=device, dtype=torch.int32)
    attemper.attention(q, k, v, methods=methods, cu_seqlens=lengths, impl="triton").sum().backward()
    out, lse = attemper.attention(q, k, v, methods=methods, return_lse=True, impl="triton")
    (out.sum() + lse.sum()).backward()
    logits = torch.randn(2, 2, 9, 9, device=device, requires_grad=True)
    softmax_with(
        logits, methods, Source(torch.tensor(11, device=device), 7), torch.float32, False
    ).square().sum().backward()


def in_a_pass(device: str) -> None:
    """What compiled code asks for the seed of its pass."""
    model = Net("packed").to(device).train()
    tempered = attemper.apply(model, "dropkey(0.3)")
    torch.ops.attemper.pass_seed(torch.randn(2, device=device), tempered.control.key, torch.tensor(5))
    KEPT.append(tempered)


def recorded(device: str, steps: Sequence[tuple[str, str]]) -> Calls:
    """The calls of all of these, among which every operator must be. steps: recipes and kinds of attention."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch, calls:
        for name in DECIDING:
            patch.setitem(vars(torch.ops.attemper), name, calls.deciding(name))
        for recipe, kind in steps:
            step(recipe, kind, device)
        direct(device)
        in_a_pass(device)
    missed = operators() - NOT_HERE - calls.names
    assert not missed, missed
    return calls


def steps_of(*kinds: str) -> list[tuple[str, str]]:
    """Every recipe in these kinds of attention, but what is refused, and what other operators need beside them."""
    steps = [(recipe, kind) for kind in kinds for recipe in RECIPES if (RECIPES[recipe], kind) != ("gather", "causal")]
    return [*steps, *(each for each in FEW if each not in steps)]


def operators() -> set[str]:
    """Every operator of ours that there is."""
    prefix = f"{NAMESPACE}::"
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What opcheck finds: schema, shapes without memory, tracing with symbolic sizes, registration of gradients.

    Gradients cannot be differentiated again, and operators that draw give other numbers each time.
    """
    name = name_of(func)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    tests = ["test_schema", "test_faketensor", *([] if draws else ["test_aot_dispatch_dynamic"])]
    if name in DECIDING or (has_gradient(func) and not name.endswith("_backward")):
        tests.append("test_autograd_registration")
        args = tuple(differentiable(each) for each in args)
    found = torch.library.opcheck(func, args, kwargs, test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS"), name


def has_gradient(func: Any) -> bool:
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def differentiable(value: Any) -> Any:
    return value.requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_first(calls: Calls) -> int:
    """Check one call of every operator; how many those are."""
    first = {func: (args, kwargs) for func, args, kwargs in reversed(calls.found.values())}
    for func, given in first.items():
        check(func, *given)
    return len(first)
