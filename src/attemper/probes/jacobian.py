"""The Jacobian of a branch, whole: its singular values in float64, and κ without the directions that a norm loses."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from attemper.errors import ParameterError
from attemper.probes.float64 import in_float64
from attemper.probes.nulls import NullDirections, are_lost, null_directions, without

LIMITS = {"cpu": 4_096, "cuda": 25_000}
"""Most coordinates of which the whole Jacobian is decomposed: a minute or two each. On other devices, as on a CPU."""

HELD = 2**25
"""At most so many numbers of one intermediate result are held for a chunk of rows."""

LANCZOS_STEPS = 100


@dataclass(frozen=True)
class JacobianReport:
    """The singular values of a Jacobian in short."""

    condition: float | None
    """κ, largest over smallest; infinite where the smallest is 0 up to rounding. None: not known, above the limit."""
    largest: float
    """σ_max."""
    smallest: float | None
    """σ_min of those that count."""
    left_out: int
    """Directions of the input that a norm loses, and that do not count in κ."""
    coordinates: int
    """Of the input: tokens × channels."""
    whole: bool
    """Whether all singular values were computed; False: σ_max alone."""
    reason: str = ""
    """Why directions were left out, why κ is not known, or how many singular values are 0 up to rounding."""


@dataclass(frozen=True)
class Differentiable:
    """A computed tensor and where in its graph the input stands."""

    out: Tensor
    source: GradientEdge
    shape: torch.Size
    """Of the input."""

    @property
    def coordinates(self) -> int:
        return self.shape.numel()

    @property
    def larger_side(self) -> int:
        return max(self.out.numel(), self.coordinates)

    def pulled_back(self, direction: Tensor, *, batched: bool = False, create_graph: bool = False) -> Tensor | None:
        """uᵀJ, for one u of the output's shape or a batch of them; None: the output does not depend on the input."""
        (found,) = torch.autograd.grad(
            self.out,
            self.source,
            direction,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return found


def branch_jacobian(
    function: Callable[[Tensor], Any],
    x: Tensor,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    skip: bool = False,
    limit: int | None = None,
) -> JacobianReport:
    """The Jacobian ∂function/∂x at x: κ, largest and smallest singular value, in float64.

    All elements of x are coordinates, so x should be one sample. Weights of any type are used in float64 and stay as
    they are; a module runs in the mode that it is in.

    function: any differentiable function of a tensor; of a tuple that it returns, the first tensor counts.
    norm: the normalisation that the function sees x through. The directions that it loses (`null_directions`) are left
        out of κ.
    skip: look at x + function(x); then no direction is lost, and none is left out.
    limit: with more coordinates, of the input or of the output, only σ_max is computed; otherwise 4,096 on a CPU and
        25,000 on a GPU.

    >>> branch_jacobian(lambda x: x * torch.tensor([8.0, 4.0, 2.0]), torch.randn(1, 3)).condition
    4.0
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
        raise ParameterError(f"a Jacobian needs a tensor of floating-point numbers to differentiate by; got {_kind(x)}")
    limit = check_limit(limit, x.device)
    with torch.enable_grad(), in_float64(x.device):
        leaf, branch = differentiable(function, x)
        if not skip:
            null = None if norm is None else null_directions(norm, leaf)
            return report(branch, null=null, limit=limit)
        if branch.out.shape != leaf.shape:
            raise ParameterError(f"skip needs an output like the input {tuple(x.shape)}; got {tuple(branch.out.shape)}")
        return report(dataclasses.replace(branch, out=leaf + branch.out), null=None, limit=limit)


def differentiable(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Differentiable]:
    """A copy of x in float64, and what a function makes of it. Inside of `in_float64`, with gradients."""
    leaf = x.detach().double().requires_grad_()
    out = _tensor_of(function(leaf.clone()))  # the function may change its input in place
    return leaf, Differentiable(out, get_gradient_edge(leaf), leaf.shape)


def check_limit(limit: int | None, device: torch.device) -> int:
    """The limit that holds on a device."""
    if limit is None:
        return LIMITS.get(device.type, LIMITS["cpu"])
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ParameterError(f"limit is {limit!r}; it must be a number of coordinates, at least 1")
    return limit


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _tensor_of(out: Any) -> Tensor:
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else (out,)
    for part in parts:
        if isinstance(part, Tensor):
            return part
    raise ParameterError(f"a Jacobian needs a function that returns a tensor; this one returns {type(out).__name__}")


# --------------------------------------------------------------------------------------------------------- whole or not
def report(of: Differentiable, *, null: NullDirections | None, limit: int, identity: bool = False) -> JacobianReport:
    """What is known of a Jacobian. identity: look at J + 1, where a skip adds the input to the output."""
    if of.larger_side > limit:
        return _largest_alone(of, limit, identity)
    return from_matrix(matrix(of, identity), of.shape, null)


def from_matrix(jacobian: Tensor, shape: torch.Size, null: NullDirections | None) -> JacobianReport:
    """What a whole Jacobian (outputs, inputs) says. shape: of the input."""
    if null is not None and not are_lost(jacobian, null):
        raise ParameterError(f"norm does not fit: the function keeps what the norm loses ({' and '.join(null.names)})")
    left_out, reason = (0, "") if null is None else (null.count, str(null))
    sigma = singular_values(jacobian, shape, null)
    largest, smallest = float(sigma[0]), float(sigma[-1])
    zeros = int((sigma <= largest * rounding(jacobian)).sum())
    if zeros:
        said = f"{zeros} of {len(sigma)} singular values that count are 0 up to rounding"
        reason = f"{reason}; {said}" if reason else said
    condition = math.inf if zeros else largest / smallest
    return JacobianReport(condition, largest, smallest, left_out, jacobian.shape[1], True, reason)


def rounding(jacobian: Tensor) -> float:
    """The share of the largest singular value that one may have which is 0 but for rounding."""
    return torch.finfo(torch.float64).eps * max(jacobian.shape)


def _largest_alone(of: Differentiable, limit: int, identity: bool) -> JacobianReport:
    reason = f"κ is not known: {of.larger_side:,} coordinates, and the limit is {limit:,}"
    return JacobianReport(None, largest_singular_value(of, identity), None, 0, of.coordinates, False, reason)


def matrix(of: Differentiable, identity: bool = False) -> Tensor:
    """The Jacobian (outputs, inputs), some rows at a time."""
    outputs, inputs = of.out.numel(), of.coordinates
    jacobian = torch.empty(outputs, inputs, dtype=torch.float64, device=of.out.device)
    step = max(1, min(256, HELD // (16 * max(outputs, inputs))))
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        rows = torch.zeros(stop - start, outputs, dtype=of.out.dtype, device=of.out.device)
        rows[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
        found = of.pulled_back(rows.view(-1, *of.out.shape), batched=True)
        jacobian[start:stop] = 0.0 if found is None else found.reshape(stop - start, inputs)
    if identity:
        jacobian.diagonal().add_(1.0)
    return jacobian


def singular_values(jacobian: Tensor, shape: torch.Size, null: NullDirections | None = None) -> Tensor:
    """All singular values, largest first, without the directions that a norm loses.

    A branch that does not mix tokens, as an MLP, or channels, as a depthwise convolution, has a Jacobian of one small
    block for each of them. The blocks then are decomposed one by one: the values are the same.
    """
    for groups in [null.groups] if null is not None else _groupings(shape, jacobian.device):
        columns = jacobian[:, groups.flatten()] if null is None else without(jacobian, null)
        blocks = _diagonal_blocks(columns, groups)
        if blocks is not None:
            jacobian = blocks
            break
        jacobian = jacobian if null is None else columns
    values: Tensor = torch.linalg.svdvals(jacobian).flatten().sort(descending=True).values
    return values


def _groupings(shape: torch.Size, device: torch.device) -> Iterator[Tensor]:
    """(G, c) coordinates that may be mixed with each other alone: tokens, places of a map, channels of a map."""
    places = torch.arange(shape.numel(), device=device).view(shape)
    if len(shape) > 1:
        yield places.flatten(0, -2)
    if len(shape) == 4:
        yield places.movedim(1, -1).flatten(0, -2)
        yield places.flatten(0, 1).flatten(1)


def _diagonal_blocks(columns: Tensor, groups: Tensor) -> Tensor | None:
    """(G, c, c′) the blocks of a Jacobian that is zero everywhere else; None where it is not."""
    size, width = groups.shape
    if columns.shape[0] != groups.numel() or columns.shape[1] % size:
        return None
    blocks = columns[groups.flatten()].view(size, width, size, -1).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return blocks if int(blocks.count_nonzero()) == int(columns.count_nonzero()) else None


# ------------------------------------------------------------------------------------------------- σ_max without matrix
def largest_singular_value(of: Differentiable, identity: bool = False, tolerance: float = 1e-10) -> float:
    """σ_max by power iteration with products Jv and uᵀJ, all of whose vectors are kept (Golub–Kahan–Lanczos).

    Jv comes from differentiating uᵀJ, which is linear in u, by u.
    """
    dummy = torch.zeros_like(of.out, requires_grad=True)
    pulled = of.pulled_back(dummy, create_graph=True)
    if pulled is None:
        return float(identity)

    def push(v: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(pulled, dummy, v.view(of.shape), retain_graph=True, materialize_grads=True)
        return found.flatten() + v if identity else found.flatten()

    def pull(u: Tensor) -> Tensor:
        found = of.pulled_back(u.view(of.out.shape))
        assert found is not None
        return found.flatten() + u if identity else found.flatten()

    start = torch.randn(of.coordinates, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return _bidiagonalised(push, pull, start.to(of.out.device), tolerance)


def _bidiagonalised(
    push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor], start: Tensor, tolerance: float
) -> float:
    """The largest singular value of the bidiagonal matrix that grows with every product."""
    right: list[Tensor] = [start / start.norm()]
    left: list[Tensor] = []
    alphas: list[float] = []
    betas: list[float] = []
    largest = 0.0
    for _ in range(min(LANCZOS_STEPS, len(start))):
        u = _orthogonal(push(right[-1]), left)
        alphas.append(float(u.norm()))
        before, largest = largest, float(torch.linalg.svdvals(_bidiagonal(alphas, betas))[0])
        if alphas[-1] <= tolerance * largest or largest - before <= tolerance * largest:
            break
        left.append(u / alphas[-1])
        v = _orthogonal(pull(left[-1]), right)
        betas.append(float(v.norm()))
        if betas[-1] <= tolerance * largest:
            break
        right.append(v / betas[-1])
    return largest


def _bidiagonal(diagonal: list[float], above: list[float]) -> Tensor:
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    small.diagonal(1).copy_(torch.tensor(above, dtype=torch.float64))
    return small


def _orthogonal(x: Tensor, others: list[Tensor]) -> Tensor:
    """x without what others have of it; twice, since once leaves rounding."""
    for _ in range(2 if others else 0):
        basis = torch.stack(others)
        x = x - basis.T @ (basis @ x)
    return x
