"""vit-pytorch and x-transformers, whose blocks are lists of parts that a loop adds up."""

from __future__ import annotations

from families.base import of_architecture

OUTSIDE = [
    of_architecture("vitp-vit", "vit-pytorch", "vit", 2, 2),
    of_architecture("vitp-cait", "vit-pytorch", "cait", 4, 4),
    of_architecture("xt-encoder", "x-transformers", "Encoder, plain", 4, 2, depths=(0, 2)),
    of_architecture("xt-decoder", "x-transformers", "Decoder, plain", 4, 2, depths=(0, 2)),
]
