"""Every published figure, typed a second time from the sources by somebody who had not seen the first copy.

`CELLS[table][row, column]` is one printed cell: a number, `(mean, deviation)` where a ± is printed, and None where our
copy of the source cannot be read, leaves open to which row a number belongs, or prints a dash (a comment says which).

- `table` names paper and table: `explicit/…` (explicit dropout), `cb/S1` … `cb/S6` (context broadcasting, supplement),
  `graying/…` and `skips/…` (Always Skip Attention), `attentiondrop/…`, `dropkey/…`. A name that ends in `-text` holds
  numbers that stand in sentences of that paper, `…/setup` what it says about how its runs were made.
- `row` and `column` are the printed labels in lower-case ASCII, with reference numbers and footnote marks left out.
  Rows of explicit dropout read "attention / feed-forward"; λ and learning rates are written 1e-3, 5e-3, 1e-4, 5e-4.
  In S1 to S4 a "+ cb" row bears the name of the model above it, in S5 and S6 the positions that are ticked. FLOPs that
  are printed with a plus are typed without.
- `DISAGREEMENTS[table, row, column]` = (what the paper's text shows, what the digest of all tables shows, what we
  think): a decimal point that the scan lost, which CELLS holds as restored, or a source that contradicts itself.
"""

from __future__ import annotations

Cell = float | tuple[float, float] | None
Table = dict[tuple[str, str], Cell]


def _grid(columns: tuple[str, ...], rows: dict[str, tuple[Cell, ...]]) -> Table:
    return {(row, column): cell for row, cells in rows.items() for column, cell in zip(columns, cells, strict=True)}


CELLS: dict[str, Table] = {}

# Explicit dropout: Tables 1 to 5 of the paper, dropout ratio 0.2, mean ± deviation of five runs.

CELLS["explicit/cifar10"] = _grid(
    ("accuracy (%)",),
    {
        "dropattention / implicit": ((85.24, 0.75),),
        "dropkey / implicit": ((85.45, 0.41),),
        "none / implicit": ((85.14, 0.63),),
        "arora q / explicit": ((61.08, 0.80),),
        "arora k / explicit": ((47.01, 1.58),),
        "arora v / explicit": ((59.22, 1.80),),
        "none / arora": ((86.02, 0.51),),
        "none / explicit": ((86.14, 0.36),),
        "explicit q / explicit": ((83.92, 0.98),),
        "explicit k / explicit": ((84.06, 0.85),),
        "explicit v / explicit": ((86.38, 0.44),),
        "explicit av / explicit": ((86.11, 0.41),),
    },
)

CELLS["explicit/cifar100"] = _grid(
    ("accuracy (%)",),
    {
        "dropattention / implicit": ((58.01, 1.20),),
        "dropkey / implicit": ((59.11, 1.23),),
        "none / implicit": ((59.01, 1.13),),
        "arora q / explicit": ((37.59, 0.79),),
        "arora k / explicit": ((29.61, 0.85),),
        "arora v / explicit": ((37.16, 1.51),),
        "none / arora": ((55.42, 1.37),),
        "none / explicit": ((56.81, 2.84),),
        "explicit q / explicit": ((53.79, 4.82),),
        "explicit k / explicit": ((51.53, 0.90),),
        "explicit v / explicit": ((55.15, 0.84),),
        "explicit av / explicit": ((56.62, 2.03),),
    },
)

CELLS["explicit/thumos14-kinetics"] = _grid(
    ("map",),
    {
        "dropattention / implicit": ((62.03, 0.26),),
        "dropkey / implicit": ((64.58, 0.33),),
        "none / implicit": ((64.53, 0.47),),
        "arora q / explicit": ((48.66, 6.52),),
        "arora k / explicit": ((51.84, 4.14),),
        "arora v / explicit": ((52.23, 7.40),),
        "none / arora": ((57.76, 0.90),),
        "none / explicit": ((63.96, 0.46),),
        "explicit q / explicit": ((63.70, 0.56),),
        "explicit k / explicit": ((63.78, 0.54),),
        "explicit v / explicit": ((64.68, 0.36),),
        "explicit av / explicit": ((64.24, 0.40),),
    },
)

CELLS["explicit/thumos14-activitynet"] = _grid(
    ("map",),
    {
        "dropattention / implicit": ((53.89, 0.46),),
        "dropkey / implicit": ((55.87, 0.61),),
        "none / implicit": ((55.62, 0.74),),
        "arora q / explicit": ((46.67, 2.03),),
        "arora k / explicit": ((44.52, 5.80),),
        "arora v / explicit": ((36.96, 2.28),),
        "none / arora": ((48.44, 1.05),),
        "none / explicit": ((54.92, 0.33),),
        "explicit q / explicit": ((54.98, 0.84),),
        "explicit k / explicit": ((54.92, 0.76),),
        "explicit v / explicit": ((56.51, 0.37),),
        "explicit av / explicit": ((56.10, 0.55),),
    },
)

CELLS["explicit/gtzan"] = _grid(
    ("accuracy (%)",),
    {
        "dropattention / implicit": ((84.84, 0.89),),
        "dropkey / implicit": ((84.84, 0.89),),
        "none / implicit": ((85.00, 0.86),),
        "arora q / explicit": ((85.31, 0.86),),
        "arora k / explicit": ((84.22, 1.02),),
        "arora v / explicit": ((85.16, 0.55),),
        "none / arora": ((84.84, 0.43),),
        "none / explicit": ((85.16, 0.55),),
        "explicit q / explicit": ((85.68, 0.65),),
        "explicit k / explicit": ((85.78, 0.65),),
        "explicit v / explicit": ((85.00, 0.86),),
        "explicit av / explicit": ((85.00, 0.35),),
    },
)

CELLS["explicit/cifar10-ablation"] = _grid(
    ("lr 1e-3", "lr 5e-3", "lr 1e-4", "lr 5e-4"),
    {
        "k 1e-3": ((83.65, 0.81), (79.56, 5.18), (81.15, 1.53), (84.06, 0.85)),
        "k 5e-3": ((66.48, 2.19), (61.02, 5.84), (69.46, 0.94), (68.30, 0.71)),
        "k 1e-4": ((78.02, 0.72), (77.61, 0.65), (78.80, 0.98), (78.09, 1.01)),
        "k 5e-4": ((83.91, 0.84), (81.87, 0.99), (82.96, 1.37), (83.73, 0.66)),
        "q 1e-3": ((83.44, 0.94), (79.08, 5.31), (80.76, 1.30), (83.74, 0.45)),
        "q 5e-3": ((67.17, 0.36), (58.33, 1.66), (69.16, 0.72), (68.81, 0.32)),
        "q 1e-4": ((78.18, 0.62), (77.65, 0.56), (78.81, 1.03), (78.23, 0.90)),
        "q 5e-4": ((83.92, 0.98), (81.93, 1.02), (83.33, 1.22), (83.70, 0.65)),
        # The scan shows "\%" for the label V in these four rows.
        "v 1e-3": ((86.11, 0.38), (85.91, 0.78), (85.66, 0.82), (85.85, 0.42)),
        "v 5e-3": ((70.57, 1.38), (71.31, 0.44), (70.61, 1.44), (70.57, 1.25)),
        "v 1e-4": ((78.79, 0.54), (78.14, 0.54), (79.28, 0.53), (78.99, 0.51)),
        "v 5e-4": ((86.38, 0.44), (86.16, 0.48), (85.92, 0.62), (86.05, 0.57)),
        "av 1e-3": ((85.47, 0.63), (80.90, 1.63), (85.71, 0.52), (85.48, 0.87)),
        "av 5e-3": ((70.58, 0.80), (70.23, 0.96), (70.73, 0.78), (70.41, 0.88)),
        "av 1e-4": ((79.80, 0.57), (78.88, 0.49), (80.11, 0.41), (79.84, 0.67)),
        "av 5e-4": ((85.20, 0.72), (84.30, 0.67), (86.11, 0.41), (86.04, 0.61)),
    },
)

# Sections 4.2 and 4.3. "around" stands before 86.4 and "~" before 85.
CELLS["explicit/cifar10-text"] = {("explicit v / explicit", "accuracy (%)"): 86.38}
CELLS["explicit/cifar100-text"] = _grid(
    ("accuracy (%)",), {"dropkey / implicit": (59.11,), "explicit av / explicit": (56.62,)}
)
CELLS["explicit/thumos14-kinetics-text"] = {("explicit v / explicit", "map"): 64.68}
CELLS["explicit/thumos14-activitynet-text"] = {("explicit v / explicit", "map"): 56.51}
CELLS["explicit/gtzan-text"] = _grid(("accuracy (%)",), {"implicit": (85,), "explicit k / explicit": (85.78,)})
CELLS["explicit/cifar10-ablation-text"] = {("v 5e-4", "lr 5e-4"): 86.4}

CELLS["explicit/setup"] = {
    ("all", "dropout ratio"): 0.2,
    ("all", "runs"): 5,
    ("cifar-10", "encoder layers"): 7,
    ("cifar-100", "encoder layers"): 7,
    ("cifar-10", "training share (%)"): 70,
    ("cifar-100", "training share (%)"): 70,
    ("thumos14", "encoder layers"): 2,
    ("thumos14", "tokens"): 64,
    ("thumos14", "training videos"): 413,
    ("thumos14", "action categories"): 20,
    ("thumos14", "training share (%)"): 70,
    ("gtzan", "encoder layers"): 2,
    ("gtzan", "tokens"): 120,
}

# Context broadcasting: Tables S1 to S6 of the supplement. "distilled" stands for the sign behind a model's name,
# of which our copy makes a road, a 7, a 7m and a pi; section 2.2 says what it means.

CELLS["cb/S1"] = _grid(
    ("# params [m]", "flops [g]", "acc@1 [%]", "acc@5 [%]", "in-v2 [%]", "in-real [%]"),
    {
        "vit-ti distilled": (5.9, 1.3, 74.5, 91.9, 62.4, 82.1),
        "vit-ti distilled + cb": (5.9, 1.3, 74.7, 92.3, 62.5, 82.3),
        "vit-ti distilled + cb_s": (5.9, 1.3, 75.3, 92.5, 63.4, 82.8),
        "vit-s distilled": (22.4, 4.6, 81.2, 95.4, 69.8, 86.9),
        "vit-s distilled + cb": (22.4, 4.6, 81.3, 95.6, 70.2, 87.0),
        "vit-s distilled + cb_s": (22.4, 4.6, 81.6, 95.6, 70.9, 87.3),
        "vit-b distilled": (87.3, 17.6, 83.4, 96.4, 72.2, 88.1),
        "vit-b distilled + cb": (87.3, 17.6, 83.5, 96.5, 72.3, 88.1),
        "vit-b distilled + cb_s": (87.3, 17.6, 83.6, 96.5, 73.4, 88.3),
    },
)

CELLS["cb/S2"] = _grid(
    ("occ [%]", "imagenet-a [%]", "fgsm [%]"),
    {
        "vit-s distilled": (74.6, 21.5, 11.8),
        "vit-s distilled + cb_s": (75.1, 22.6, 13.0),
        "vit-s distilled + cb": (75.1, 23.6, 15.5),
    },
)

# Section 2.2: increases over distilled ViT-S.
CELLS["cb/S2-text"] = _grid(
    ("occ", "imagenet-a", "fgsm"), {"vit-s distilled + cb_s": (0.5, 1.1, 2.2), "vit-s distilled + cb": (0.5, 2.1, 4.7)}
)

# Four models with and without are eight rows; our copy holds seven numbers, several to a line. Its lines in the middle:
# "LocalViT-Ti 69.4", "+ Ours 72.5" (two ticks under Local, so two rows in one) and "+ Ours 76.5" (two under Hierarchy).
CELLS["cb/S3"] = _grid(
    ("acc@1[%]",),
    {
        "pvt-s": (76.7,),
        "pvt-s + ours": (77.3,),
        "localvit-ti": (69.4,),  # alone on its line, but the lines below it have slipped
        "localvit-ti + ours": (None,),  # 72.5, or the number that is missing
        "pvtv2": (None,),  # neither name nor row is left; 72.5, or the number that is missing
        "pvtv2 + ours": (None,),  # 76.5 by its label, but no name stands above it
        "swin-ti": (79.3,),
        "swin-ti + ours": (79.5,),
    },
)

CELLS["cb/S4"] = _grid(("accuracy",), {"vit-s": (74.73,), "vit-s + cb": (75.43,)})
CELLS["cb/S4-text"] = {("vit-s + cb", "increase [%p]"): 0.7}

CELLS["cb/S5"] = _grid(
    ("flops [m]", "acc@1[%]", "acc@5 [%]"),
    {
        "vit-s": (1260, 79.9, 95.0),
        "+ cb mlp": (0.9, 80.5, 95.3),
        "+ cb msa": (0.9, 80.1, 95.0),
        "+ cb mlp msa": (1.8, 80.1, 95.0),
        "+ cb_gate mlp": (0.9, 80.4, 95.1),
        "+ cb_gate msa": (0.9, 80.0, 95.0),
        "+ cb_gate mlp msa": (1.8, 80.0, 95.0),
        "+ cb_hybrid mlp": (1.8, 80.5, 95.0),
        "+ cb_hybrid msa": (1.8, 80.4, 95.3),
        "+ cb_hybrid mlp msa": (3.6, None, None),  # printed as dashes: "the failure case"
    },
)

CELLS["cb/S6"] = _grid(
    ("flops [m]", "acc@1[%]", "acc@5 [%]"),
    {
        "vit-s": (1260, 79.9, 95.0),
        "+ cb front": (0.9, 79.9, 94.8),
        "+ cb mid": (3.6, 80.5, 95.2),
        "+ cb end": (0.9, 80.5, 95.3),
        "+ cb_gate front": (0.9, 80.3, 94.9),
        "+ cb_gate mid": (3.6, 80.2, 95.1),
        "+ cb_gate end": (0.9, 80.4, 95.1),
        "+ cb_hybrid front": (1.8, 80.5, 95.0),
        "+ cb_hybrid mid": (7.3, 80.1, 95.1),
        "+ cb_hybrid end": (1.8, 80.3, 95.0),
    },
)

# Section 2.7, each at its best position: CB above gate, and CB's FLOPs as a share of hybrid's.
CELLS["cb/S6-text"] = {("+ cb over + cb_gate", "increase [%p]"): 0.1, ("+ cb over + cb_hybrid", "share of flops"): 0.5}

CELLS["cb/setup"] = {
    ("vit-ti", "depth"): 12,
    ("vit-s", "depth"): 12,
    ("vit-b", "depth"): 12,
    ("vit-ti", "dimensions"): 192,
    ("vit-s", "dimensions"): 384,
    ("vit-b", "dimensions"): 768,
    ("vit-b", "warmup epochs"): 5,
    ("vit-b + cb", "warmup epochs"): 10,
    ("vit-b distilled + cb", "drop path"): 0.2,
    ("hierarchical vits", "epochs"): 120,
    ("localvit", "epochs"): 150,
}

# Always Skip Attention: from the digest alone (third-party notes); our copy of the paper is its abstract, no numbers.

CELLS["graying/imagenet"] = _grid(
    ("base", "dct"),
    {
        "vit-s": (80.2, 80.4),
        "vit-b": (81.0, 81.3),
        "swin-s": (81.3, 81.6),
        "cait-s": (82.6, 82.7),
        "pvtv2-b3": (82.9, 83.0),
    },
)
CELLS["graying/svd"] = _grid(("vit-b top-1",), {"0.9": (81.2,), "0.7": (81.4,), "0.6": (81.4,), "0.5": (81.0,)})
CELLS["graying/training-days"] = _grid(("days",), {"base": (0.723,), "svd": (4.552,), "dct": (0.732,)})
CELLS["graying/log-kappa"] = _grid(
    ("in", "out"),
    {"base": (6.72, 6.74), "0.9": (6.64, 6.66), "0.7": (6.15, 6.17), "0.6": (5.73, 5.71), "0.5": (5.29, 5.25)},
)
CELLS["graying/mae"] = _grid(("base", "graying"), {"mae + fine-tune": (83.0, 83.2)})

# Marked "approximate". ConvMixer: the most that removing skips changes, in either direction.
CELLS["skips/cifar10"] = _grid(("vit-ti",), {"both": (92,), "no mlp skip": (90,), "no attention skip": (70,)}) | {
    ("convmixer", "within +/-"): 0.2
}

# AttentionDrop: results from the digest alone (third-party notes); the rest from the summary.

CELLS["attentiondrop/results"] = _grid(
    ("cifar-10", "cifar-100", "wmt14 en-de bleu", "ece", "pgd accuracy"),
    {
        "dropout": (93.5, 74.2, 27.8, 4.5, 43.1),
        "r-drop": (94.1, 75.0, 28.5, 3.8, 45.7),
        "hard masking": (94.5, 75.3, 28.9, 3.2, 47.2),
        "blur": (94.3, 75.1, 28.7, 3.4, None),  # printed as a dash
        "blur + consistency": (94.8, 75.6, 29.2, 2.9, 48.2),
    },
)
# "about" or "approximately" stands before each of these; "doubling" is typed as 2.
CELLS["attentiondrop/overhead"] = {
    ("hard masking", "runtime (+%)"): 3,
    ("hard masking", "memory (+gb)"): 0.2,
    ("blurred smoothing", "runtime (+%)"): 6,
    ("blurred smoothing", "memory (+gb)"): 0.3,
    ("consistency", "forward passes"): 2,
    ("consistency", "throughput (-%)"): 50,
    ("attentiondrop", "gradient variance (-%)"): 10,
}
CELLS["attentiondrop/limits"] = {
    ("dropout rate p", "degrades above"): 0.5,
    ("blur width w", "degrades above"): 9,
    ("sequence length n", "unexplored above"): 4096,
}

# DropKey: COCO from the project page ("Figure 5"), the rest from the digest alone (third-party notes).

CELLS["dropkey/coco"] = _grid(
    ("ap", "ap50", "ap75", "aps", "apm", "apl"),
    {
        "detr": (41.9, 62.1, 44.2, 20.6, 45.7, 60.7),
        "detr + dropout": (42.2, 62.3, 44.3, 20.8, 45.9, 61.1),
        "detr + dropkey": (42.9, 63.4, 44.7, 21.1, 46.7, 61.8),
    },
)
CELLS["dropkey/imagenet"] = _grid(
    ("dropout", "dropkey"),
    {
        "t2t-14": (81.65, 82.04),
        "t2t-19": (82.68, 82.94),
        "volo-d1": (84.35, 84.53),
        "volo-d2": (85.22, 85.38),
        "deit-b": (81.91, 82.25),
    },
)
CELLS["dropkey/schedules"] = _grid(
    ("cifar-10", "cifar-100"), {"increasing": (96.6, 77.2), "constant": (97.4, 78.6), "decreasing": (97.6, 79.2)}
)
CELLS["dropkey/setup"] = {
    ("dropkey-block", "window size"): 3,
    ("dropkey-cross", "window size"): 1,
    ("t2t-19 schedules", "base rate"): 0.3,
}

POINT = "a decimal point that the scan lost"

DISAGREEMENTS: dict[tuple[str, str, str], tuple[str, str, str]] = {
    ("explicit/thumos14-kinetics", "dropattention / implicit", "map"): ("62.03 £ 0.26", "62.03 ± 0.26", "£ is a ±"),
    ("explicit/thumos14-activitynet", "arora k / explicit", "map"): ("4452 + 5.80", "44.52 ± 5.80", POINT),
    ("explicit/cifar10-ablation", "k 5e-4", "lr 1e-4"): ("8296 + 1.37", "82.96 ± 1.37", POINT),
    ("explicit/cifar10-ablation", "q 1e-3", "lr 1e-3"): ("83.44 + 094", "83.44 ± 0.94", POINT),
    ("explicit/cifar10-ablation", "q 5e-3", "lr 1e-3"): ("67.17 + 036", "67.17 ± 0.36", POINT),
    ("explicit/cifar10-ablation", "q 5e-3", "lr 5e-3"): ("5833 +1.66", "58.33 ± 1.66", POINT),
    ("explicit/cifar10-ablation", "q 5e-4", "lr 1e-3"): ("83.92 + 098", "83.92 ± 0.98", POINT + "; Table 1 has 0.98"),
    ("explicit/cifar10-ablation", "q 5e-4", "lr 1e-4"): ("8333 +1.22", "83.33 ± 1.22", POINT),
    ("explicit/cifar10-ablation", "v 5e-3", "lr 1e-3"): ("7057 +1.38", "70.57 ± 1.38", POINT),
    ("explicit/cifar10-ablation", "v 5e-3", "lr 5e-3"): ("7131 +0.44", "71.31 ± 0.44", POINT),
    ("explicit/cifar10-ablation", "av 5e-3", "lr 1e-3"): ("70.58 + 080", "70.58 ± 0.80", POINT),
    ("explicit/cifar10-ablation-text", "v 5e-4", "lr 5e-4"): (
        "section 4.3: around 86.4 at this cell; Table 5: 86.05 ± 0.57",
        "86.05 ± 0.57",
        "the sentence means 86.38 ± 0.44, which stands at lr 1e-3",
    ),
    ("explicit/cifar100-text", "explicit av / explicit", "accuracy (%)"): (
        "section 4.2: 56.62 is the best explicit configuration; Table 2: none / explicit is 56.81",
        "both numbers as in Table 2",
        "the sentence is right only among the rows with explicit dropout on attention",
    ),
    ("cb/S2-text", "vit-s distilled + cb_s", "fgsm"): (
        "section 2.2: +2.2; Table S2: 11.8 and 13.0",
        "11.8 and 13.0",
        "+1.2 by the table; both sentences would fit a base of 10.8, so one of text and table has a wrong digit",
    ),
    ("cb/S2-text", "vit-s distilled + cb", "fgsm"): (
        "section 2.2: +4.7; Table S2: 11.8 and 15.5",
        "11.8 and 15.5",
        "+3.7 by the table; see the row above",
    ),
    ("cb/S6", "+ cb_hybrid end", "acc@1[%]"): (
        "80.3 here, 80.5 for hybrid at the end of the MLP in Table S5",
        "both: 80.5 by branch, 80.3 by position",
        "one model, two numbers; CB and gate agree in both tables, and S5's row equals S6's front",
    ),
    ("cb/S5", "vit-s", "flops [m]"): (
        "1260 here and in Table S6, 4.6 G for distilled ViT-S in Table S1",
        "not stated",
        "1260 M is what ViT-Ti costs (1.3 G in Table S1)",
    ),
}
