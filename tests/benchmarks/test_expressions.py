"""`python -m benchmarks expressions`: the peers compute the same masks and biases; sections run at tiny sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import expressions
from benchmarks.expressions import biases, flex, grids
from clearhead.attention import attend
from clearhead.errors import ConfigError
from clearhead.masks import catalogue, causal

SMOKE = expressions.options_for("cpu", smoke=True)


@pytest.mark.parametrize(("grid", "side"), [((5, 7), 3), ((4, 6, 5), 3), ((13, 13), 13)])
def test_predicate_for_flex_attention_equals_neighborhood(grid, side):
    n = math.prod(grid)
    positions = torch.arange(n)
    zero = torch.zeros((), dtype=torch.int64)
    visible = flex.neighborhood(grid, side)(zero, zero, positions[:, None], positions)
    assert torch.equal(visible, catalogue.neighborhood(grid, side).dense(n))


@pytest.mark.parametrize("name", biases.MODIFICATIONS)
def test_modification_for_flex_attention_equals_attend(name):
    modification, n, heads = biases.MODIFICATIONS[name], 37, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, n, 8, generator=generator, dtype=torch.float64).unbind()
    parameters = modification.parameters(heads, "cpu").detach()
    head, i, j = (torch.arange(size) for size in (heads, n, n))
    scores = q @ k.mT / math.sqrt(8)
    modify = modification.score_mod(parameters, n)
    scores = modify(scores, torch.zeros((), dtype=torch.int64), head[:, None, None], i[:, None], j)
    weights = scores.masked_fill(i[:, None] < j, -math.inf).softmax(-1)
    out = attend(q, k, v, causal(), impl="reference", **modification.options(parameters))
    torch.testing.assert_close(out, weights @ v)


def test_jobs_cover_the_sizes_of_the_targets():
    keys = [job.row.key for jobs in expressions.SECTIONS.values() for job in jobs(expressions.options_for("cuda"))]
    assert len(keys) == len(set(keys)) == 2 * 4 + 4 + 8
    lengths = {job.row.sizes["length"] for job in grids.jobs(expressions.options_for("cuda"))}
    assert lengths == {64 * 64, 128 * 128, 256 * 256}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("grids", {"same mask", "new mask", "planned"}),
        ("biases", {"bias", "plain"}),
        ("plans", {"bias", "plain"}),
    ],
)
def test_section_measures_all_implementations(section, expected, tmp_path):
    rows = expressions.measure(SMOKE, tmp_path / "results.json", sections=[section])
    assert rows
    assert all(row.times.keys() == expected and row.notes == {} for row in rows)
    assert len(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]) == len(rows)


def test_unknown_section_is_rejected():
    with pytest.raises(ConfigError, match="expected one of plans, biases, grids"):
        expressions.measure(SMOKE, sections=["grid"])
