"""What attention is doing: entropy, logits, distances, conditioning, gradients, and pictures of where it looks."""

from attemper.probes.conditioning import (
    condition_number,
    effective_rank,
    linear_attention_bound,
    token_similarity,
)
from attemper.probes.diagnosis import PROBES, diagnose
from attemper.probes.table import HeadRow, JacobianRow, Table, TokenRow
from attemper.probes.tokens import PLACES

__all__ = [
    "PLACES",
    "PROBES",
    "HeadRow",
    "JacobianRow",
    "Table",
    "TokenRow",
    "condition_number",
    "diagnose",
    "effective_rank",
    "linear_attention_bound",
    "token_similarity",
]
