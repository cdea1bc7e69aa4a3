"""Arguments of kernels and of the functions inside them, in groups.

A launch passes plain tuples, such as a tensor with its strides. Triton takes tuples apart when it compiles, and
specialises on what is in them (a stride that 16 divides, a size of 1) as on single arguments, so the machine code is
the same. Named tuples take longer to bind at a launch, so a kernel itself makes the groups below, which stand at one
sample and head.

A launch argument that is not to be specialised on must stand alone: `do_not_specialize` does not reach into tuples.

`Options` groups compile-time constants. Triton makes numbers of constants that are assigned to a variable, so options
are made in the call of a function and only passed on from there, never assigned or returned.

Triton has attributes of its own named `type`, `values`, `index` and `count`; no field may be called so.
"""

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """(N, e) of one sample and head: its first element, and the distance of tokens. Elements lie side by side."""

    ptr: Any
    stride: Any


class Mask(NamedTuple):
    """Which of nk keys each of nq queries may attend to, in one sample and head.

    ptr, stride_q, stride_k: elements of the mask. tops_ptr, tops_stride: the largest entry of its rows, if additive.
    """

    ptr: Any
    stride_q: Any
    stride_k: Any
    tops_ptr: Any
    tops_stride: Any
    nq: Any
    nk: Any


class Starts(NamedTuple):
    """The uint32 words that the rows and the columns of a stream start from, two each."""

    rows: Any
    other_rows: Any
    columns: Any
    other_columns: Any


class Tables(NamedTuple):
    """What was drawn and found before attention runs (`attention/prepare.py`).

    drop, hard: tables of the method that drops keys and of hard masking, each the words of nk keys, then what their
        rows start from, the limit and a 0 (`stream.table_kernel`).
    cuts: of each row of the head, where its largest logits begin, and its word.
    stripes: where seeds drop crosses, the words of the head's rows (`attention/seeds.py`).
    """

    drop: Any
    hard: Any
    cuts: Any
    stripes: Any


class Stats(NamedTuple):
    """What the forward pass leaves of the rows of one head: log-sum-exp (base 2, int32 bits), row words, flags.

    shares: where weights are dropped (`dropping.py`), what is left of the sum of a row's weights, float32 bits.
    """

    lse: Any
    words: Any
    flags: Any
    shares: Any


class SavedRows(NamedTuple):
    """What the backward pass reads of the rows of one head: row words; log-sum-exp and delta in one 64-bit word."""

    words: Any
    pairs: Any


class Dropping(NamedTuple):
    """Which keys rows drop: those whose word times the row's word lies below the limit.

    extra: a word from memory: 0; where seeds drop windows, how many columns the image has.
    """

    words: Any
    limit: Any
    extra: Any


class RowMasks(NamedTuple):
    """What the rows of a tile know about additive masks (the first three) and about hard masking.

    floor, shift, live: an additive mask leaves keys above `floor` in reach. Where it has pushed a whole row so far down
        that nothing is left of the content, the content counts 0 times (`live`), and `shift` brings the row back.
    low, word, limit, zero: a logit above `low` is among the largest (`attention/hits.py`); the others as in `Dropping`.
    """

    floor: Any
    shift: Any
    live: Any
    low: Any
    word: Any
    limit: Any
    zero: Any


class Options(NamedTuple):
    """Compile-time constants that most functions of attention's kernels need.

    E, EV: widths of heads of Q and K, and of V; BE, BEV: those of their tiles, powers of two.
    DROP: what is dropped, and how, a number of `dropping.py`; 0: nothing is.
    HARD: what hard masking sets logits to, "none": there is no hard masking.
    CAUSAL: query i sees keys 0 … i only.
    MASK: "none"; "keys", the same for all queries; "full"; "bias", which is added to the logits and forbids nothing by
        itself; or "last", one byte that says whether the last key is there (`without_last` puts it into nk).
    PRECISION: how float32 tiles are multiplied.
    """

    E: Any
    BE: Any
    EV: Any
    BEV: Any
    DROP: Any
    HARD: Any
    CAUSAL: Any
    MASK: Any
    PRECISION: Any
