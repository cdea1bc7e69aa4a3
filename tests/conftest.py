"""What every test starts from, and what many of them use."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Numbers drawn in a test are the same on every run, whichever tests ran before it in the same process."""
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """What a test does to the number of threads ends with it: where others compute too, one too many costs tenfold."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def launches_decided_anew(request: pytest.FixtureRequest) -> None:
    """What is launched may depend on what a case changes about plans, and is remembered by shape."""
    if request.path.name.endswith("_cases.py"):
        from attemper.kernels.common import direct

        direct.forget()


TRIED_OUT = (
    "test_trial", "test_random_modules", "test_sums_outside", "test_docs", "test_spellings", "test_met_by_what_runs",
    "test_architectures", "test_masks_by_hand", "test_projections",
)  # fmt: skip
"""The files whose models are tried out at `apply`. Others ask what the first training pass says, and are quicker."""


@pytest.fixture(autouse=True)
def trial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the trial run at `apply` away where it is not what a test is about."""
    if request.module.__name__ not in TRIED_OUT and not _family_of(request.node).startswith(SELDOM):
        monkeypatch.setattr("attemper.tempering.applying.try_out", lambda model, impl: None)
        monkeypatch.setattr("attemper.tempering.applying.look_at", lambda model: None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices are slower with several threads, much slower where other programs run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick_workers() -> Iterator[None]:
    """Workers of a study are forked from a server that has imported everything: by themselves they take ten seconds."""
    from attemper.lab.study import processes
    from teams import start_server

    start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "START", "forkserver")
        yield


@pytest.fixture
def no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler of `attemper bench` takes a second per step; what it measures has a test of its own."""
    monkeypatch.setattr("attemper.lab.bench.timing.peak_bytes_on_cpu", lambda step: 2**20)


FEW = ("timm-vit", "timm-swin", "hf-bert", "torchvision-vit", "nn-encoder", "nn-mha", "hand-written")
"""The families on which `make test` tries every method: each library, each way in which attention is met."""


def is_sampled(family: str, index: int, families: list[str], methods: int) -> bool:
    """Whether `make test` tries one pair of a matrix of families × methods; `make slow` tries the others.

    Every method on a few families, and every family on a quarter of the methods, at least one, another quarter each.
    """
    step = min(4, methods)
    return family in FEW or (families.index(family) + index) % step == 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes a minute begins first: at the end, one process would wait for the other."""
    items.sort(key=lambda item: "test_kernels_in_the_interpreter" not in item.nodeid)
    _thin_matrices(items)
    _thin_cases(items)
    for item in items:
        if item.path.stem in LONG:
            item.add_marker(pytest.mark.long)


LONG = (
    "test_triton", "test_fa4", "test_contracts", "test_contracts_compiled", "test_contracts_methods", "test_cli",
    "test_distributed", "test_distributed_runs", "test_distributed_seeds", "test_midepoch", "test_training_resume",
    "test_study_training", "test_ray", "test_distillation", "test_bench", "test_bench_figures", "test_streaming",
    "test_ledger_compiled", "test_memory", "test_trial",
    "test_plans", "test_estimate", "test_embedding_reuse", "test_docs", "test_penalties", "test_graying_half",
    "test_leaving", "test_run_folder", "test_kills",
    "test_explicit_squares", "test_actions", "test_translation_model", "test_study", "test_study_workers",
    "test_report_browser",
    "test_training", "test_streaming_files", "test_audio_study", "test_probes_training", "test_evaluation_attacks",
)  # fmt: skip
"""What `make quick` leaves out: kernels in the interpreter, compilers, several processes, whole studies, training."""


SAMPLE = 8
"""One in so many cases of a test in Triton's interpreter runs under `make test`."""


def _thin_cases(items: list[pytest.Item]) -> None:
    """Mark as slow all but a sample of the cases for Triton's interpreter, at least one of each test."""
    seen: set[str] = set()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if item.path.name.endswith("_cases.py") and test in seen and zlib.crc32(case.encode()) % SAMPLE:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


SELDOM = (
    *("hf-segformer", "hf-falcon", "hf-blip", "hf-vilt", "hf-mask2former", "hf-perceiver"),
    *("vitp-", "xt-", "lab-", "timm-pit"),
)
"""Families of which `make test` tries one test in `SELDOM_SAMPLE`, and `make slow` the others."""
SELDOM_SAMPLE = 20


def _family_of(item: pytest.Item) -> str:
    """The name of the family that a test is about; empty: it is about none."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return str(getattr(params.get("family", params.get("kind", params.get("model"))), "name", ""))


def _thin_matrices(items: list[pytest.Item]) -> None:
    """Mark as slow what `is_sampled` leaves out of the matrices of families × recipes."""
    matrices: dict[str, dict[str, list[tuple[pytest.Item, str]]]] = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        method = params.get("case", params.get("recipe"))
        if "family" in params and method is not None:
            rows = matrices.setdefault(item.nodeid.partition("[")[0], {})
            rows.setdefault(str(method), []).append((item, params["family"].name))
    for item in items:
        if _family_of(item).startswith(SELDOM) and zlib.crc32(item.nodeid.encode()) % SELDOM_SAMPLE:
            item.add_marker(pytest.mark.slow)
    for rows in matrices.values():
        families = list(dict.fromkeys(name for row in rows.values() for _, name in row))
        for index, row in enumerate(rows.values()):
            for item, name in row:
                if not is_sampled(name, index, families, len(rows)):
                    item.add_marker(pytest.mark.slow)
