"""Hashes of data: equal where, and only where, images and labels are equal."""

import hashlib

from torch import Tensor


def of_parts(*parts: str | bytes) -> str:
    """The hash of some texts and bytes, in order."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part  # names may be any bytes
        whole.update(f"{len(data)}:".encode())
        whole.update(data)
    return whole.hexdigest()[:20]


def of_tensors(*tensors: Tensor) -> str:
    """The hash of some tensors: type, shape and contents."""
    parts: list[str | bytes] = []
    for tensor in tensors:
        parts += [f"{tensor.dtype} {tuple(tensor.shape)}", tensor.cpu().contiguous().numpy().tobytes()]
    return of_parts(*parts)
