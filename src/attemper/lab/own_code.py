"""Functions of somebody's own: found by 'module:function', and hashed with all of their source that can be followed."""

import contextlib
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attemper.errors import ParameterError, first_line, suggestion

DIGITS = 20
"""Of a hash."""
GIVEN = "given"
"""The module of what a Python program has handed over, and that nobody can import."""
_handed_over: dict[str, Any] = {}


def hand_over(thing: Any, name: str) -> str:
    """The text by which a function or an object of a running program is found, in this process alone.

    A function that can be imported keeps the name by which every process finds it.
    """
    module, qualified = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if callable(thing) and module not in (None, "__main__") and "<" not in qualified:
        try:
            if _attribute(importlib.import_module(str(module)), qualified) is thing:
                return f"{module}:{qualified}"
        except (ImportError, AttributeError):
            pass
    _handed_over[name] = thing
    return f"{GIVEN}:{name}"


def find_own(name: str, what: str) -> Any:
    """What 'module:function' names; modules are looked for in the current directory, too.

    what: such as "model", for messages.
    """
    module, _, path = name.partition(":")
    if module == GIVEN:
        if path not in _handed_over:
            raise ParameterError(
                f"The {what} '{name}' was handed over by a Python program and is known in that program alone. Run it "
                "again there, or write the function into a module of its own."
            )
        return _handed_over[path]
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise ParameterError(
                f"The module of the {what} '{name}' needs '{error.name}', which is not there."
            ) from error
        raise ParameterError(
            f"There is no module '{error.name}' for the {what} '{name}', neither installed nor in '{here}'."
        ) from None
    except Exception as error:  # whatever somebody's own module does
        raise ParameterError(
            f"The module of the {what} '{name}' cannot be imported: {type(error).__name__}: {first_line(error)}."
        ) from error
    try:
        return _attribute(loaded, path)
    except AttributeError:
        known = [each for each, value in vars(loaded).items() if callable(value)]
        raise ParameterError(f"'{module}' has no '{path}'.{suggestion(path, known)}") from None


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def call_own(
    function: Callable[..., Any], name: str, what: str, offered: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Call a function with its options and with whatever it has a parameter for of what is offered."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option in options:
        if option not in parameters and not takes_all:
            raise ParameterError(
                f"'{name}' has no option '{option}'.{suggestion(option, parameters)} "
                f"Options: {', '.join(parameters) or 'none'}."
            )
    given = {key: value for key, value in offered.items() if key in parameters} | options
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ParameterError(
            f"The {what} '{name}' cannot be called: {error}. Options need defaults, or values in brackets; "
            f"{', '.join(offered) or 'nothing'} would be given to a parameter of that name."
        ) from None
    except ValueError:
        pass
    try:
        return function(**given)
    except Exception as error:  # whatever somebody's own function does
        place = _place_of(error)
        raise ParameterError(
            f"The {what} '{name}' failed{place}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _place_of(error: BaseException) -> str:
    """Where in somebody's own file an error came from."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_own_file(file) and file != __file__:
            found = f" at {Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


# --------------------------------------------------------------------------------------------------------------- hashes
def hash_of_code(thing: Any) -> str:
    """A hash of a function or class: of its source, all of one's own that it names, and values that it has closed over.

    What is installed counts by its name alone. So an edit of a file that a model is made of gives another hash, and an
    edit of something that it does not use gives the same.
    """
    digest = hashlib.sha256()
    for part in _Walk().parts(thing):
        digest.update(f"{len(part)}:".encode())
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


class _Walk:
    """One walk over code and values, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # held, so that no other object gets the same id

    def parts(self, thing: Any) -> Iterator[bytes]:
        if isinstance(thing, str | int | float | bool | bytes | complex | None):
            yield repr(thing).encode()
            return
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, partial):
            for each in (thing.func, thing.args, thing.keywords):
                yield from self.parts(each)
        elif isinstance(thing, types.MethodType):
            yield from self.parts(thing.__func__)
            yield from self.parts(thing.__self__)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, types.ModuleType):
            yield from self._module(thing)
        elif isinstance(thing, dict):
            for key, value in thing.items():
                yield from self.parts(key)
                yield from self.parts(value)
        elif isinstance(thing, list | tuple | set | frozenset):
            for each in sorted(thing, key=repr) if isinstance(thing, set | frozenset) else thing:
                yield from self.parts(each)
        else:
            yield from self._object(thing)

    def _function(self, function: types.FunctionType) -> Iterator[bytes]:
        if not _is_own(function):
            yield f"{function.__module__}.{function.__qualname__}".encode()
            return
        yield _source(function)
        yield from self.parts(function.__defaults__)
        yield from self.parts(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield from self.parts(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        for name in _names(function.__code__):
            if name in function.__globals__:
                yield name.encode()
                yield from self.parts(function.__globals__[name])

    def _class(self, kind: type) -> Iterator[bytes]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if not _is_own(kind):
            return
        yield _source(kind)
        yield from self.parts(kind.__bases__)
        for value in vars(kind).values():
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            inner = inner.fget if isinstance(inner, property) else inner
            if isinstance(inner, types.FunctionType | type):
                yield from self.parts(inner)

    def _module(self, module: types.ModuleType) -> Iterator[bytes]:
        yield module.__name__.encode()
        file = getattr(module, "__file__", None)
        if file is None or not _is_own_file(file):
            return
        yield Path(file).read_bytes()
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType | types.FunctionType | type):
                yield from self.parts(value)

    def _object(self, thing: Any) -> Iterator[bytes]:
        yield from self.parts(type(thing))
        if hasattr(thing, "state_dict"):
            for name, value in thing.state_dict().items():
                yield name.encode()
                yield from self.parts(value)
        elif hasattr(thing, "numpy") and hasattr(thing, "detach"):
            import torch

            whole = thing.detach().cpu().contiguous().flatten()
            yield f"{thing.dtype} {tuple(thing.shape)}".encode()
            yield whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        elif hasattr(thing, "tobytes") and hasattr(thing, "dtype"):
            yield f"{thing.dtype} {thing.shape}".encode()
            yield thing.tobytes()
        elif _is_own(type(thing)):
            yield from self.parts(getattr(thing, "__dict__", None))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_own(thing: Any) -> bool:
    if thing.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(thing.__module__ or ""), "__file__", None)
    return (file is None and thing.__module__ not in sys.builtin_module_names) or (
        file is not None and _is_own_file(file)
    )


INSTALLED = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).resolve().parents[1])}
)
"""Where packages, Python's own modules and Attemper lie."""


def _is_own_file(file: str) -> bool:
    where = str(Path(file).resolve())
    return not where.startswith(INSTALLED) and "site-packages" not in where and not where.startswith("<frozen")


def _source(thing: Any) -> bytes:
    """Source where there is any; of what was typed into a console, what Python has made of it."""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return _compiled(code) if code is not None else b""


def _compiled(code: types.CodeType) -> bytes:
    parts: list[Any] = [code.co_code, code.co_names, code.co_varnames]
    parts += [_compiled(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return repr(parts).encode()
