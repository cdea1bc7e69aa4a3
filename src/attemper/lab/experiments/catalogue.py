"""Which experiments there are: their arms, what is measured in each, and what the paper found.

Each arm is a model and a recipe. All arms of an experiment get the same data, budget and seeds.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from attemper.errors import ParameterError, quoted, suggestion

MODELS = {"VIT": "vit-digits", "MIXER": "convmixer(width=32, depth=4, kernel=3)", "RESNET": "resnet(width=8, depth=14)"}
"""What the placeholders in arms stand for, if nothing else is said: sizes for digits."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One model under one recipe. VIT, MIXER and RESNET in the model stand for those of the task."""

    name: str
    recipe: str = "none"
    model: str = "VIT"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is trained, what is measured in it, and what the paper found."""

    title: str
    measures: tuple[str, ...]
    """entropy: normalised attention entropy of every block; tokens: κ of the tokens before and behind the blocks;
    patches: κ of the patches that are embedded; branches: κ of the Jacobian of every branch of every block; gradients:
    how much gradients vary between mini-batches, at three points of training."""
    expected: str
    arms: tuple[Arm, ...]


GRAYING = tuple(
    Arm(f"{kind} on {where}, ε = {eps}", f"graying(kind={kind}, where={where}, eps={eps})")
    for where in ("patches", "tokens")
    for kind, strengths in (("svd", (0.9, 0.7, 0.5)), ("dct", (0.95, 0.9, 0.8)))
    for eps in strengths
)
EXPERIMENTS = {
    "entropy-cb": Experiment(
        "Attention entropy with and without context broadcasting",
        ("entropy",),
        "Attention asks for dense interactions; given the mean by cb, it can be sparser: lower entropy in deep blocks.",
        (Arm("none"), Arm("cb", "cb"), Arm("cb_s", "cb(variant=cb_s)")),
    ),
    "entropy-dropkey": Experiment(
        "Attention entropy with DropKey against dropout on attention weights",
        ("entropy",),
        "DropKey penalises what attends to single keys: it spreads attention, and raises its entropy.",
        (Arm("none"), Arm("dropkey", "dropkey(0.2)"), Arm("dropout", "dropattention(0.2, rescale=inverted)")),
    ),
    "skips": Experiment(
        "Conditioning and accuracy with and without skips: attention, feed-forward, convolutions",
        ("tokens", "branches"),
        "† Both skips ≥ no MLP skip ≫ no attention skip for a ViT; a convolutional network hardly notices. Attention "
        "without its skip is ill-conditioned, more than a feed-forward network and than a CNN without any skip.",
        (
            Arm("ViT, both skips"),
            Arm("ViT, no MLP skip", "skipless(mlp)"),
            Arm("ViT, no attention skip", "skipless(attention)"),
            Arm("mixer, both skips", model="MIXER"),
            Arm("mixer, no channel skip", model="MIXER(channel_skip=False)"),
            Arm("mixer, no spatial skip", model="MIXER(spatial_skip=False)"),
            Arm("mixer, no skip", model="MIXER(spatial_skip=False, channel_skip=False)"),
            Arm("ResNet, with skips", model="RESNET"),
            Arm("ResNet, no skip", model="RESNET(skip=False)"),
        ),
    ),
    "graying": Experiment(
        "Condition number and accuracy over ε of token graying, on patches and on tokens",
        ("patches", "tokens"),
        "A smaller ε makes the tokens that go in better conditioned; accuracy gains while the image survives it.",
        (Arm("none"), *GRAYING),
    ),
    "gradient-variance": Experiment(
        "Variance of the gradient with and without AttentionDrop",
        ("gradients",),
        "† AttentionDrop lowers the variance of gradients by about a tenth; blur with consistency trains most stably.",
        (
            Arm("none"),
            Arm("hardmask", "hardmask"),
            Arm("blur", "blur"),
            Arm("hardmask + consistency", "hardmask + consistency"),
            Arm("blur + consistency", "blur + consistency"),
        ),
    ),
}


def find_experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ParameterError(
            f"There is no experiment '{name}'.{suggestion(name, EXPERIMENTS)} There are: {', '.join(EXPERIMENTS)}."
        )
    return EXPERIMENTS[name]


def choose_arms(experiment: Experiment, wanted: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these names, or of names that contain these texts; nothing wanted: all of them.

    >>> [arm.name for arm in choose_arms(EXPERIMENTS["skips"], ["resnet", "ViT, both skips"])]
    ['ViT, both skips', 'ResNet, with skips', 'ResNet, no skip']
    """
    names = [arm.name for arm in experiment.arms]
    chosen: set[str] = set()
    for text in wanted:
        found = [name for name in names if name == text] or [name for name in names if text.lower() in name.lower()]
        if not text or not found:
            raise ParameterError(f"There is no arm {quoted(text)}. There are: {'; '.join(names)}.")
        chosen.update(found)
    return tuple(arm for arm in experiment.arms if not wanted or arm.name in chosen)


def model_of(arm: Arm, models: Mapping[str, str] = MODELS) -> str:
    """The arm's model: what its placeholder stands for, with the arm's options joined to those.

    >>> model_of(Arm("plain", model="RESNET(skip=False)"), {"RESNET": "resnet(depth=8)"})
    'resnet(depth=8, skip=False)'
    """
    word, _, rest = arm.model.partition("(")
    text, options = models.get(word, word), rest.removesuffix(")")
    if not options:
        return text
    return f"{text.removesuffix(')')}, {options})" if text.endswith(")") else f"{text}({options})"
