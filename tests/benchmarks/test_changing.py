"""`python -m benchmarks sparse --changing`: layouts, lengths, masks of peers, and sections at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import changing
from benchmarks.changing.layouts import MEAN_DOCUMENT, PATTERNS, draw_layout
from benchmarks.changing.lengths import random_lengths
from benchmarks.changing.options import move_data
from clearhead.errors import ConfigError
from clearhead.masks import causal, documents, window

SMOKE = changing.options_for("cpu", smoke=True)


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (3, 211), (2, 1)])
def test_draw_layout_covers_every_position_with_documents(batch, length):
    layout = draw_layout(3, batch, length, "cpu")
    assert layout.ids.shape == layout.prefix_ids.shape == (batch, length)
    sizes = torch.cat([row.bincount() for row in layout.ids])
    assert torch.equal(layout.starts.diff(), sizes.int())
    assert layout.starts[-1] == batch * length
    assert layout.longest == sizes.max()
    in_prefix = layout.prefix_ids >= 0
    assert torch.equal(layout.prefix_ids[in_prefix], layout.ids[in_prefix])
    assert layout.lengths.shape == (batch,)
    assert ((layout.lengths >= 1) & (layout.lengths <= length)).all()


def test_draw_layout_of_another_step_differs_and_of_the_same_step_is_a_new_tensor():
    first, again, other = draw_layout(1, 1, 300, "cpu"), draw_layout(1, 1, 300, "cpu"), draw_layout(2, 1, 300, "cpu")
    assert torch.equal(first.ids, again.ids)
    assert first.ids.data_ptr() != again.ids.data_ptr()
    assert not torch.equal(first.ids, other.ids)


def test_draw_layout_has_documents_of_the_stated_mean():
    layout = draw_layout(0, 4, 65536, "cpu")
    assert 4 * 65536 / (len(layout.starts) - 1) == pytest.approx(MEAN_DOCUMENT, rel=0.15)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_for_flex_attention_equals_mask(name):
    layout = draw_layout(5, 3, 131, "cpu")
    b, q, k = torch.arange(3)[:, None, None], torch.arange(131)[:, None], torch.arange(131)
    dense = PATTERNS[name].mask(layout).dense(131)[:, 0].expand(3, 131, 131)
    visible = PATTERNS[name].visible(layout, b, q, k).expand(3, 131, 131)
    assert torch.equal(visible, dense)


def test_random_lengths_are_distinct_and_within_a_quarter():
    lengths = random_lengths(4096)
    assert len(set(lengths)) == len(lengths)
    assert (min(lengths), max(lengths)) == (3072, 5120)
    assert lengths != sorted(lengths)


def test_move_data_keeps_the_mask():
    mask = causal() & documents([0, 0, 1, 1, 1]) | ~window(1, 0).T
    assert torch.equal(move_data(mask, "cpu").dense(5), mask.dense(5))
    structural = causal() & window(3, 0)
    assert move_data(structural, "cpu") is structural


def test_jobs_of_all_sections_have_distinct_keys():
    options = changing.options_for("cuda")
    keys = [job.row.key for jobs in changing.SECTIONS.values() for job in jobs(options)]
    assert len(keys) == len(set(keys))
    assert len(keys) == 4 + 2 * 4 * 5 + 2 * 18 + 9 + 1 + (9 + 3) * 2 * 18


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("layouts", {"repeated", "changing", "auto", "dense"}),
        ("lengths", {"repeated", "changing"}),
        ("auto", {"auto", "sparse", "sdpa", "best"}),
    ],
)
def test_section_measures_all_implementations(section, expected):
    options = replace(SMOKE, name_filter="documents & window" if section == "layouts" else "the course")
    rows = changing.measure(options, sections=[section])
    assert rows
    assert all(row.times.keys() == expected and row.notes == {} for row in rows)


def test_host_section_compares_with_limits():
    rows = changing.measure(replace(SMOKE, name_filter="causal"), sections=["host"])
    assert [row.name for row in rows] == ["attend under causal()"]
    assert rows[0].times["limit"] > rows[0].times["sdpa"]


def test_training_section_trains_on_packed_and_padded_documents():
    pytest.importorskip("transformers")
    (row,) = changing.measure(SMOKE, sections=["training"])
    assert row.notes == {}
    assert row.times.keys() == {"backend", "apply_mask", "padding"}


def test_sparse_changing_writes_rows_and_summary(benchmarks_cli, tmp_path):
    out = tmp_path / "changing.json"
    arguments = ("--changing", "--smoke", "--section", "layouts", "--filter", "padding", "--device", "cpu")
    result = benchmarks_cli("sparse", *arguments, "--out", out)
    assert result.code == 0
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == ["padding"]
    assert {entry["ratio"] for entry in document["summary"]} == {"changing / repeated", "changing / dense"}
    again = benchmarks_cli("sparse", *arguments, "--out", out, "--resume", out)
    assert again.code == 0
    assert json.loads(out.read_text())["rows"] == document["rows"]


def test_flex_section_covers_all_masks_lengths_and_batches_once():
    points = [
        (job.row.name, *job.row.sizes.values()) for job in changing.SECTIONS["flex"](changing.options_for("cuda"))
    ]
    assert {name for name, *_ in points} == set(PATTERNS)
    assert {length for _, _, length in points} == {4096, 16384, 65536, 131072}
    assert {batch for _, batch, _ in points} == {1, 4}
    selected = replace(changing.options_for("cuda"), lengths=(4096,), batches=(4,))
    assert len(list(changing.SECTIONS["flex"](selected))) == len(PATTERNS)


def test_flex_row_without_compilation_has_a_note():
    job = next(changing.SECTIONS["flex"](changing.options_for("cuda")))
    assert job.ahead
    assert job.without_peer is not None
    job.without_peer(job.row)
    assert job.row.notes.keys() == {"flex"}


@pytest.mark.bad_input
def test_measure_unknown_section_raises_config_error():
    with pytest.raises(ConfigError, match="section is 'layout'; expected one of layouts, lengths"):
        changing.measure(SMOKE, sections=["layout"])
