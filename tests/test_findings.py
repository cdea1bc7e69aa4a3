"""A diagnosis concludes: what stands out is named with what may help, and noise is not painted as a pattern."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attemper
from attemper.lab.report.diagnosis import bounds_of, make_page
from attemper.lab.report.heat import heat_of
from attemper.probes.attention import Seen, see
from attemper.probes.comparison import compare_tables
from attemper.probes.findings import DOCS, KINDS, findings, looks_untrained, places
from attemper.probes.patterns import sinks, twins
from attemper.probes.table import HeadRow, Table


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def weights_of(q, k):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)


def hellinger(p, q):
    return ((p.sqrt() - q.sqrt()) ** 2).sum(-1).mean().item() / 2


# ------------------------------------------------------------------------------------------------------------ formulas
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 3), st.integers(2, 9), st.integers(2, 9))
def test_sinks_and_twins_are_those_of_the_whole_matrix(seed, batch, heads, queries, keys):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, 4, dtype=torch.float64) for n in (queries, keys, keys))
    found, p = sinks(see(q, k, v=v)), weights_of(q, k)
    received = p.mean(2)
    torch.testing.assert_close(found["sink_share"], received.amax(-1).mean(0))
    top = received.argmax(-1)
    lengths = v.norm(dim=-1)
    ratio = torch.stack(
        [lengths[b, h, top[b, h]] / lengths[b, h].mean() for b in range(batch) for h in range(heads)]
    ).view(batch, heads)
    torch.testing.assert_close(found["sink_value"], ratio.mean(0))
    alike = twins(see(q, k, v=v))
    for head in range(heads):
        flat = [hellinger(p[:, g], torch.full_like(p[:, g], 1 / keys)) for g in range(heads)]
        others = [1 - 2 * hellinger(p[:, head], p[:, g]) / (flat[head] + flat[g]) for g in range(heads) if g != head]
        assert alike["overlap"][head].item() == pytest.approx(max(0.0, *others), abs=1e-6)


def test_masked_keys_are_no_sinks_and_rows_without_keys_count_for_nothing():
    q = torch.zeros(1, 1, 3, 2)
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    found = sinks(see(q, q, mask, v=torch.ones(1, 1, 3, 2)))
    assert found["sink_key"].item() == 0
    assert found["sink_share"].item() == pytest.approx((0.5 + 1.0) / 3)


def test_grouped_heads_have_the_values_of_their_group():
    q, k, v = torch.randn(1, 4, 5, 2), torch.randn(1, 2, 5, 2), torch.randn(1, 2, 5, 2)
    whole = [t.repeat_interleave(2, 1) for t in (k, v)]
    for name, value in sinks(see(q, k, v=v)).items():
        torch.testing.assert_close(value, sinks(see(q, whole[0], v=whole[1]))[name])


def test_where_values_are_not_seen_the_share_is_known_all_the_same():
    assert set(sinks(Seen(None, None, logits=torch.randn(1, 2, 3, 3)))) == {"sink_share", "sink_key"}


# ------------------------------------------------------------------------------------------------- planted in a model
def plant(kind):
    """A model whose first block has something planted into its attention, and a batch."""
    model = encoder()
    attention = model.layers[0].self_attn
    x = torch.randn(8, 12, 16)
    with torch.no_grad():
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        if kind == "uniform":
            weight[:8] *= 1e-3
        elif kind == "duplicate":
            weight[:16] *= 6
            weight[8:16], weight[24:32] = weight[:8], weight[16:24]
        elif kind == "entropy collapse":
            weight[:8] *= 300
        else:  # a sink: the first token has a direction of its own, which every query of head 0 looks for
            x[..., 0] = 0.0
            x[:, 0] = 0.0
            x[:, 0, 0] = 20.0
            weight[:8] = 0.0
            bias[:8] = 2.0
            weight[16:24] = 0.0
            weight[16:24, 0] = 1.0
            if kind == "sink, no-op":
                weight[32:40, 0] = 0.0
            elif kind == "sink":
                bias[:8] = 0.026
    return model, x


@pytest.mark.parametrize("kind", ["uniform", "duplicate", "entropy collapse", "sink, no-op", "sink, broadcast"])
def test_what_is_planted_is_found_with_what_may_help(kind):
    model, x = plant(kind)
    table = attemper.diagnose(model, x)
    found = {each.kind: each for each in table.findings}
    assert (0, 0) in found[kind].heads
    assert kind in str(table)
    assert found[kind].advice in str(table)
    assert found[kind].link in str(table)
    assert kind in make_page(table, title="t")
    assert any(each["kind"] == kind for each in table.to_dict()["findings"])


def test_a_head_that_is_not_like_that_is_not_called_so():
    model, x = plant("uniform")
    table = attemper.diagnose(model, x)
    by_head = {(row.block, row.head): row.flags for row in table.heads}
    assert by_head[0, 0] == ("uniform",)
    assert by_head[0, 1] == ()


def test_logits_that_grow_are_flagged_before_they_blow_up():
    assert HeadRow(0, "a", 0, logit_max=60.0).flags == ("logit growth",)
    assert HeadRow(0, "a", 0, logit_max=200.0).flags == ("logit blow-up",)
    assert HeadRow(0, "a", 0, logit_max=20.0).flags == ()


def test_of_few_keys_none_is_a_sink():
    assert HeadRow(0, "a", 0, sink_share=0.4, keys=4).flags == ()
    assert HeadRow(0, "a", 0, sink_share=0.4, keys=40).flags == ("sink",)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, unique=True))
def test_heads_are_named_in_words_that_can_be_read_back(heads):
    told = places(sorted(heads))
    blocks = {}
    for part in told.split("; "):
        if found := re.fullmatch(r"block (\d+): (.*)", part):
            numbers = [tuple(map(int, each.split("–"))) for each in found[2].split(", ")]
            blocks[int(found[1])] = {n for run in numbers for n in range(run[0], run[-1] + 1)}
    wanted = {}
    for block, head in heads:
        wanted.setdefault(block, set()).add(head)
    assert all(blocks[block] == wanted[block] for block in blocks)
    assert len(blocks) == len(wanted) or f"and {len(wanted) - len(blocks)} more blocks" in told


def test_every_finding_has_a_section_in_the_documentation():
    page = (Path(__file__).resolve().parent.parent / "docs" / "probes.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-") for line in page.splitlines() if "## " in line
    }
    anchors |= {each.lstrip("-") for each in anchors}
    assert {kind.anchor for kind in KINDS.values()} <= anchors
    home = re.search(r'Repository = "(.*)"', (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
    assert DOCS.startswith(home[1] + "/")


# ------------------------------------------------------------------------------------------------ weights and colours
def test_weights_that_nobody_trained_are_said_to_be_so():
    model = encoder()
    table = attemper.diagnose(model, torch.randn(2, 6, 16))
    assert table.untrained
    assert "weights: not trained, it seems" in str(table)
    assert "! The weights are not trained" in str(table)
    with torch.no_grad():
        model.layers[1].norm1.weight += 1e-3 * torch.randn(16)
    assert not looks_untrained(model)
    assert "not trained" not in str(attemper.diagnose(model, torch.randn(2, 6, 16)))


def test_noise_is_not_painted_in_full_colour():
    noise = [[0.99991, 0.99995], [0.99993, 0.99999]]
    heat = heat_of(noise, ["0", "1"], x="head", y="block", bounds=bounds_of("normalised", noise))
    strengths = [cell.strength for row in heat.rows for cell in row]
    assert max(strengths) - min(strengths) < 1e-3
    for name in ("logit_max", "sink_share", "overlap", "q_norm", "distance"):
        low, high = bounds_of(name, noise)
        assert low == 0
        assert high >= max(map(max, noise))


# ---------------------------------------------------------------------------------------------------- beside each other
def table_of(logits, **more):
    return Table("M", 1, tuple(HeadRow(0, "a", head, logit_max=value, **more) for head, value in enumerate(logits)))


def test_two_checkpoints_are_compared_in_numbers_and_words():
    found = compare_tables({"before": table_of([4.0, 6.0]), "after": table_of([4.0, 70.0])})
    assert [row.values for row in found.rows] == [(6.0,), (70.0,)]
    told = str(found)
    assert "the largest |logit| went from 6 to 70" in told
    assert "logit growth: 0 heads with before, 1 with after." in told
    page = make_page(table_of([4.0]), title="t", beside=found)
    assert "Beside each other" in page
    assert "went from 6 to 70" in page
    assert found.to_dict()["differences"] == found.lines()


def test_the_same_weights_twice_differ_in_nothing():
    assert compare_tables({"one": table_of([4.0]), "two": table_of([4.0])}).lines() == []


def test_findings_are_ordered_by_how_serious_they_are():
    rows = [HeadRow(0, "a", 0, sink_share=0.9, keys=50), HeadRow(0, "a", 1, logit_max=500.0)]
    assert [each.kind for each in findings(rows)] == ["logit blow-up", "sink"]
