"""torchvision, torch.nn, and a block as people write it themselves.

What uses nn.MultiheadAttention has an even number of heads: with an odd one torch never takes its fast path in eval.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from families.base import Family, image, noise


def build_torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=64, num_classes=5
    )


def build_torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[2, 2],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(48, 4, 64, dropout=0.0, batch_first=True)


class HandWritten(nn.Module):
    """A block as people write it themselves: nothing but a call of scaled_dot_product_attention gives it away."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.to_qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class HandWrittenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([HandWritten() for _ in range(3)])
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with its defaults: it returns its weights, so it is computed by matmul and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


OTHERS = [
    Family("torchvision-vit", build_torchvision_vit, image(), 3, 3, ((4, 4),), prefix=1),
    Family("torchvision-swin", build_torchvision_swin, image(), 4, 4, ((4, 4),)),
    Family("nn-encoder", lambda: nn.TransformerEncoder(encoder_layer(), 3), noise((2, 10, 48)), 3, 3, (None,)),
    Family(
        "nn-decoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(48, 4, 64, dropout=0.0, batch_first=True), 3),
        lambda: {
            **noise((2, 7, 48), (2, 10, 48))(),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
            "tgt_is_causal": True,
        },
        3,
        6,
        (None,),
    ),
    Family("nn-mha", SelfAttention, noise((2, 10, 48)), 1, 1, (None,)),
    Family("hand-written", HandWrittenModel, noise((2, 10, 48)), 3, 3, (None,), targets=("stack.*",)),
]
