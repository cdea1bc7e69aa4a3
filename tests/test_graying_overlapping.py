"""Token graying where pieces of the image overlap: a patch is what a token stands for, the image is put together."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import ConflictError, NoSiteError
from attemper.sites import find_sites
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
SIDES = {
    **{"timm-pvtv2": 4, "timm-volo": 8, "timm-mvitv2": 4, "timm-pit": 2, "hf-segformer": 4},
    **{"lab-t2t": 4, "lab-ceit": 4},
}


def grayed(images: Tensor, side: int, eps: float) -> Tensor:
    """The images with their whole patches grayed by the DCT, by sums of cosines and torch's unfold and fold."""
    height, width = (size // side * side for size in images.shape[-2:])
    x = F.unfold(images[..., :height, :width], side, stride=side).mT
    rows, columns = (cosines(size) for size in x.shape[-2:])
    c = rows @ x @ columns.T
    top = c.abs().amax((1, 2), keepdim=True)
    x = rows.T @ (c.sign() * top * (c.abs() / top) ** eps) @ columns
    out = images.clone()
    out[..., :height, :width] = F.fold(x.mT, (height, width), side, stride=side)
    return out


def cosines(size: int) -> Tensor:
    k, n = torch.arange(size, dtype=torch.double)[:, None], torch.arange(size, dtype=torch.double)
    table = torch.cos(torch.pi * (2 * n + 1) * k / (2 * size)) * (2 / size) ** 0.5
    table[0] /= 2**0.5
    return table


@pytest.mark.parametrize(("name", "side"), SIDES.items())
def test_the_model_sees_the_image_that_grayed_patches_make(name: str, side: int) -> None:
    family = FAMILY[name]
    model = build(family).double().eval()
    inputs = {key: value for key, value in family.inputs().items() if key != "args"}
    key = "args" if "args" in family.inputs() else "pixel_values"
    images = (family.inputs()["args"][0] if key == "args" else inputs["pixel_values"]).double()

    def run(x: Tensor) -> Tensor:
        return call(model, {**inputs, key: (x,) if key == "args" else x})

    wanted = run(grayed(images, side, 0.8))
    plain = run(images)
    tempered = attemper.apply(model, "graying(eps=0.8)")
    assert [site.patch for site in find_sites(model).patches] == [(side, side)]
    assert torch.allclose(run(images), wanted, rtol=0, atol=1e-10 * (1 + wanted.abs().max().item()))
    assert not torch.allclose(plain, wanted)
    tempered.remove()
    assert torch.equal(run(images), plain)


def test_pixels_beyond_the_last_whole_patch_stay_and_gradients_reach_all_of_them() -> None:
    model = build(FAMILY["timm-pvtv2"]).double().eval()
    images = torch.randn(1, 3, 66, 71, dtype=torch.double, requires_grad=True)
    wanted = model(grayed(images, 4, 0.95))
    (expected,) = torch.autograd.grad(wanted.sum(), images)
    attemper.apply(model, "graying")
    out = model(images)
    (found,) = torch.autograd.grad(out.sum(), images)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-10)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10 * (1 + expected.abs().max().item()))


def test_a_network_in_front_of_attention_is_no_embedding() -> None:
    for model in (build(FAMILY["hf-detr"]), nn.Sequential(nn.Conv2d(3, 8, 7, stride=2), nn.ReLU())):
        with pytest.raises(NoSiteError, match="a layer that makes tokens of the pixels of an image"):
            attemper.apply(model, "graying")


class Hybrid(nn.Module):
    """A deep stem, which tells how many tokens it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(9)))
        self.patch_embed.grid_size = (4, 4)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        out: Tensor = self.blocks[0](x).mean(1)
        return out


def test_a_deep_stem_tells_its_patches_by_the_number_of_tokens() -> None:
    model = Hybrid().double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.double)
    wanted = model(grayed(images, 2, 0.95))
    attemper.apply(model, "graying")
    assert torch.allclose(model(images), wanted, rtol=0, atol=1e-10)
    with pytest.raises(ConflictError, match=r"images of 8 × 10 pixels.*cannot be cut into so many; write where=tokens"):
        model(torch.randn(2, 3, 8, 10, dtype=torch.double))


def test_an_image_smaller_than_a_patch_is_refused() -> None:
    model = build(FAMILY["timm-pvtv2"])
    attemper.apply(model, "graying")
    with pytest.raises(ConflictError, match=r"patches of 4 × 4 pixels.* this image has 3 × 64 pixels"):
        model(torch.randn(1, 3, 3, 64))


def test_with_an_adapter_round_the_embedding_it_acts_once_and_on_all_of_it() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=5)
    settings = peft.LoraConfig(r=2, target_modules=["patch_embed.proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(settings, model).eval()
    assert [site.patch for site in find_sites(model).patches] == [(4, 4)]
    attemper.apply(model, "graying")
    x = torch.randn(1, 3, 64, 64)
    apart = model(x)
    model.patch_embed.proj.merge()
    torch.testing.assert_close(model(x), apart, rtol=1e-4, atol=1e-5)
