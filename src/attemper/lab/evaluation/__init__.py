"""Evaluation: how accurate, how well calibrated and how robust a model is."""

from attemper.lab.evaluation.attacks import at_rest, fgsm, pgd
from attemper.lab.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from attemper.lab.evaluation.measure import Network, Normalise, evaluate
from attemper.lab.evaluation.metrics import Bin, Reading, Tally, read_logits, read_probabilities
from attemper.lab.evaluation.occlusion import occlude_centre, occlude_random
from attemper.lab.evaluation.suites import SUITES, Calibration, Robustness, Stochastic, Suite, parse_suites
from attemper.lab.evaluation.testsets import (
    TestSet,
    evaluate_test_set,
    open_imagenet_subset,
    open_imagenet_v2,
    open_real,
)
from attemper.lab.evaluation.wordnet import wordnet_ids

__all__ = [
    "CORRUPTIONS", "SEVERITIES", "SUITES", "Bin", "Calibration", "Network", "Normalise", "Reading", "Robustness",
    "Stochastic", "Suite", "Tally", "TestSet", "at_rest", "corrupt", "evaluate", "evaluate_test_set", "fgsm",
    "occlude_centre", "occlude_random", "open_imagenet_subset", "open_imagenet_v2", "open_real", "parse_suites", "pgd",
    "read_logits", "read_probabilities", "wordnet_ids",
]  # fmt: skip
