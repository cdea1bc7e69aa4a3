"""Implementations of `attemper.attention` that launch kernels; none of them imports another.

Each is a module with `refuse(call)`, the reason why it cannot serve a call, or None, and `attention(call)`. The list of
all is in `attemper.ops.dispatch`.
"""
