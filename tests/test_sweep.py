"""The sweep over models and recipes says what is true: what acts, what is refused, what does nothing, what breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sweep
from architectures import LIBRARIES, architectures_of, is_installed
from architectures.base import Architecture, call, noise
from sweeping.outcomes import ACTS, CRASH, NO_OP, RECIPES, REFUSED, Outcome, measure_pair, measure_plain
from sweeping.report import counts, difference, listing, markdown, oddities
from sweeping.results import Sweep, fill, from_dict, load, to_dict
from sweeping.watching import REASONS, AttentionCalls, reason_of

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("sweep-*.json"))


class Attention(nn.Module):
    def __init__(self, how: str = "fused") -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.how = how
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.how == "module":
            y = self.softmax(q @ k.transpose(-2, -1)) @ v
        elif self.how == "method":
            y = torch.einsum("bhij,bhjd->bhid", [(q @ k.transpose(-2, -1)).softmax(-1).clone(), v])
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One residual branch of attention, whose output is multiplied by a factor that may hide it."""

    def __init__(self, factor: float = 1.0, how: str = "fused") -> None:
        super().__init__()
        self.attn, self.factor = Attention(how), factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.attn(x)


class Fragile(Block):
    """Breaks once anybody has changed the class of what is inside it."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.attn) is not Attention:
            raise KeyError("not mine")
        return super().forward(x)


def outcome(module: type[nn.Module], recipe: str, *args: object) -> Outcome:
    plain = measure_plain(Architecture("fake", "fake", lambda: module(*args), noise((2, 6, 16))))
    return measure_pair(plain, recipe)


@pytest.mark.parametrize(
    ("args", "recipe", "kind"),
    [
        ((Block,), "dropkey", ACTS),
        ((Block,), "explicit", ACTS),
        ((Block,), "consistency", ACTS),
        ((Block,), "ffdropout", REFUSED),
        ((Block, 0.0), "dropkey", NO_OP),
        ((Fragile,), "dropkey", CRASH),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pair_is_what_it_is(args: tuple[type[nn.Module]], recipe: str, kind: str) -> None:
    found = outcome(args[0], recipe, *args[1:])
    assert found.kind == kind, found.message
    assert (found.reason == "") == (kind in (ACTS, NO_OP))
    assert kind != CRASH or "not mine" in found.message


def test_what_takes_too_long_is_a_crash() -> None:
    class Endless(Block):
        def forward(self, x: Tensor) -> Tensor:
            while type(self.attn) is not Attention and self.training:
                x = x + 0
            return super().forward(x)

    plain = measure_plain(Architecture("fake", "fake", Endless, noise((2, 6, 16))))
    assert measure_pair(plain, "dropkey", seconds=1).reason == "TookTooLongError"


def test_gradients_that_are_not_finite_are_a_crash() -> None:
    class Rooted(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if type(self.attn) is Attention else out + (0 * out).sqrt()

    assert outcome(Rooted, "dropkey").reason == "gradients not finite"


def test_rounding_is_no_effect() -> None:
    class Rounded(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if type(self.attn) is Attention or not self.training else out * (1 + 2e-7)

    assert outcome(Rounded, "dropkey", 0.0).kind == NO_OP


@pytest.mark.parametrize(("factor", "kind"), [(1.0, ACTS), (0.0, NO_OP)])
@pytest.mark.parametrize("recipe", ["dropkey", "layerdrop"])
def test_what_a_model_draws_itself_is_no_effect_of_a_recipe(factor: float, kind: str, recipe: str) -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + torch.rand_like(out) if self.training else out

    assert outcome(Noisy, recipe, factor).kind == kind


@pytest.mark.parametrize("how", ["fused", "module", "method"])
def test_attention_is_counted_however_it_is_written(how: str) -> None:
    model = nn.Sequential(Block(1.0, how), nn.LayerNorm(16), Block(1.0, how))
    with AttentionCalls(model) as calls:
        call(model, noise((2, 6, 16))())
    assert [("0.attn" in chain, "2.attn" in chain) for chain in calls.seen] == [(True, False), (False, True)]


def test_a_softmax_that_no_product_follows_is_no_attention() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))
    with AttentionCalls(model) as calls:
        call(model, noise((2, 6, 16))())
    assert calls.seen == []


def test_two_models_and_three_recipes_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, report = tmp_path / "sweep.json", tmp_path / "sweep.md"
    words = ["--library", "torch", "--models", "TransformerEncoderLayer", "MultiheadAttention"]
    sweep.main([*words, "--recipes", "dropkey", "cb", "droppath", "--json", str(file), "--report", str(report)])
    data = json.loads(file.read_text())
    assert data["models"] == {"torch": {"TransformerEncoderLayer": "a a a", "MultiheadAttention": "a r1 r0"}}
    assert data["counts"] == {ACTS: 4, REFUSED: 2, NO_OP: 0, CRASH: 0}
    assert "no feed-forward network recognised" in report.read_text()
    assert data["versions"]["torch"] == torch.__version__

    capsys.readouterr()
    sweep.main(["--show", str(file), "--compare", str(file), "--markdown"])
    shown = capsys.readouterr().out
    assert "| `cb` | 1 | 1 | 0 | 0 |" in shown
    assert "6 pairs in both" in shown
    assert "acted before" not in shown


def test_a_file_gives_back_what_was_found() -> None:
    found = {"lib": {"a": {"cb": Outcome(ACTS), "blur": Outcome(REFUSED, "why", "apply", "long")}}}
    back = from_dict(
        to_dict(Sweep(found, {"lib b": "broken"}, ("other",), {"date": "", "machine": "", "versions": {}}))
    )
    assert back.found == {"lib": {"a": {"cb": Outcome(ACTS), "blur": Outcome(REFUSED, "why")}}}
    assert (back.left_out, back.absent) == ({"lib b": "broken"}, ("other",))


def test_the_difference_names_what_acted_before() -> None:
    old = {"lib": {"a": {"cb": Outcome(ACTS)}, "b": {"cb": Outcome(REFUSED, "x")}, "gone": {"cb": Outcome(ACTS)}}}
    new = {"lib": {"a": {"cb": Outcome(NO_OP)}, "b": {"cb": Outcome(ACTS, "odd")}}}
    text = difference(old, new)
    assert "2 pairs in both, 1 only before, 0 only now" in text
    assert "acts 1 → 1, refused 1 → 0, no-op 0 → 1" in text
    assert "acted before, no-op now: lib, a, cb" in text
    assert oddities(new) == ["lib b, cb: odd"]
    assert counts(new) == {ACTS: 1, REFUSED: 0, NO_OP: 1, CRASH: 0}
    assert markdown(new).splitlines()[0] == "| recipe | lib (2) | refused | no-op | crash |"
    assert "### lib a, cb" in listing(new)


def test_every_method_is_in_a_recipe() -> None:
    import attemper

    used = {method.name for recipe in RECIPES.values() for method in attemper.parse(recipe)}
    assert used == {method.name for method in attemper.list_methods()}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_refusals_that_were_measured_have_a_named_reason(path: Path) -> None:
    named = {reason for reason, _ in REASONS}
    models = load(path).found.values()
    reasons = {o.reason for rows in models for row in rows.values() for o in row.values() if o.kind == REFUSED}
    assert reasons
    assert reasons <= named


def test_the_readme_shows_what_was_measured() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| `dropkey` |" in page.partition("<!-- sweep:")[2].partition("<!-- /sweep -->")[0]
    assert fill(page) == page, "run python benchmarks/sweep.py --fill README.md: the README shows other figures"


def test_a_message_of_no_known_kind_loses_its_names_and_numbers() -> None:
    assert reason_of("'a.b' (Attn) has 3 wings") == "… has # wings"


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_lists_its_models_under_different_names(library: str) -> None:
    assert is_installed(library)
    assert len(architectures_of(library)) >= 5
