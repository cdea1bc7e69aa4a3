"""Training: one run from its description to its result."""

from attemper.training.spec import Budget, RunSpec

__all__ = ["Budget", "RunSpec"]
