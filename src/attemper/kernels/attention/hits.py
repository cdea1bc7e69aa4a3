"""Hard masking inside the attention kernels: which logits it hits, and what stands in their place.

It hits a logit that is allowed, one of the largest of its row, and was not kept. The largest lie above `low`, which is
half-way from the least of them to the next smaller value. So a logit that comes out a little different here is still
taken for what it is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import re

import triton
import triton.language as tl

from attemper.kernels.common.tiles import INTERPRETED, load_bias

LONG_ROW = tl.constexpr(1024)

# What `replace_hits` does to an element: multiply, compare twice, select. The word that is always zero is as in `drop`.
# # is the element's number, [0] its result, [1] what to replace; [2] logit, [3] row word, [4] column word, [5] limit,
# [6] zero, [7] low, [8] log-sum-exp.
HIT_ASM = """{
    .reg .pred k#;
    .reg .b32 z, t#;
    .reg .f32 f#;
    and.b32 z, $4, $24;
    mad.lo.s32 t#, [3], [4], z;
    setp.lt.s32 k#, t#, [5];
    setp.gt.and.f32 k#, [2], [7], k#;
    FILL
    selp.f32 [0], f#, [1], k#;
}"""
# The same for long rows: mostly no thread of a warp has a logit above `low`, and then all of them skip the rest.
RARE_HIT_ASM = """{
    .reg .pred any, k#;
    .reg .b32 t#;
    .reg .f32 f#;
    setp.ne.b32 any, 0, 0;
    setp.gt.or.f32 any, [2], [7], any;
    vote.sync.any.pred any, any, 0xFFFFFFFF;
    @!any bra.uni DONE;
    mul.lo.s32 t#, [3], [4];
    setp.lt.s32 k#, t#, [5];
    setp.gt.and.f32 k#, [2], [7], k#;
    FILL
    selp.f32 [0], f#, [1], k#;
    DONE:
}"""
FILL_ASM = {
    "zero": "mov.b32 f#, 0x00000000;",
    "neg_inf": "mov.b32 f#, 0xFF800000;",
    "weight": "neg.f32 f#, [8];\n ex2.approx.ftz.f32 f#, f#;\n neg.f32 f#, f#;",
}


def four_times(template: str) -> str:
    """Assembly for four elements from that for one."""
    lines: list[str] = []
    for line in template.splitlines():
        if line.lstrip().startswith(".reg"):
            lines.append(line.replace("#", "<4>"))
        elif "#" in line or "[" in line:
            lines += [re.sub(r"\[(\d)\]", rf"[\1.{i}]", line).replace("#", str(i)) for i in range(4)]
        else:
            lines.append(line)
    return re.sub(r"\[(\d)\.(\d)\]", lambda at: f"${4 * int(at[1]) + int(at[2])}", "\n".join(lines))


HIT_ASMS = tl.constexpr(
    {
        way + fill: four_times(asm.replace("FILL", set_fill))
        for fill, set_fill in FILL_ASM.items()
        for way, asm in (("", HIT_ASM), ("rare_", RARE_HIT_ASM))
    }
)


@triton.constexpr_function
def hard_way(fill, nk):
    """The fill with "rare_" before it where rows are long; nk is 0 if not constant, as only that of short rows is.

    A row has few logits above `low`, and 128 elements are looked at together, four of every thread. Most such groups
    have none in long rows, and most have one in short rows.
    """
    return fill if fill == "none" or 0 < nk < LONG_ROW.value else "rare_" + fill


@triton.constexpr_function
def same_way(hard, fill):
    """Another fill, for rows as long as those of `hard`."""
    return "rare_" + fill if hard.startswith("rare_") else fill


@triton.constexpr_function
def fills_zero(hard):
    """Whether logits are set to 0."""
    return hard.endswith("zero")


@triton.constexpr_function
def hit_asm(fill):
    """The assembly of `replace_hits` for four elements."""
    return HIT_ASMS.value[fill]


@triton.constexpr_function
def hit_constraints(fill):
    """Its operands; where it may skip the rest, results are in the registers of what they replace."""
    tied = ["0", "1", "2", "3"] if fill.startswith("rare_") else ["r"] * 4
    return ",".join(["=r"] * 4 + tied + ["r"] * 28)


@triton.jit
def replace_hits(
    x, logits, lse, row_masks, columns, queries, keys, mask, options, FILL: tl.constexpr, LARGE: tl.constexpr
):
    """`x`, and something else where hard masking hits.

    columns: the words of keys. FILL: 0 ("zero"), −inf ("neg_inf"), or minus the weight of a logit of 0 ("weight"),
    which takes `lse`, the log-sum-exp of rows as int32 bits; with "rare_" before it in long rows.
    LARGE: not a remainder.
    """
    if LARGE and options.MASK != "bias" and not INTERPRETED:
        bits = tl.inline_asm_elementwise(
            hit_asm(FILL), hit_constraints(FILL),
            [
                x.to(tl.int32, bitcast=True), logits.to(tl.int32, bitcast=True),
                row_masks.word, columns, row_masks.limit, row_masks.zero, row_masks.low, lse,
            ],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    hit = (logits > row_masks.low.to(tl.float32, bitcast=True)) & (row_masks.word * columns < row_masks.limit)
    if options.MASK == "bias":
        hit = hit & (load_bias(queries, keys, mask) > row_masks.floor)
    if FILL == "weight" or FILL == "rare_weight":
        return tl.where(hit, -tl.exp2(-lse.to(tl.float32, bitcast=True)), x)
    return tl.where(hit, 0.0 if fills_zero(FILL) else -float("inf"), x)


@triton.jit
def hit_logits(logits, row_masks, columns, queries, keys, mask, options, FILL: tl.constexpr, LARGE: tl.constexpr):
    """Logits after hard masking, 0 or −inf (by FILL) where it hits."""
    return replace_hits(logits, logits, row_masks.low, row_masks, columns, queries, keys, mask, options, FILL, LARGE)


@triton.jit
def hit_weights(logits, lse, row_masks, columns, queries, keys, mask, options, LARGE: tl.constexpr):
    """Weights after hard masking, 0 or minus the weight of a logit of 0 (by HARD) where it hits; lse as int32 bits.

    A logit that was set to 0 is a constant: it has a weight, but no gradient. Its sign says so.
    """
    offset = lse.to(tl.float32, bitcast=True)
    if INTERPRETED:
        difference = logits - offset
    else:  # rounded as where logits are hit first; the compiler would make one instruction of product and difference
        difference = tl.inline_asm_elementwise(
            "sub.rn.f32 $0, $1, $2;", "=f,f,f", [logits, offset], dtype=tl.float32, is_pure=True, pack=1
        )
    return replace_hits(
        tl.exp2(difference), logits, lse, row_masks, columns, queries, keys, mask, options,
        same_way(options.HARD, "weight" if fills_zero(options.HARD) else "zero"), LARGE,
    )  # fmt: skip


@triton.jit
def weights_of(signed, like):
    """Weights from those of `hit_weights`, in the dtype of `like`."""
    weights = signed.to(like.dtype)
    if like.dtype == tl.float32 or INTERPRETED:
        return tl.abs(weights)
    return tl.inline_asm_elementwise(  # two at once
        "and.b32 $0, $1, 0x7FFF7FFF;", "=r,r", [weights], dtype=like.dtype, is_pure=True, pack=2
    )
