"""Explicit dropout on THUMOS14, read as online action detection: per-frame mAP over 20 actions."""

from typing import Any

from attemper.lab.study.published.explicit import CHOICE, main_rows, main_settings, sizes
from attemper.lab.study.published.table import Column, Size, Stated, Table

LIKELY: dict[str, Any] = {"batch_size": 64, "warmup_epochs": 1.0, "weight_decay": 1e-4, "validation": 0.3}
MODEL = "encoder-thumos"
ACTIVITYNET = "actions:THUMOS(features='rgb_anet_resnet50+flow_anet_resnet50')"
TSN = {"ActivityNet": ACTIVITYNET}
"""Tasks with the paper's features."""

SETTING = (
    "The paper gives 64 tokens, two blocks, 20 actions, p = 0.2, five seeds, the 70:30 split and mAP. Online detection "
    "with per-frame mAP, a class token, width 1024, 8 heads, MLP 1024, Adam and batch 64 are most likely ones, from "
    "its authors' earlier public code. Epochs, warm-up and weight decay are ours.",
    "The split is made by video, so that no video has windows on both sides; the paper does not say how it splits.",
    "Strengths are read with reduction=authors, Arora's too: a trace over tokens divided by their number and summed "
    "over the batch. Which one the paper used is not known, and at batch 64 this λ is 128 times that of "
    "reduction=mean.",
    "The model has 21 outputs, background and 20 actions. Ambiguous steps, of which the paper says nothing, are left "
    "out of training and test. Steps with two actions count for both, and are trained on with equal shares.",
)
I3D = (
    "The features are not the paper's: I3D features of RGB and flow, reduced to 256 by PCA, one step in 0.64 seconds, "
    "of 388 of the 412 videos, without the 24 longest. The paper's are two-stream features of width 3072 or 4096, "
    "most likely four steps a second. Levels are not comparable; compare rows with each other."
)
SESSIONS = (
    "It needs the features themselves, which are not ours to give: the folder 'THUMOS' of the layout that OadTR and "
    "LSTR use, with target_perframe, rgb_anet_resnet50 and flow_anet_resnet50 in it and their data_info.json."
)

SMOKE = Size(
    task="planted",
    model="encoder(width=32, heads=4, token=last)",
    seeds=2,
    epochs=2,
    lr=(3e-3,),
    strengths=("5e-4",),
    budget={"batch_size": 64, "warmup_epochs": 0.5},
    stands_for="THUMOS14",
)


def _table(key: str, features: str, column: str, task: str, about: str) -> Table:
    return Table(
        key=key,
        title=f"Explicit dropout on THUMOS14, {features} features",
        printed=(f"explicit/{column}", f"explicit/{column}-text", "explicit/setup"),
        columns=(Column(title="mAP, %"),),
        caveats=(about, *SETTING, *CHOICE),
        rows=main_rows(column),
        sizes=sizes(SMOKE, task, MODEL, (5, 20), 1e-4, {**LIKELY, "precision": "bfloat16"}, LIKELY),
        stated=(
            *main_settings(
                (f"THUMOS14, TSN features of {features}", TSN.get(features, "")), ("an encoder of 2 layers", MODEL)
            ),
            Stated(name="tokens", printed="64", scales=("small", "full")),
        ),
    )


TABLES = (
    _table("explicit-thumos", "Kinetics", "thumos14-kinetics", "actions:thumos14-i3d-pca256.npz(broken=skip)", I3D),
    _table("explicit-thumos-activitynet", "ActivityNet", "thumos14-activitynet", ACTIVITYNET, SESSIONS),
)
