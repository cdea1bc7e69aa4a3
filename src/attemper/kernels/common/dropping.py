"""What kernels can drop by the words of the stream: keys before softmax, or weights behind it.

A number says which, so that it can be an argument of an operator and a compile-time constant of a kernel.

Weights that are dropped behind softmax leave the log-sum-exp L as it is. With P = exp(logit − L) · c, where c is what
the weights that stay are multiplied with, and `keep` 0 or 1, the output is Σ keep · P · V, and the gradient of a logit
is P · (keep · dP − delta / c), delta = Σ dO · O. So kernels save L − log c in place of L, and 1 / c, the share of the
row that is left: 1 − p where weights are divided by it, and the sum of those that are kept where they are divided by
that and no gradient flows through it. With one more product per element, backward is that of dropped keys.
"""

from attemper.ops.perturbation import SeedDrop, WordDrop

NOTHING = 0
KEYS = 1
"""Keys, before softmax."""
WEIGHTS = 2
"""Weights; those that stay are divided by 1 − p."""
DETACHED = 3
"""Weights; those that stay are divided by their sum, which has no gradient."""
BY_KEY = 4
"""Added to the others: all queries of a head drop the same keys, those of the word of query 0."""
BY_SAMPLE = 8
"""Added: all heads of a sample do, those of the word of head 0."""
SEEDS = 16
"""Added times an odd number w: keys are dropped by w × w windows. Times twice a power of two, n: by stripes, of which a
row stores 2 · n words (`attention/seeds.py`)."""

WAYS = {"keys": KEYS, "weights": WEIGHTS, "detached": DETACHED}


def drop_code(drop: WordDrop) -> int:
    """The number that says what is dropped.

    >>> drop_code(WordDrop(0.1, "weights", by_key=True))
    6
    """
    return WAYS[drop.what] + BY_KEY * drop.by_key


def seed_code(drop: SeedDrop) -> int:
    """The same of keys that seeds drop.

    >>> seed_code(SeedDrop(0.1, "block", 3, (14, 14), 1)), seed_code(SeedDrop(0.1, "cross", 1, (32, 33), 0))
    (49, 65)
    """
    number = 2 * seed_words(drop) or drop.w
    return KEYS + BY_KEY * drop.for_all_queries + BY_SAMPLE * drop.for_all_heads + SEEDS * number


def seed_words(drop: SeedDrop) -> int:
    """Of stripes, how many words a row has for the lines of the image, and for its columns; 0: they are windows."""
    return 1 << (-(-max(drop.grid) // 32) - 1).bit_length() if drop.shape == "cross" else 0


def by_seeds(code: int) -> bool:
    """Whether seeds drop keys."""
    return code >= SEEDS


def drops_weights(code: int) -> bool:
    """Whether weights are dropped behind softmax."""
    return code % BY_KEY >= WEIGHTS
