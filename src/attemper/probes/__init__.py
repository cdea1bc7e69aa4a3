"""What attention is doing: entropy, logits, distances, conditioning, gradients, and pictures of where it looks."""

from attemper.probes.conditioning import condition_number, effective_rank, linear_attention_bound, token_similarity
from attemper.probes.diagnosis import PROBES, diagnose
from attemper.probes.gradients import GradientRow, PushRow, gradient_variance, penalty_push
from attemper.probes.jacobian import JacobianReport, branch_jacobian
from attemper.probes.module_jacobians import module_jacobians
from attemper.probes.nulls import NullDirections, null_directions
from attemper.probes.pictures import Look, query_looks, rollout
from attemper.probes.smoothing import logit_push
from attemper.probes.table import HeadRow, JacobianRow, SmoothingRow, Table, TokenRow
from attemper.probes.tokens import PLACES

__all__ = [
    "PLACES", "PROBES", "GradientRow", "HeadRow", "JacobianReport", "JacobianRow", "Look", "NullDirections", "PushRow",
    "SmoothingRow", "Table", "TokenRow", "branch_jacobian", "condition_number", "diagnose", "effective_rank",
    "gradient_variance", "linear_attention_bound", "logit_push", "module_jacobians", "null_directions", "penalty_push",
    "query_looks", "rollout", "token_similarity",
]  # fmt: skip
