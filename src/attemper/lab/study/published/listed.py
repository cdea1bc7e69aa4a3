"""Tables that a publication has, and of which our copies show neither figures nor settings."""

from attemper.lab.study.published.table import Table

SUPPLEMENT = "Context broadcasting, ICCV 2023, supplement, section 1.1"
BLANK = "Our copy is the supplement, which names the data set; the figures stand in the paper, which was not read."

TABLES = (
    Table(
        key="cb-ade20k",
        title="Context broadcasting, segmentation on ADE20K",
        origin=SUPPLEMENT,
        caveats=(BLANK,),
        waits_for="there is no plan for segmentation on ADE20K yet",
    ),
    Table(
        key="cb-vqa",
        title="Context broadcasting, questions about images on VQAv2",
        origin=SUPPLEMENT,
        caveats=(BLANK,),
        waits_for="there is no plan for VQAv2 yet",
    ),
)
