"""Forward functions that run in a straight line, rewritten so that somebody else makes their sums.

A mode that follows every function of a block costs more than many of the functions. Where the code of a block has no
branches and no loops, each `+` in it does in every pass what it did in the one that was checked. So it is enough to be
called in the place of these. A function is rewritten only if its source is what it was compiled from.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from attemper.tempering.branches import Branch
from attemper.tempering.residual import Add, Sum

__all__ = ["OwnSum", "OwnSums", "Reading", "Straight", "definition_of", "straight"]

ADD = "_attemper_add"
"""The argument by which a rewritten function is told what to call."""
NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.Call,
    ast.keyword, ast.Starred, ast.Attribute, ast.Subscript, ast.Slice, ast.Name, ast.Tuple, ast.List, ast.Constant,
    ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
"""What code may consist of that does the same in every pass, but for what it calls."""
LIBRARIES = ("torch", "timm", "transformers", "torchvision")
"""Whose modules take nobody by surprise: none adds to the residual stream in one pass, and not in another."""


# ----------------------------------------------------------------------------------------------------- sums of a module
class OwnSum(NamedTuple):
    """A residual sum as it was: see `Sum`."""

    at: int
    ended: tuple[Branch, ...]
    parallel: bool


class OwnSums:
    """The residual sums of a module whose own code makes all of them, by their numbers in it."""

    def __init__(
        self, code: Straight | None = None, sums: dict[int, OwnSum] | None = None, module: nn.Module | None = None
    ) -> None:
        self.code, self.sums = code, sums or {}
        inside = [] if module is None else list(module.modules())
        self.parts = [(each._modules, list(each._modules.values())) for each in inside if each._modules]
        self.hooks = [hooks for each in inside[1:] for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self.attributes = [each.__dict__ for each in inside]

    def __reduce__(self) -> Any:  # a copy of the module has other parts
        return OwnSums, ()

    def reads(self, forward: Any) -> bool:
        """Whether a bound function is the code that was read."""
        return self.code is not None and getattr(forward, "__func__", None) is self.code.original

    @property
    def holds(self) -> bool:
        """Whether the module still has the parts that were seen, and nobody changes what these do, by a hook, say."""
        if any(self.hooks) or _global_forward_hooks or _global_forward_pre_hooks:
            return False
        if any("forward" in attributes for attributes in self.attributes):
            return False
        return all(list(parts.values()) == seen for parts, seen in self.parts)

    def run(self, add: Callable[[OwnSum, Any, Any], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module. add: makes its residual sums."""
        sums = self.sums

        def made(a: Any, b: Any, number: int) -> Any:
            known = sums.get(number)
            return a + b if known is None else add(known, a, b)

        return cast(Straight, self.code).call(made, module, args, kwargs)


class Reading:
    """Notes which sums of a module's own code are residual ones, while somebody follows all that it does."""

    def __init__(self, code: Straight, module: nn.Module) -> None:
        self.code, self.module = code, module
        self.sums: dict[int, OwnSum] = {}
        self.now: int | None = None
        """The number of the sum that is made."""
        self.elsewhere = False
        """Whether a residual sum was made by other code."""

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module, by its own code."""
        return self.code.call(self.make, self.module, args, kwargs)

    def make(self, a: Any, b: Any, number: int) -> Any:
        self.now = number
        try:
            return a + b
        finally:
            self.now = None

    def noting(self, add: Add) -> Add:
        """What makes residual sums, which are noted."""

        def noted(added: Sum) -> Any:
            if self.now is None:
                self.elsewhere = True
            else:
                self.sums[self.now] = OwnSum(added.at, added.ended, added.parallel)
            return add(added)

        return noted

    def found(self, many: int) -> OwnSums | None:
        """What is known now of the module, which made so many residual sums; None: others may do other things."""
        if self.elsewhere or len(self.sums) != many or not all(map(_is_foreseeable, self.module.modules())):
            return None
        found = OwnSums(self.code, self.sums, self.module)
        return found if found.holds else None


def _is_foreseeable(module: nn.Module) -> bool:
    """Whether a module does the same in all passes, as far as it matters where branches are added."""
    kind = type(module).__dict__.get("_attemper_original", type(module))
    return kind.__module__.partition(".")[0] in LIBRARIES or _is_straight(kind.forward)


# ------------------------------------------------------------------------------------------------------------ functions


class Straight(NamedTuple):
    """A function whose sums are made by what it is told: see `call`."""

    original: FunctionType
    rewritten: FunctionType
    sums: int
    """How many `+` it has, numbered as they are reached."""

    def call(self, add: Callable[[Any, Any, int], Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Call it. add: called with both terms of a sum and its number, gives the sum."""
        return self.rewritten(module, *args, **kwargs, **{ADD: add})


def straight(forward: Any) -> Straight | None:
    """A bound forward function, rewritten; None: its code is not known, or does not run in a straight line."""
    function = getattr(forward, "__func__", None)
    return _rewritten(function) if type(function) is FunctionType else None


@functools.lru_cache(maxsize=256)
def _rewritten(function: FunctionType) -> Straight | None:
    defined, adder = definition_of(function), _Adder()
    if defined is None or not _is_straight(function):
        return None
    defined.body = [adder.visit(statement) for statement in defined.body]
    defined.args.kwonlyargs.append(ast.arg(ADD))
    defined.args.kw_defaults.append(None)
    code = _compiled(ast.fix_missing_locations(defined), function)
    if code is None or adder.count == 0:
        return None
    rewritten = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    rewritten.__kwdefaults__ = function.__kwdefaults__
    return Straight(function, rewritten, adder.count)


@functools.lru_cache(maxsize=256)
def _is_straight(function: Any) -> bool:
    """Whether a function runs in a straight line."""
    defined = definition_of(function) if type(function) is FunctionType else None
    return defined is not None and all(map(_runs_straight, _parts(defined)))


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function, if that is what it was compiled from, and nothing else is known of it."""
    if function.__closure__ is not None or hasattr(function, "__wrapped__"):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        indented = lines[0][:1].isspace()  # and is left so, as its strings are
        tree = ast.parse("".join([f"if {indented}:\n" if indented else "", *lines]))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    ast.increment_lineno(tree, first - 1 - indented)
    defined = cast(ast.If, tree.body[0]).body[0] if indented else tree.body[0]
    if not isinstance(defined, ast.FunctionDef) or defined.decorator_list:
        return None
    code = _compiled(defined, function)
    return defined if code is not None and _alike(code, function.__code__) else None


def _parts(defined: ast.FunctionDef) -> list[ast.AST]:
    """All nodes of the statements of a function."""
    return [node for statement in defined.body for node in ast.walk(statement)]


def _runs_straight(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef) or not isinstance(node, NODES):
        return False
    return not (isinstance(node, ast.Name) and node.id == ADD)


def _compiled(defined: ast.FunctionDef, function: FunctionType) -> CodeType | None:
    """The code of a function. Names that a module imports are compiled otherwise than others."""
    names = [name for name in function.__code__.co_names if isinstance(function.__globals__.get(name), ModuleType)]
    imports = [ast.fix_missing_locations(ast.Import([ast.alias(name)])) for name in names]
    module = ast.Module([*imports, defined], [])
    whole = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    found = [each for each in whole.co_consts if isinstance(each, CodeType) and each.co_name == function.__name__]
    return found[0] if len(found) == 1 else None


def _alike(one: CodeType, other: CodeType) -> bool:
    """Whether two functions do the same, wherever they stand."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in (
            "co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount",
            "co_kwonlyargcount", "co_posonlyargcount", "co_exceptiontable",
        )
    )  # fmt: skip


class _Adder(ast.NodeTransformer):
    """Puts a call in the place of every `+`."""

    def __init__(self) -> None:
        self.count = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add):
            return node
        self.count += 1
        called = ast.Call(ast.Name(ADD, ast.Load()), [node.left, node.right, ast.Constant(self.count - 1)], [])
        return ast.copy_location(called, node)
