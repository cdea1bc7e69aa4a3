"""GPU kernels: attention with methods inside, keys, penalties, and what FlashAttention-4 is told."""
