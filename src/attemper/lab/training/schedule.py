"""The learning rate of every step."""

import math

from attemper.lab.training.spec import Budget


def learning_rate(budget: Budget, step: int, steps_per_epoch: int) -> float:
    """Rate of optimiser step 0, 1, …: a linear rise over the warm-up, then half a cosine down to `min_lr`.

    A warm-up that would be longer than the whole training ends with it.

    >>> budget = Budget(epochs=2, lr=1.0, min_lr=0.0, warmup_epochs=0.5)
    >>> [round(learning_rate(budget, step, 4), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.905, 0.655, 0.345, 0.095, 0.0]
    """
    total = budget.epochs * steps_per_epoch
    warmup = min(round(budget.warmup_epochs * steps_per_epoch), total)
    if step < warmup:
        return budget.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup - 1)
    return budget.min_lr + (budget.lr - budget.min_lr) * (1 + math.cos(math.pi * progress)) / 2
