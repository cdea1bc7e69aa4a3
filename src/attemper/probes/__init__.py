"""What attention is doing: entropy, logits, distances, conditioning, gradients, and pictures of where it looks."""

from attemper.probes.conditioning import condition_number, effective_rank, linear_attention_bound, token_similarity
from attemper.probes.diagnosis import PROBES, diagnose
from attemper.probes.gradients import GradientRow, PushRow, gradient_variance, penalty_push
from attemper.probes.pictures import Look, query_looks, rollout
from attemper.probes.table import HeadRow, JacobianRow, Table, TokenRow
from attemper.probes.tokens import PLACES

__all__ = [
    "PLACES", "PROBES", "GradientRow", "HeadRow", "JacobianRow", "Look", "PushRow", "Table", "TokenRow",
    "condition_number", "diagnose", "effective_rank", "gradient_variance", "linear_attention_bound", "penalty_push",
    "query_looks", "rollout", "token_similarity",
]  # fmt: skip
