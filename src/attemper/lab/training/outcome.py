"""What a run comes to: the chosen epoch, measured, and everything that a result says beside it."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

import attemper
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.source import Source
from attemper.lab.training.flops import count_flops
from attemper.lab.training.parallel import whole
from attemper.lab.training.rates import final_rates
from attemper.lab.training.spec import FORMAT
from attemper.lab.training.validation import detail
from attemper.lab.training.weights import notes_of, save_weights

if TYPE_CHECKING:
    from attemper.lab.training.loop import Run


def result_of(run: Run) -> dict[str, Any]:
    """Measure the chosen epoch, on test for the first and only time, and keep its weights where there is a folder."""
    state, learner, task, data = run.state, run.learner, run.task, run.data
    learner.average = None
    learner.model.load_state_dict(run.best)
    chosen = next((entry for entry in state.curve if entry["epoch"] == state.chosen), None)
    validation = chosen["validation"] if chosen else run.measure(data.validation)
    train = run.measure(data.measured_train())
    held_out = task.test().to(run.device)
    test, evaluation = measure_test(run, held_out, train)
    details = detail(learner, task, held_out)
    result = {
        "format": FORMAT,
        "key": run.key,
        "spec": run.spec.to_dict(),
        "fingerprint": task.fingerprint,
        "status": "diverged" if state.over else "finished",
        "diverged_at": state.diverged,
        "metric": task.primary,
        **({} if (learning := getattr(task, "learning", None)) is None else {"learning": str(learning)}),
        "chosen_epoch": state.chosen,
        "train": train,
        "validation": validation,
        "test": test,
        **({} if details is None else {"test_details": details}),
        **({} if learner.start is None else {"start": learner.start.to_dict()}),
        "curve": state.curve,
        "probes": state.probes,
        "rates": final_rates(learner.tempered, run.budget, state.curve),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "flops": count_flops(run.spec, task, data.batch_size, data.accumulate),
        "timing": timing(run),
        "made_under": state.made_under,
        "versions": versions(run.device) | ranks_of(run),
        **({"notes": list(notes)} if (notes := getattr(task, "notes", ())) else {}),
    }
    if run.folder is not None:
        weights = {name: whole(value) for name, value in run.best.items()}
        if run.ranks.main:
            save_weights(run.folder, weights, run.spec, task.fingerprint, notes_of(task))
    return result if evaluation is None else {**result, "evaluation": evaluation}


def measure_test(run: Run, source: Source, train: Metrics) -> tuple[Metrics, dict[str, Any] | None]:
    """Metrics on the test set and, if the run asks for it, an evaluation from the same reading of it."""
    examine = run.examine
    if examine is None:
        return run.measure(source), None
    return run.ranks.from_main(lambda: examine(run.learner, run.task, source, run.spec, train, run.report_alive))


def ranks_of(run: Run) -> dict[str, str]:
    """How many ranks made the result, and how, where there was more than one."""
    kind = "fsdp" if run.ranks.sharded else "ddp"
    return {} if run.ranks.alone else {"ranks": f"{run.ranks.size}, {kind}"}


def timing(run: Run) -> dict[str, Any]:
    """How long it took, and what it took of a GPU."""
    images = run.state.epoch * run.data.images_per_epoch
    trained = run.state.training_seconds
    gpu = run.device.type == "cuda"
    return {
        "seconds": run.seconds(),
        "images_per_second": images / trained if trained else None,
        "peak_memory": torch.cuda.max_memory_allocated(run.device) if gpu else None,
    }


def versions(device: torch.device) -> dict[str, str]:
    """What a result was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "attemper": attemper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
    }
