"""What our backward kernels for Hopper have in common: a thread needs a number for each of its queries.

Logits lie with keys down and queries across. A thread has two keys, eight apart, and of every eight queries two
neighbours, so it meets many queries. The eight quads of a warp, four threads each, meet the same ones. Each quad loads
a share of what belongs to them, and passes it on to the others when they need it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call, misc"
from __future__ import annotations

import cutlass.cute as cute
from flash_attn.cute import utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from quack import layout_utils

QUADS = 8
EACH = 8  # queries in which a thread has two neighbours


class SharingBackward(FlashAttentionBackwardSm90):
    """FlashAttention-4's backward kernel, with the queries of a tile divided among the quads."""

    def __init__(self, *args, **told):
        super().__init__(*args, **told)
        self.shuffle_LSE = True  # the log-sum-exp, too: registers are scarce

    def first_row(self, m_block, batch_idx, head_idx, heads, queries):
        """Where this thread's first query of the tile stands in a table (B, H, Nq)."""
        return (batch_idx * heads + head_idx) * queries + m_block * self.tile_m + cute.arch.lane_idx() % 4 * 2

    def keys(self, n_block, thr_mma):
        """This thread's keys."""
        tile = cute.make_identity_tensor((self.tile_n, self.tile_m))
        places = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(tile), transpose=True)
        return [n_block * self.tile_n + places[0, c][0] for c in range(cute.size(places, mode=[1]))]

    def shares(self, table, first_row):
        """What this quad loads of a table (B, H, Nq) for the queries of a tile."""
        row = first_row + cute.arch.lane_idx() // 4 * EACH
        return [table[row + start + i] for start in range(0, self.tile_m, EACH * QUADS) for i in range(2)]

    def passed_on(self, shares, r):
        """The entry of the thread's query number r, from the quad that loaded it."""
        block, i = divmod(r, 2)
        lane = 4 * (block % QUADS) + cute.arch.lane_idx() % 4
        return utils.shuffle_sync(shares[2 * (block // QUADS) + i], offset=lane)

    def logits(self, accumulator):
        """What a thread has of the tile, [query, key]."""
        return layout_utils.reshape_acc_to_mn(accumulator, transpose=True)
