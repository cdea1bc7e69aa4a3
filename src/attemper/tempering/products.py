"""Products of two tensors, however they are written: which axes they share, and which of them the result has."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MATMUL = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm,
)  # fmt: skip
ADDED = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
PRODUCTS = (*MATMUL, *ADDED, torch.einsum)


@dataclass(frozen=True)
class Product:
    """left · right, with a letter for every axis, as in an einsum: equal letters are the same axis."""

    left: Tensor
    right: Tensor
    of_left: str
    of_right: str
    of_out: str
    again: Callable[[Tensor, Tensor], Tensor]
    """The same product of other operands."""

    @property
    def summed(self) -> str:
        """The axes that are summed over."""
        return "".join(letter for letter in self.of_left if letter in self.of_right and letter not in self.of_out)

    def own(self, letters: str) -> str:
        """The axes of the result that only one operand has; letters: those of that operand."""
        other = self.of_right if letters == self.of_left else self.of_left
        return "".join(letter for letter in letters if letter in self.of_out and letter not in other)


def read_product(func: Any, args: Any, kwargs: Any) -> Product | None:
    """What a call multiplies; None: it is no product of two tensors with at least two axes each."""
    if func is torch.einsum:
        return _einsum(func, args)
    if func in ADDED:
        added, left, right = args[:3]
        product = _matmul(left, right, lambda a, b: func(added, a, b, **kwargs))
    elif func in MATMUL:
        left, right = args[:2]
        product = _matmul(left, right, func)
    else:
        return None
    return product


def _matmul(left: Any, right: Any, again: Any) -> Product | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.dim() < 2 or right.dim() < 2:
        return None
    outer = max(left.dim(), right.dim()) - 2
    letters = string.ascii_lowercase[:outer]
    row, summed, column = "xyz"
    return Product(
        left,
        right,
        letters[outer - left.dim() + 2 :] + row + summed,
        letters[outer - right.dim() + 2 :] + summed + column,
        letters + row + column,
        again,
    )


def _einsum(func: Any, args: Any) -> Product | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(t, Tensor) for t in operands):
        return None
    left, right = operands
    letters = _letters(equation, [left.dim(), right.dim()])
    if letters is None or min(left.dim(), right.dim()) < 2:
        return None
    return Product(left, right, *letters, lambda a, b: func(equation, a, b))


def _letters(equation: str, dims: Sequence[int]) -> tuple[str, str, str] | None:
    """An equation with ellipses written out, and with its result where it leaves it open; None: not of this kind.

    >>> _letters("b ... i d, b ... j d -> b ... i j", (4, 4))
    ('b0id', 'b0jd', 'b0ij')
    >>> _letters("bij,bjd", (3, 3))
    ('bij', 'bjd', 'di')
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    named = inputs.split(",")
    if len(named) != 2:
        return None
    hidden = [dim - len(term.replace("...", "")) for term, dim in zip(named, dims, strict=True)]
    digits = string.digits[: max(hidden)]
    terms = [term.replace("...", digits[len(digits) - n :] if n else "") for term, n in zip(named, hidden, strict=True)]
    if not arrow:
        once = sorted(letter for letter in set("".join(named)) - {"."} if inputs.count(letter) == 1)
        out = "..." + "".join(once)
    out = out.replace("...", digits)
    if any(len(set(term)) != len(term) for term in (*terms, out)):  # a diagonal
        return None
    if [len(term) for term in terms] != list(dims):
        return None
    return terms[0], terms[1], out
