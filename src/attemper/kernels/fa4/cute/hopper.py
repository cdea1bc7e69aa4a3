"""FlashAttention-4's kernels for Hopper, where a thread drops all of its logits of a tile in one go.

FlashAttention-4 asks a mask_mod or a score_mod about one logit after the other. That leaves the compiler to find out
which words they share. Here words are loaded for a whole tile: in the forward pass two keys at once, in the backward
pass before the kernel waits for the logits, and threads that need the same words share them. Beside that, the backward
pass masks keys beyond the end and scales logits in operations it has anyway. Its inner loop takes 831 instructions for
64 logits of a thread instead of 1216, and 651 if it drops nothing (head width 64).

`install` has FlashAttention-4 make its kernels by these classes, for the mods of `mods.py` and no others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call, misc"
from __future__ import annotations

import contextlib
from contextvars import ContextVar
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from flash_attn.cute import interface
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack import layout_utils

from attemper.kernels.fa4.cute.hits import HittingBackward
from attemper.kernels.fa4.cute.mods import words_at
from attemper.kernels.fa4.cute.sharing import SharingBackward
from attemper.kernels.fa4.tables import HEADER

GREATEST = 2**31 - 1
ROOMY = 64  # head width; wider ones have fewer threads, each with registers enough to load words early


def _limit(keys_table):
    """Products above it are kept. None is −2³¹, since words are odd or 0, so 1 less than a limit is one too."""
    return cutlass.max(Int32(keys_table[0]), Int32(-GREATEST)) - Int32(1)


def _kept(logit, row_word, column_word, limit):
    return cutlass.select_(row_word * column_word > limit, logit, Float32(-Float32.inf))


class DroppingForward(FlashAttentionForwardSm90):
    """The forward kernel: queries down, keys across. A thread has a few queries, and pairs of neighbouring keys."""

    def first_half_block_overlap(self, *args, mask_fn, **told):
        return super().first_half_block_overlap(*args, mask_fn=self._dropping(mask_fn, told["n_block"]), **told)

    def mma_one_n_block(self, *args, mask_fn=None, **told):
        return super().mma_one_n_block(*args, mask_fn=self._dropping(mask_fn, told["n_block"]), **told)

    def mma_one_n_block_intrawg_overlap(self, *args, mask_fn=None, **told):
        mask_fn = self._dropping(mask_fn, told["n_block"])
        return super().mma_one_n_block_intrawg_overlap(*args, mask_fn=mask_fn, **told)

    def _dropping(self, mask_fn, n_block):
        """Instead of a mask_fn that asks a mask_mod: one that drops keys, and masks those beyond the end."""
        if self.mask_mod is None:
            return mask_fn
        told = mask_fn.keywords
        load = partial(
            self._words,
            told["thr_mma"],
            told["batch_idx"],
            told["head_idx"],
            told["m_block"],
            n_block,
            told["aux_data"],
        )
        early = load() if self.tile_hdim > ROOMY else None

        def drop_and_mask(acc_S, n_block, **more):
            self._drop(acc_S, *(load() if early is None else early))
            if (told | more).get("mask_seqlen"):
                mask_fn.func(acc_S, n_block=n_block, **told | more | {"mask_mod": None})

        return drop_and_mask

    def apply_score_mod(
        self, thr_mma, batch_idx, head_idx, m_block, acc_S, n_block, softmax_scale, aux_data, **_
    ):  # fmt: skip
        """What causal calls come by, since FlashAttention-4 skips tiles that nobody sees only without a mask_mod."""
        acc_S.store(acc_S.load() * softmax_scale)
        self._drop(acc_S, *self._words(thr_mma, batch_idx, head_idx, m_block, n_block, aux_data))

    def _words(self, thr_mma, batch_idx, head_idx, m_block, n_block, aux_data):
        """The words of this thread's queries, those of its pairs of keys, and the limit."""
        keys_at, rows_at, heads, queries = aux_data.scalars
        row_words, pairs = words_at(rows_at), words_at(keys_at + Int64(4 * HEADER), Int64)
        tile = cute.make_identity_tensor((self.tile_m, self.tile_n))
        places = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(tile))
        row = (batch_idx * heads + head_idx) * queries + m_block * self.tile_m
        words = [row_words[row + places[r, 0][0]] for r in range(cute.size(places, mode=[0]))]
        key = places[0, 0][1]
        pair = (n_block * self.tile_n + key) // 2
        columns = [pairs[pair + (places[0, c][1] - key) // 2] for c in range(0, cute.size(places, mode=[1]), 2)]
        return words, columns, _limit(words_at(keys_at))

    def _drop(self, acc_S, words, pairs, limit):
        logits = layout_utils.reshape_acc_to_mn(acc_S)
        for c in range(cute.size(logits, mode=[1])):
            column = Int32(pairs[c // 2] >> Int64(32 * (c % 2)))
            for r, word in enumerate(words):
                logits[r, c] = _kept(logits[r, c], word, column, limit)


class DroppingBackward(SharingBackward):
    """The backward kernel."""

    def mma_one_m_block(self, m_block, *args, softmax_scale_log2, mask_fn, score_mod_fn, score_mod_bwd_fn, **told):
        about = score_mod_fn.keywords
        return super().mma_one_m_block(
            m_block,
            *args,
            softmax_scale_log2=softmax_scale_log2 * about["softmax_scale"],
            mask_fn=mask_fn if self.is_causal else None,
            score_mod_fn=partial(self._drop, *self._words(m_block, **about)),
            score_mod_bwd_fn=lambda *_, **__: None,  # a dropped key has weight 0, so its gradient is 0 already
            **told,
        )

    def _words(self, m_block, n_block, batch_idx, head_idx, thr_mma_SdP, seqlen_info, aux_data, **_):
        """This quad's share of the words of queries, the words of the thread's keys, and a limit for each key."""
        keys_at, rows_at, heads, queries = aux_data.scalars
        keys_table = words_at(keys_at)
        shares = self.shares(words_at(rows_at), self.first_row(m_block, batch_idx, head_idx, heads, queries))
        keys = self.keys(n_block, thr_mma_SdP)
        columns = [keys_table[key + HEADER] for key in keys]
        limit = _limit(keys_table)
        limits = [cutlass.select_(key < seqlen_info.seqlen_k, limit, Int32(GREATEST)) for key in keys]
        return shares, columns, limits

    def _drop(self, shares, columns, limits, acc_S, m_block):
        logits = self.logits(acc_S)
        for r in range(cute.size(logits, mode=[0])):
            word = self.passed_on(shares, r)
            for c, (column, limit) in enumerate(zip(columns, limits, strict=True)):
                logits[r, c] = _kept(logits[r, c], word, column, limit)


def _forward(*args, mask_mod=None, score_mod=None, **told):
    ours = any(getattr(mod, "drops_keys", False) for mod in (mask_mod, score_mod))
    make = DroppingForward if ours else FlashAttentionForwardSm90
    return make(*args, mask_mod=mask_mod, score_mod=score_mod, **told)


def _backward(*args, score_mod=None, **told):
    make = FlashAttentionBackwardSm90
    if hasattr(score_mod, "fills"):
        make = HittingBackward
    elif getattr(score_mod, "drops_keys", False):
        make = DroppingBackward
    return make(*args, score_mod=score_mod, **told)


_small_tiles = ContextVar("small_tiles", default=False)
_tile_size = interface._tile_size_bwd_sm90


def _tile_size_or_small(head_dim, head_dim_v, causal, local, **told):
    return _tile_size(head_dim, head_dim_v, causal or _small_tiles.get(), local, **told)


@contextlib.contextmanager
def small_tiles():
    """Backward kernels as small as those of causal calls: at head width 128 tiles of 64 queries instead of 80.

    With marks of hits, registers do not suffice for 80, and then matrix products wait for each other.
    """
    token = _small_tiles.set(True)
    try:
        yield
    finally:
        _small_tiles.reset(token)


def install():
    """Have FlashAttention-4 make its kernels by these classes where they are wanted. Once is as good as twice."""
    interface.FlashAttentionForwardSm90 = _forward
    interface.FlashAttentionBackwardSm90 = _backward
    interface._tile_size_bwd_sm90 = _tile_size_or_small
