"""Where the randomness of a training pass comes from: one seed for the whole pass, drawn before anything else.

Every site takes its stream from that seed, its own name and how often it drew in this pass before. Nothing draws inside
of blocks. A block that is computed again in backward finds its pass, and its place in it, where `ops/regions.py` keeps
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from attemper.errors import UnsupportedError
from attemper.ops.regions import inside_backward, may_repeat, note_of, noted, regions
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import NOWHERE, Offsets, Site, Source, Stream, seed_of_call
from attemper.ops.tracing import constant
from attemper.tempering.mesh import ALONE, Position
from attemper.tempering.standing import CONTROLS, Place, offsets, position_of_pass, standing

if TYPE_CHECKING:
    from attemper.tempering.penalties import Control


class Note(NamedTuple):
    """What a call drew for.

    shape: (B, H, Nq, Nk) of an attention call, or that of the tensor that was mapped. method: its name, where the site
    may have several. own: what acted in an attention call beside the methods: the model's own dropout. maps: what told
    the grid of its keys.
    """

    shape: tuple[int, ...]
    at: Offsets
    method: str = ""
    own: tuple[Any, ...] = ()
    maps: Any = None


class Draws:
    """What the sites of one pass draw from.

    seed: of the pass; calls: site → how often it drew; traced: whether a compiler traced the model from its root on.
    position: where this process stands among those that share the batch.
    """

    def __init__(
        self, seed: Tensor, calls: dict[int, int], traced: bool, task: int = -1, position: Position = ALONE
    ) -> None:
        self.seed, self.calls, self.traced, self.task = seed, calls, traced, task
        self.position = position
        self.host_seed: Tensor | None = None
        """The seed on the CPU, once somebody needed it there."""
        self.notes: dict[tuple[int, int], Note] = {}
        """Site and number of the call → what is needed to draw the same again; compiled code leaves nothing here."""

    def number(self, site: int) -> int:
        """How often a site drew before; counts this time."""
        before = self.calls.get(site, 0)
        self.calls[site] = before + 1
        return before

    def copy(self) -> Draws:
        """The same at this point."""
        return Draws(self.seed, dict(self.calls), self.traced, self.task, self.position)


def run_drawing(control: Control, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run the whole model in a pass of its own, with a seed of its own."""
    ledger = control.ledger
    if ledger.draws is not None or is_mapped():  # a model that runs itself is in one pass
        return forward(*args, **kwargs)
    ledger.draws = begin(control, module, args, kwargs)
    try:
        return forward(*args, **kwargs)
    finally:
        ledger.draws = None


def begin(control: Control, module: nn.Module, args: Any, kwargs: Any) -> Draws:
    """Draw the seed of a pass."""
    compiling = torch.compiler.is_compiling()
    task = -1
    if not compiling:
        task = torch._C._current_graph_task_id()
        if task != -1 and not _drew_before():
            refuse()
    where = like(module, args, kwargs)
    position = position_of_pass(control, module, where)
    seed = position.agree(draw_seed(where))
    draws = Draws(seed, {}, compiling, task, position)
    if compiling:
        control.ledger.last_seed = seed
    elif not (control.trial or control.looking):
        control.ledger.last_seed, control.ledger.last_notes = seed, draws.notes
    if control.traced and not compiling:
        control.ledger.hold(seed)
    return draws


def like(module: nn.Module, args: Any, kwargs: Any) -> Tensor | torch.device:
    """A tensor on the device of a model, or that device."""
    weight = next(module.parameters(), None)
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_nested), None)
    if given is not None and (weight is None or weight.device == given.device):
        return given
    return torch.device("cpu") if weight is None else weight.device


def is_mapped() -> bool:
    """Whether torch.func maps a function over the model: every site then draws by itself, by vmap's rules."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def source(control: Control, site: Site, x: Tensor, rows: int = 0, place: Place | None = None) -> Source:
    """Where the streams of one call of a site start.

    x: a tensor on the device where it draws. A site that is reached without the whole
    model round it draws a seed by itself. rows: how many samples, or windows of them, the call has; 0: it is not about
    samples. place: where it stands among all heads, tokens and channels.
    """
    if torch.compiler.is_compiling():
        draws = control.ledger.draws
        position = standing(control) if draws is None else draws.position
        return traced_source(control, site, x, offsets(control, position, rows, place), position)
    return eager_source(control, site.word, x, rows, place)


def ordinary_source(control: Control, site: int, x: Tensor) -> Source | None:
    """`source` in an ordinary training step: in a pass of a process that stands alone, and nothing is computed again.

    None: it is no such step, and nothing was counted. It asks as little as can be asked, since every site does so.
    """
    draws: Draws | None = control.ledger.draws
    if draws is None or torch.compiler.is_compiling() or draws.position is not ALONE or control.samples is not None:
        return None
    seed = draws.seed
    if may_repeat() or torch._C._are_functorch_transforms_active() or seed.device != x.device:
        return None
    return Source(seed, site, draws.number(site))


def draw_again(control: Control, site: int, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int, int] | None:
    """The seed, the site and the number of a call about a tensor x, noted with a shape.

    Only in an ordinary step (`regions.is_ordinary`). None: a process does not stand alone, and nothing was counted.
    """
    draws: Draws | None = control.ledgers.own.draws
    if draws is None or draws.position is not ALONE or control.samples is not None or draws.seed.device != x.device:
        return None
    call = draws.calls.get(site, 0)
    draws.calls[site] = call + 1
    draws.notes[site, call] = Note(shape, NOWHERE)
    return draws.seed, site, call


def eager_source(control: Control, site: int, x: Tensor, rows: int = 0, place: Place | None = None) -> Source:
    """`source` where nothing is traced. site: its word."""
    draws = None if is_mapped() else current(control)
    if draws is None:
        position = standing(control)
        return Source(position.agree(draw_seed(x)), site, 0, offsets(control, position, rows, place))
    at = offsets(control, draws.position, rows, place, counted=len(draws.calls) > 0)
    return Source(on_device(draws.seed, x), site, draws.number(site), at)


def note(control: Control, drawn: Source | Stream, shape: Sequence[int], **more: Any) -> None:
    """Write down what a call of a site draws for."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return
    draws: Draws | None = control.ledger.draws
    if draws is not None:
        draws.notes[drawn.site, drawn.call] = Note(tuple(shape), drawn.at, **more)


def on_device(seed: Tensor, x: Tensor) -> Tensor:
    """A seed where x is."""
    return seed if seed.device == x.device else seed.to(x.device)


def current(control: Control) -> Draws | None:
    """The pass that a site belongs to; None: none is open."""
    open_: Draws | None = control.ledger.draws
    if not may_repeat():
        return open_
    enclosing = regions()
    if inside_backward() and (open_ is None or open_.task != torch._C._current_graph_task_id()):
        again = enclosing.pop() if enclosing and enclosing[-1].again else None
        kept = None if again is None else _replayed(again.holder, control)
        if kept is None:
            refuse()
        open_ = kept.draws
    for region in enclosing:
        note = noted(region.holder)
        if _find(note.passes, control) is None:
            note.passes.append((weakref.ref(control), _Kept(open_)))
    return open_


def calls_so_far(control: Control) -> dict[int, int]:
    """Site → how often it drew in the pass that runs now."""
    draws = current(control)
    return {} if draws is None else dict(draws.calls)


def take_back(control: Control, calls: dict[int, int]) -> None:
    """Forget what was drawn since `calls_so_far`: the same modules are about to run once more in the same pass."""
    draws = current(control)
    if draws is not None:
        draws.calls = dict(calls)


class _Kept:
    """A pass as it was when a region began; None: there was none."""

    def __init__(self, draws: Draws | None) -> None:
        self.draws = None if draws is None else draws.copy()


def _find(passes: list[tuple[Any, _Kept]], control: Control) -> _Kept | None:
    return next((kept for owner, kept in passes if owner() is control), None)


def _replayed(holder: Any, control: Control) -> _Kept | None:
    """The pass of a region as it is in the backward pass that computes the region again; None: it is not known."""
    note = note_of(holder)
    first = None if note is None else _find(note.passes, control)
    if note is None or first is None:
        return None
    note.begin()
    kept = _find(note.replayed, control)
    if kept is None:
        kept = _Kept(first.draws)
        note.replayed.append((weakref.ref(control), kept))
    return kept


def _drew_before() -> bool:
    """Whether a region that is computed again drew a seed at this point when it ran first."""
    enclosing = regions()
    note = note_of(enclosing[-1].holder) if enclosing and enclosing[-1].again else None
    if note is None:
        return False
    note.begin()
    return note.taken < len(note.seeds)


def refuse() -> NoReturn:
    """Raise where a backward pass runs a tempered module, and it cannot be told which training pass that repeats."""
    raise UnsupportedError(
        "a backward pass runs a tempered module, and which training pass it computes again cannot be told: what runs "
        "it is neither torch.utils.checkpoint nor an autograd function that ran the module in its own forward. The "
        "masks would be others than in forward. Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
    )


# ------------------------------------------------------------------------------------------------- where it is traced
def traced_source(control: Control, site: Site, x: Tensor, at: Offsets, position: Position) -> Source:
    """`source` for a compiler.

    Where the whole model is traced, the seed of the pass is a tensor of the same graph. A part that is compiled by
    itself asks for it when it runs: what it would read of the pass now, a compiler would hold it to, and blocks that
    share one graph are different sites.
    """
    draws = control.ledger.draws
    if draws is None and inside_subgraph():  # the compiler keeps the generator's state for what it computes again
        note_traced(control.label, site.word)
        return Source(position.agree(draw_seed(x)), site.word, 0, at)
    if draws is None or not (draws.traced or inside_subgraph()):
        return Source(torch.ops.attemper.pass_seed(x.detach(), control.key, site.tensor), at=at)
    word = site.word
    note_traced(control.label, word)
    number = draws.calls.get(word, 0) + count_inside(word, inside_subgraph())
    if not inside_subgraph():
        draws.calls[word] = draws.calls.get(word, 0) + 1
    return Source(on_device(draws.seed, x), word, number, at)


@constant
def note_traced(label: str, site: int) -> None:
    """Write down that a site draws in compiled code, which notes nothing. label: of the tempered model."""
    CONTROLS[int(label)].traced.add(site)


@constant
def inside_subgraph() -> bool:
    """Whether a compiler traces the inside of an activation checkpoint, where nothing outside may be changed."""
    output = _output_graph()
    return output is None or output.current_tracer.parent is not None


@constant
def count_inside(site: int, inside: bool) -> int:
    """How often a site drew before inside of the checkpoints of this graph; counts this time if it is inside."""
    calls: dict[int, int] = _output_graph().__dict__.setdefault("_attemper_calls", {})
    before = calls.get(site, 0)
    calls[site] = before + inside
    return before


def _output_graph() -> Any:
    """The graph that is being traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _pass_seed(after: Tensor, key: int, site: Tensor) -> Tensor:
    """The seed of the pass that a compiled site belongs to, with the site and the number of its call in it."""
    word, control = int(site), CONTROLS[key]
    control.traced.add(word)
    if after.is_cuda and torch.cuda.is_current_stream_capturing():
        return _captured_seed(control, word, after)
    found = eager_source(control, word, after)
    return seed_of_call(found.seed, word, found.call)


def _captured_seed(control: Control, site: int, after: Tensor) -> Tensor:
    """The same in a CUDA graph, which replays what it did when it was captured: it reads the seed of each pass from
    where passes write it. A part that runs by itself draws in the graph, from the generator that the graph knows."""
    draws = current(control)
    held = control.ledger.held.get(after.device)
    if draws is None or held is None:
        return draw_seed(after)
    return seed_of_call(held, site, draws.number(site))


def _pass_seed_fake(after: Tensor, key: int, site: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=after.device)


torch.library.define(
    "attemper::pass_seed", "(Tensor after, int key, Tensor site) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.impl("attemper::pass_seed", "CompositeExplicitAutograd", _pass_seed)
torch.library.register_fake("attemper::pass_seed", _pass_seed_fake)
