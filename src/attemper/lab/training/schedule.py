"""The learning rate of every step."""

import math

from attemper.lab.training.spec import Budget


def schedule_notes(budget: Budget) -> tuple[str, ...]:
    """What is odd about a schedule, in words: nobody means a warm-up that the training is too short for.

    >>> schedule_notes(Budget(epochs=3, warmup_epochs=5))
    ('the warm-up of 5 epochs is longer than the training of 3: the learning rate rises to the last step and never \
falls; give a shorter warmup_epochs',)
    >>> schedule_notes(Budget(epochs=5, warmup_epochs=5))
    ()
    """
    if budget.warmup_epochs <= budget.epochs:
        return ()
    return (
        f"the warm-up of {budget.warmup_epochs:g} epochs is longer than the training of {budget.epochs}: the learning "
        "rate rises to the last step and never falls; give a shorter warmup_epochs",
    )


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
