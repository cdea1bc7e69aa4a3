"""Attention under any set of perturbations: one reference, fast implementations beside it, one random stream.

Nothing is imported here, so that kernels and methods can use the stream without loading each other.
"""
