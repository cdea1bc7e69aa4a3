"""What methods do outside of softmax, which every fused implementation can serve: change keys before, heads after."""

from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.documents import Documents, places
from attemper.ops.perturbation import Drawn, Perturbation

OUTSIDE = ("keys", "heads")


def is_outside(method: Perturbation) -> bool:
    """Whether a method leaves softmax itself alone."""
    return all(stage in OUTSIDE for stage in method.stages)


def refuse_keys(call: Call) -> str | None:
    """Why what this call's methods do to the logits of all keys cannot be done to the keys themselves, or None."""
    if not any("keys" in method.stages for method in call.methods):
        return None
    if call.differs_between_queries:
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            return (
                "an additive mask that differs between queries hides other keys from each of them, or may do so where "
                "nobody can look, which cannot be taken into account in the keys"
            )
        return "a boolean mask that differs between queries cannot be taken into account in the keys"
    if call.differs_between_grouped_heads:
        return "a mask that differs between heads cannot be taken into account in keys that these heads share"
    return None


def perturbed_keys(call: Call, drawn: Drawn) -> Tensor:
    """The keys as the methods of the call change them, (B, H_kv, Nk, e)."""
    k = call.k
    for method, stream in drawn:
        k = method.perturb_keys(k, call.real_keys, call.is_causal, stream)
    return k


def perturbed_heads(out: Tensor, drawn: Drawn) -> Tensor:
    """The output as the methods of the call scale its heads, (B, H, Nq, e_v)."""
    for method, stream in drawn:
        out = method.perturb_heads(out, stream)
    return out


def perturbed_document_heads(out: Tensor, drawn: Drawn, documents: Documents) -> Tensor:
    """The same of packed documents, each of which is a sample: out (1, H, T, e_v)."""
    if not any("heads" in method.stages for method, _ in drawn):
        return out
    scales = perturbed_heads(out.new_ones(documents.number, out.shape[1], 1, 1), drawn)[:, :, 0]
    document, _ = places(documents.queries, out.shape[2])
    return out * scales[document].transpose(0, 1)[None]
