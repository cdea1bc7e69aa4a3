"""Tables that a publication has, and of which our copies show no figures and no settings: rows and plans, no cells."""

from typing import Any

from attemper.lab.study.published.setups import is_on
from attemper.lab.study.published.table import Column, Size, Table, added

SUPPLEMENT = "Context broadcasting, ICCV 2023, supplement, section 1.1"
BLANK = "Our copy is the supplement, which names the data set; the figures stand in the paper, which was not read."
ROWS = (added("none", "none"), added("cb", "cb", note=""), added("cb, learned scale", "cb(cb_s)", note=""))
PIXELS: dict[str, Any] = {
    "optimizer": "adamw", "weight_decay": 0.01, "decay": "matrices", "batch_size": 16,
    "augment": "scale-crop+photometric",
}  # fmt: skip
QUESTIONS: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.01, "decay": "matrices", "clip": 1.0}
SHAPES = "segvit-shapes(head=upernet, hidden=32)"

TABLES = (
    Table(
        key="cb-ade20k",
        title="Context broadcasting, segmentation on ADE20K",
        origin=SUPPLEMENT,
        caveats=(BLANK, "The set-up is the usual one of UperNet on a ViT-S/16; docs/segmentation.md says more."),
        columns=(Column(title="mIoU, %"),),
        rows=ROWS,
        sizes={
            "smoke": Size(
                task="shapes(test=24, train=96)", model=SHAPES, seeds=2, epochs=2, lr=(3e-3,), stands_for="ADE20K",
                budget={**PIXELS, "warmup_epochs": 0.5},
            ),
            "small": Size(
                task="shapes", model=SHAPES, seeds=3, epochs=40, lr=(3e-3,), stands_for="ADE20K",
                budget={**PIXELS, "warmup_epochs": 2.0},
            ),
            "full": Size(
                task="segment:ADEChallengeData2016(size=512)",
                model="timm:deit_small_patch16_224(head=upernet, hidden=512)", seeds=3, epochs=129, lr=(6e-5,),
                budget={
                    **PIXELS, "min_lr": 1e-7, "warmup_epochs": 1.2, "precision": "bfloat16", "validation": 0.02,
                },
            ),
        },
        stated=is_on(("ADE20K", "segment:ADEChallengeData2016(size=512)")),
    ),
    Table(
        key="cb-vqa",
        title="Context broadcasting, questions about images on VQAv2",
        origin=SUPPLEMENT,
        caveats=(BLANK, "ViLT-B/32 from nothing, with usual settings; docs/questions.md says more."),
        columns=(Column(title="VQA accuracy, %"),),
        rows=ROWS,
        sizes={
            "smoke": Size(
                task="vqa:shapes(test=60, train=200)", model="two-stream(width=16)", seeds=2, epochs=2, lr=(3e-3,),
                stands_for="VQAv2", budget={**QUESTIONS, "batch_size": 32, "warmup_epochs": 0.4},
            ),
            "small": Size(
                task="vqa:easy", model="two-stream", seeds=3, epochs=10, lr=(1e-3,), stands_for="VQAv2",
                budget={**QUESTIONS, "batch_size": 128, "warmup_epochs": 2.0},
            ),
            "full": Size(
                task="vqa:vqav2(size=384)", model="vilt(patch=32)", seeds=3, epochs=10, lr=(1e-4,),
                budget={
                    **QUESTIONS, "batch_size": 256, "min_lr": 0.0, "warmup_epochs": 1.0, "precision": "bfloat16",
                    "augment": "shift(16)", "validation": 0.02,
                },
            ),
        },
        stated=is_on(("VQAv2", "vqa:vqav2(size=384)")),
    ),
)  # fmt: skip
