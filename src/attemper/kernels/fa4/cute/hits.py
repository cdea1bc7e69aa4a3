"""Hard masking inside FlashAttention-4's backward kernel for Hopper.

A logit is hit where it lies above `low` of its row, and where the product of its row's and its key's word lies below a
limit; see `kernels/attention/hits.py`. Few logits lie above `low`. So four logits of each thread of a warp are compared
with it, and mostly all threads skip the rest.

A logit that was set to 0 is a constant: it has a weight, by which V gets its gradient, but no gradient itself. Threads
mark such logits with a bit each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call, misc"
from __future__ import annotations

from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from attemper.kernels.fa4.cute.mods import words_at
from attemper.kernels.fa4.cute.sharing import SharingBackward
from attemper.kernels.fa4.tables import HEADER

FOUR = ((0, 0), (0, 1), (1, 0), (1, 1))  # of two neighbouring queries and two keys
GROUPS = 4  # of four logits that are looked at together for marks
FILL = {"zero": "0f00000000", "neg_inf": "0fFF800000"}

# $0 to $3: logits, $4: marks, and the same as inputs $5 to $9; $10, $11: `low` of the queries. The rest is needed only
# where there is a hit. $12: the first query, $13: the first key, of this thread; $14, $15: addresses of rows and keys.
HIT = """{{
    .reg .pred any, k;
    .reg .b32 w0, w1, c0, c1, limit, t;
    .reg .b64 a;
    setp.gt.f32 any, $0, $10;
    setp.gt.or.f32 any, $1, $10, any;
    setp.gt.or.f32 any, $2, $11, any;
    setp.gt.or.f32 any, $3, $11, any;
    vote.sync.any.pred any, any, 0xFFFFFFFF;
    @!any bra.uni DONE;
    mad.wide.s32 a, $12, 4, $14;
    ld.global.b32 w0, [a + {first_row}];
    ld.global.b32 w1, [a + {second_row}];
    mad.wide.s32 a, $13, 4, $15;
    ld.global.b32 c0, [a + {first_key}];
    ld.global.b32 c1, [a + {second_key}];
    ld.global.b32 limit, [$15];
    {each}
    DONE:
}}"""
HIT_ONE = """
    mul.lo.s32 t, w{row}, c{column};
    setp.lt.s32 k, t, limit;
    setp.gt.and.f32 k, ${at}, ${low}, k;
    @k mov.b32 ${at}, {fill};
    @k or.b32 $4, $4, {bit};"""


def _asm(values, others, text, kinds):
    """Assembly that changes `values` and reads `others`; kinds: how it takes each of them, as letters."""
    kinds_of_values, kinds_of_others = kinds
    types = ", ".join({"f": "f32", "r": "i32"}[kind] for kind in kinds_of_values)
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({types})>"),
        [value.ir_value() for value in (*values, *others)],
        text,
        ",".join([f"={kind}" for kind in kinds_of_values] + [str(i) for i in range(len(values))] + kinds_of_others),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [type(value)(llvm.extractvalue(value.ir_value().type, results, [i])) for i, value in enumerate(values)]


class HittingBackward(SharingBackward):
    """The backward kernel."""

    def mma_one_m_block(self, m_block, *args, softmax_scale_log2, score_mod_fn, score_mod_bwd_fn, **told):
        about = score_mod_fn.keywords
        marks: list[Int32] = []
        return super().mma_one_m_block(
            m_block,
            *args,
            softmax_scale_log2=softmax_scale_log2 * about["softmax_scale"],
            score_mod_fn=partial(self._hit, marks, *self._words(m_block, **about)),
            score_mod_bwd_fn=partial(self._forget, marks),
            **told,
        )

    def _words(self, m_block, n_block, batch_idx, head_idx, thr_mma_SdP, aux_data, **_):
        """This quad's share of `low`; the thread's first query and key, and the addresses of the words of both."""
        keys_at, rows_at, lows_at, heads, queries = aux_data.scalars
        row = self.first_row(m_block, batch_idx, head_idx, heads, queries)
        shares = self.shares(words_at(lows_at, Float32), row)
        return shares, (row, self.keys(n_block, thr_mma_SdP)[0], rows_at, keys_at)

    def _hit(self, marks, shares, places, acc_S, m_block):
        logits = self.logits(acc_S)
        for block in range(cute.size(logits, mode=[0]) // 2):
            lows = [self.passed_on(shares, 2 * block + i) for i in range(2)]
            first = 4 * block % 32
            if first == 0:
                marks.append(Int32(0))
            each = [
                HIT_ONE.format(row=r, column=c, at=at, low=10 + r, fill=FILL[self.score_mod.fills], bit=1 << first + at)
                for at, (r, c) in enumerate(FOUR)
            ]
            text = HIT.format(
                first_row=32 * block, second_row=32 * block + 4, first_key=4 * HEADER, second_key=4 * (HEADER + 8),
                each="".join(each),
            )  # fmt: skip
            values = [logits[2 * block + r, c] for r, c in FOUR]
            *values, marks[-1] = _asm(
                (*values, marks[-1]), (*lows, *places), text, ("ffffr", ["f", "f", "r", "r", "l", "l"])
            )
            for (r, c), value in zip(FOUR, values, strict=True):
                logits[2 * block + r, c] = value

    def _forget(self, marks, acc_dP, acc_S, m_block):
        """No gradient for logits that were set to 0; those set to −inf have none anyway."""
        if self.score_mod.fills != "zero":
            return
        gradients = self.logits(acc_dP)
        blocks = cute.size(gradients, mode=[0]) // 2
        for start in range(0, blocks, GROUPS):
            places = [(2 * block + r, c) for block in range(start, min(start + GROUPS, blocks)) for r, c in FOUR]
            first, count = 4 * start % 32, len(places)
            each = [
                f"and.b32 t, ${2 * count}, {1 << first + i}; setp.ne.b32 k, t, 0; @k mov.b32 ${i}, 0f00000000;"
                for i in range(count)
            ]
            text = f"""{{
                .reg .pred any, k;
                .reg .b32 t;
                and.b32 t, ${2 * count}, {((1 << count) - 1) << first};
                setp.ne.b32 any, t, 0;
                vote.sync.any.pred any, any, 0xFFFFFFFF;
                @!any bra.uni DONE;
                {" ".join(each)}
                DONE:
            }}"""
            values = _asm([gradients[at] for at in places], [marks[4 * start // 32]], text, ("f" * count, ["r"]))
            for at, value in zip(places, values, strict=True):
                gradients[at] = value
