"""The sums that droppath finds in timm's models are those at which timm has a drop path of its own."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import attemper
from attemper.ops.stream import Stream

QUICK = ["hiera_tiny_224", "coat_lite_tiny"]
SLOW = [
    "xcit_nano_12_p16_224", "tiny_vit_5m_224", "fastvit_sa12", "gcvit_xxtiny", "coat_tiny", "davit_tiny", "mvitv2_tiny",
    "swinv2_cr_tiny_224", "nest_tiny", "twins_pcpvt_small", "edgenext_xx_small", "volo_d1_224", "cait_xxs24_224",
    "convit_tiny", "crossvit_tiny_240", "tnt_s_legacy_patch16_224", "pit_ti_224", "swin_tiny_patch4_window7_224",
    "beit_base_patch16_224", "vit_small_patch16_18x2_224", "deit3_small_patch16_224", "pvt_v2_b0", "mixer_s32_224",
    "eva02_tiny_patch14_224",
]  # fmt: skip


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


def in_training(name: str) -> nn.Module:
    """A model in training mode, but for batch norms and dropout, in which every branch counts."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for parameter in model.parameters():
        if parameter.numel() and parameter.abs().max() < 1e-2:  # the scale of a layer, or a start at zero
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_without_its_branches_a_model_of_timm_is_what_its_own_drop_path_leaves(name, monkeypatch):
    model = in_training(name)
    x = torch.randn(1, *model.default_cfg["input_size"])
    tempered = attemper.apply(model, "droppath(0.5, replace=true)")
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
        given = model(x)
    tempered.remove()
    replaced = 0
    for module in list(model.modules()):
        for child, _ in list(module.named_children()):
            if "drop_path" in child:
                setattr(module, child, Nothing())
                replaced += 1
    assert replaced > 4
    with torch.no_grad():
        torch.testing.assert_close(given, model(x), atol=1e-5, rtol=1e-4)
