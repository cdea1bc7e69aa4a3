"""What runs inside of FlashAttention-4's kernels. Importing any of it imports the CuTe DSL."""
