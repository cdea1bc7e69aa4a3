"""Always Skip Attention, ICCV 2025: token graying, and networks without skips. † All figures are from notes."""

from dataclasses import replace

from attemper.lab.study.published.setups import (
    DEIT_OURS,
    DIGITS,
    NOISE,
    NOTES,
    ON_IMAGENET,
    SET_UP,
    STAND_IN,
    cifar_sizes,
    imagenet_sizes,
    is_on,
    on_imagenet,
    smoke,
)
from attemper.lab.study.published.table import BLANK, Column, Row, Size, Table, added, rows_of

EPS = "ε of DCT is not in the notes: 0.95 is our default. Patches before the embedding are grayed: our reading."
TOP1 = Column(title="top-1, %")
TOKENS = added("dct on tokens", "graying(where=tokens)", "our addition: tokens after embedding and position")


# ------------------------------------------------------------------------------------------------------------- graying
def _both(name: str, dct: str = "graying(dct, eps=0.95)") -> tuple[Row, Row]:
    """The two columns of the printed table, which are recipes here."""
    base, gray = (rows_of("graying/imagenet", (column,), {name: ("", "")})[0].cells for column in ("Base", "DCT"))
    return Row(name="none", recipe="none", cells=base), Row(name="dct", recipe=dct, cells=gray)


def _gray(key: str, name: str, model: str, small: str, tiny: Size, *, tokens: bool = True) -> Table:
    return Table(
        key=f"graying-{key}",
        title=f"Token graying, {name} on ImageNet",
        printed=("graying/imagenet",),
        caveats=(NOTES, EPS, STAND_IN, DEIT_OURS),
        columns=(TOP1,),
        rows=(*_both(name), added("svd", "graying(svd, eps=0.7)"), *((TOKENS,) if tokens else ())),
        sizes=imagenet_sizes(model, small, smoke_size=tiny),
        stated=on_imagenet(name, model),
    )


SMALL_B = "timm:vit_base_patch16_224(depth=3, embed_dim=32, num_heads=4, patch_size=2)"
VIT_B = "timm:vit_base_patch16_224(drop_path_rate=0.1)"


def _epsilons() -> Table:
    """ViT-B by kind and ε, with what each kind costs."""
    base, dct = _both("ViT-B")
    svd = rows_of(
        "graying/svd",
        ("ViT-B top-1",),
        {eps: (f"svd, ε = {eps}", f"graying(svd, eps={eps})") for eps in ("0.9", "0.7", "0.6", "0.5")},
    )
    days = {row.name: row.cells for row in rows_of("graying/training-days", ("Days",), DAYS)}
    found = [replace(row, cells=(*row.cells, *days.get(row.name, (BLANK,)))) for row in (base, dct, *svd)]
    return Table(
        key="graying-vit-base",
        title="Token graying by kind and ε, ViT-B on ImageNet",
        printed=("graying/imagenet", "graying/svd", "graying/training-days"),
        caveats=(
            NOTES,
            EPS,
            "† Training days of SVD stand with ε = 0.7: the notes do not say of which ε they are.",
            STAND_IN,
            DEIT_OURS,
        ),
        columns=(
            TOP1,
            Column(
                title="training, days",
                metric="elsewhere",
                condition="what a step costs, as a ratio to none, stands in the table of results",
                printed="graying/training-days",
            ),
        ),
        rows=(*found, TOKENS, added("svd on tokens", "graying(svd, eps=0.7, where=tokens)")),
        sizes=imagenet_sizes(
            VIT_B, "vit-small(drop_path=0.1)",
            smoke_size=smoke(ON_IMAGENET, SMALL_B),
        ),
        stated=on_imagenet("ViT-B", VIT_B),
    )  # fmt: skip


DAYS = {"Base": ("none", "none"), "SVD": ("svd, ε = 0.7", "graying(svd, eps=0.7)"), "DCT": ("dct", "graying")}

GRAYING = (
    _gray("vit-small", "ViT-S", "timm:vit_small_patch16_224(drop_path_rate=0.1)", "vit-small(drop_path=0.1)",
          smoke(ON_IMAGENET)),
    _epsilons(),
    _gray("swin", "Swin-S", "timm:swin_small_patch4_window7_224(drop_path_rate=0.3)",
          "timm:swin_tiny_patch4_window7_224(patch_size=2, window_size=4)",
          smoke(ON_IMAGENET, "timm:swin_small_patch4_window7_224(depths=[1,1], embed_dim=16, num_heads=[2,2], "
                "patch_size=2, window_size=2)"), tokens=False),
    _gray("cait", "CaiT-S", "timm:cait_s24_224(drop_path_rate=0.1)", "timm:cait_xxs24_224(patch_size=4)",
          smoke(ON_IMAGENET, "timm:cait_s24_224(depth=2, embed_dim=32, num_heads=4, patch_size=2)")),
    _gray("pvtv2", "PVTv2-b3", "timm:pvt_v2_b3(drop_path_rate=0.1)", "timm:pvt_v2_b0",
          smoke(ON_IMAGENET, "timm:pvt_v2_b3(depths=[1,1,1,1], embed_dims=[8,8,16,16], num_heads=[1,1,2,2])", NOISE,
                seeds=1), tokens=False),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------------------- skips
ROUGH = "The figures are approximate"
SKIPLESS = Table(
    key="skipless",
    title="A ViT without skip connections on CIFAR-10",
    printed=("skips/cifar10",),
    caveats=(
        NOTES,
        f"{ROUGH}, for ViT-Ti. Without attention's skip training is said to diverge: 70 is what was left.",
        SET_UP,
    ),
    rows=(
        *rows_of(
            "skips/cifar10",
            ("ViT-Ti",),
            {
                "Both": ("none", "none"),
                "No MLP skip": ("no MLP skip", "skipless(mlp)"),
                "No attention skip": ("no attention skip", "skipless(attention)"),
            },
        ),
        added("no skip at all", "skipless(both)"),
    ),
    sizes=cifar_sizes("cifar10", "vit-tiny", "vit-tiny"),
    stated=is_on(("CIFAR-10", "cifar10"), ("ViT-Ti", "vit-tiny")),
)


def _without(key: str, title: str, model: str, tiny: str, skip: bool, caveat: str, printed: bool) -> Table:
    """Skips of a network without attention belong to the model, not to a recipe: with and without are two plans."""
    sizes = cifar_sizes("cifar10", model, model)
    return Table(
        key=key,
        title=title,
        printed=("skips/cifar10",) if printed else (),
        origin="" if printed else "Always Skip Attention, ICCV 2025, our addition",
        caveats=(*((NOTES,) if printed else ()), caveat, SET_UP),
        rows=(Row(name="none", recipe="none", note="with its skips" if skip else "without any skip"),),
        sizes={**sizes, "smoke": replace(DIGITS, model=tiny, stands_for="CIFAR-10")},
        stated=is_on(("CIFAR-10", "cifar10")),
    )


def _pair(
    name: str, title: str, bare: str, tiny: str, tiny_bare: str, caveat: str, printed: bool
) -> tuple[Table, Table]:
    without = f"{name}({bare})"
    return (
        _without(f"skipless-{name}", f"A {title} with its skip connections on CIFAR-10", name, tiny, True, caveat,
                 printed),
        _without(f"skipless-{name}-bare", f"A {title} without any skip connection on CIFAR-10", without, tiny_bare,
                 False, caveat, printed),
    )  # fmt: skip


MIXERS = _pair(
    "convmixer", "ConvMixer", "spatial_skip=False, channel_skip=False", "convmixer(depth=3, width=32)",
    "convmixer(channel_skip=False, depth=3, spatial_skip=False, width=32)",
    "No level was published: the two ConvMixers are said to lie within ± 0.2 points of each other. Compare the "
    "accuracy of skipless-convmixer with that of skipless-convmixer-bare.",
    True,
)  # fmt: skip
RESNETS = _pair(
    "resnet", "ResNet-20", "skip=False", "resnet(depth=8, width=8)", "resnet(depth=8, skip=False, width=8)",
    "The abstract says that CNNs do well without skips; a residual network with and without them is ours. Compare the "
    "accuracy of skipless-resnet with that of skipless-resnet-bare.",
    False,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- listed
KAPPA = Table(
    key="graying-kappa",
    title="Token graying's condition numbers by ε",
    printed=("graying/log-kappa",),
    waits_for="it is no study of accuracy. 'attemper experiment graying' measures condition numbers before and after",
)
MAE = Table(
    key="graying-mae",
    title="Token graying in masked pre-training",
    printed=("graying/mae",),
    waits_for=(
        "it is two studies, one on the weights of the other: 'attemper compare plans/mae-graying.yaml', then "
        "plans/mae-graying-finetune.yaml; 'attemper compare plans/mae-graying-smoke.yaml' shows in a minute "
        "that it runs"
    ),
)

TABLES = (*GRAYING, KAPPA, MAE, SKIPLESS, *MIXERS, *RESNETS)
