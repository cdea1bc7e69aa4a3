"""What kernels can drop by the words of the stream: keys before softmax, or weights behind it.

A number says which, so that it can be an argument of an operator and a compile-time constant of a kernel.

Weights that are dropped behind softmax leave the log-sum-exp L as it is. With P = exp(logit − L) · c, where c is what
the weights that stay are multiplied with, and `keep` 0 or 1, the output is Σ keep · P · V, and the gradient of a logit
is P · (keep · dP − delta / c), delta = Σ dO · O. So kernels save L − log c in place of L, and 1 / c, the share of the
row that is left: 1 − p where weights are divided by it, and the sum of those that are kept where they are divided by
that and no gradient flows through it. With one more product per element, backward is that of dropped keys.
"""

from attemper.ops.perturbation import WordDrop

NOTHING = 0
KEYS = 1
"""Keys, before softmax."""
WEIGHTS = 2
"""Weights; those that stay are divided by 1 − p."""
DETACHED = 3
"""Weights; those that stay are divided by their sum, which has no gradient."""
BY_KEY = 4
"""Added to the others: all queries of a head drop the same keys, those of the word of query 0."""

WAYS = {"keys": KEYS, "weights": WEIGHTS, "detached": DETACHED}


def drop_code(drop: WordDrop) -> int:
    """The number that says what is dropped.

    >>> drop_code(WordDrop(0.1, "weights", by_key=True))
    6
    """
    return WAYS[drop.what] + BY_KEY * drop.by_key


def drops_weights(code: int) -> bool:
    """Whether weights are dropped behind softmax."""
    return code % BY_KEY >= WEIGHTS
