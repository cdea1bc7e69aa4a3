"""`attemper.compare`: the laboratory's comparison, under the name by which Python programs ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from attemper.lab.from_python import Comparison


def compare(
    model: str | nn.Module | Callable[..., nn.Module],
    data: Any,
    recipes: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    lr: float | Sequence[float] | None = None,
    metric: str | Callable[..., float] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    classes: Sequence[str] | None = None,
    size: int | None = None,
    folder: str | Path | None = None,
    workers: int | None = None,
    device: str | None = None,
    title: str = "",
    evaluate: Sequence[str] = (),
    costs: bool = True,
    track: Sequence[str] = (),
    probe_every: int | None = None,
    change_plan: bool = False,
    root: str | Path | None = None,
    progress: bool = True,
    **budget: Any,
) -> Comparison:
    """Compare recipes on a model and data of one's own, as `attemper compare` does. Needs the extra `study`.

    Run again, it goes on where it was: results are kept under a hash of the source of the model and of the data, so
    changed code or data is another run.

    model: a function that returns a module, which gets `shape` and `classes` where it has such parameters; a module,
        whose weights every run starts from; or a name such as "vit-small" or "timm:NAME(pretrained=true)".
    data: arrays or tensors (x, y) or (x, y, x_test, y_test), a torch Dataset or several, a Hugging Face data set, the
        path of a folder or CSV, a task's name, or a dict with "train" and maybe "validation" and "test"; without a test
        set, a fixed fifth becomes one.
    recipes: texts, methods, or a dict of names to either; `none` is always among them. None: some that suit most.
    lr: a learning rate, or several of which each recipe gets the one that is best on validation.
    metric: what epochs are chosen and recipes compared by, from 0 to 1, larger is better: "accuracy",
        "balanced_accuracy", "macro_f1", "auroc", or a function of logits (N, classes) and targets (N).
    collate: from a list of samples of the data to a pair of inputs and targets, for samples that are not of one shape.
    classes: their names. size: the side that images are resized to.
    folder: where results are kept; None: under runs/.
    workers: so many processes; None: this one, which every function and object can be used in.
    budget: settings of training such as epochs=10, init="weights.safetensors", freeze="stem". Those that are left out
        follow from model and data, as the first line of the output says.

    >>> import attemper, tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> x, y = torch.randn(60, 12, 8), torch.arange(60) % 2
    >>> found = attemper.compare("encoder(depth=1, width=16, heads=2)", (x, y), ["dropkey(0.1)"], seeds=2, epochs=1,
    ...     folder=folder, costs=False, progress=False)
    >>> [row["name"] for row in found.table]
    ['none', 'dropkey(0.1)']
    >>> found.page.name
    'report.html'
    """
    from attemper.lab.from_python import compare as run

    return run(
        model,
        data,
        recipes,
        seeds=seeds,
        lr=lr,
        metric=metric,
        collate=collate,
        classes=classes,
        size=size,
        folder=folder,
        workers=workers,
        device=device,
        title=title,
        evaluate=evaluate,
        costs=costs,
        track=track,
        probe_every=probe_every,
        change_plan=change_plan,
        root=root,
        progress=progress,
        **budget,
    )
