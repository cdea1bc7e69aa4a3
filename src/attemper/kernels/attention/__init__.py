"""Fused attention in Triton: its kernels, and the torch operators round them."""
