"""The decoding rows run, on tiny sizes; what they measure is for `python -m benchmarks engine`."""

from __future__ import annotations

import pytest

from benchmarks import engine_decode
from benchmarks.engine import Row, Setting, by_rate, by_time, line, measure

TRIAL = Setting("cpu", trial=True)


def test_more_is_better_in_every_ratio():
    assert by_rate("a", "tokens/s", 30.0, "peer", 10.0, 2.0).ratio == pytest.approx(3)
    assert by_time("a", "s", 2.0, "goal", 8.0, 1.0).ratio == pytest.approx(4)
    missed = by_time("a", "s", 9.0, "goal", 8.0, 1.0)
    assert not missed.holds
    assert "NOT REACHED" in line(missed)
    assert missed.to_dict()["holds"] is False


def test_decoding_beside_transformers():
    rows = list(engine_decode.ON_CPU["decode_cpu"](TRIAL))
    assert [row.peer for row in rows] == ["transformers", "reading the weights once a token"]
    assert all(row.ours > 0 and row.peer_value > 0 for row in rows)


@pytest.mark.parametrize(("make", "n"), [(engine_decode.read_prompts, 2), (engine_decode.first_token, 1)])
def test_rows_without_a_peer(make, n):
    rows = list(make(TRIAL))
    assert len(rows) == n
    assert all(isinstance(row, Row) and row.ours > 0 for row in rows)


def test_the_translator_needs_its_sentences():
    assert list(engine_decode.ON_GPU["translate_greedy"](TRIAL)) == []


def test_rows_by_name(tmp_path):
    rows = measure(TRIAL, tmp_path / "engine.json", only="decode_cpu")
    assert len(rows) == 2
    assert (tmp_path / "engine.json").is_file()
