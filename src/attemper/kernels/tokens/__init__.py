"""The mean of all tokens, mixed into each of them, in one launch each way. Triton is imported when it first runs."""

from attemper.kernels.tokens.mixing import MeanMix, mixed, mixes

__all__ = ["MeanMix", "mixed", "mixes"]
