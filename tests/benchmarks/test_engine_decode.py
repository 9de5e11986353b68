"""Decoding benchmarks run at smoke sizes. Their values are meaningful only in `python -m benchmarks engine`."""

from __future__ import annotations

import pytest

from benchmarks import engine_decode
from benchmarks.engine import Row, Setting, by_rate, by_time, line, measure

SMOKE = Setting("cpu", smoke=True)


def test_speedup_of_rates_and_times_is_better_if_larger():
    assert by_rate("a", "tokens/s", 30.0, "baseline", 10.0, 2.0).speedup == pytest.approx(3)
    assert by_time("a", "s", 2.0, "goal", 8.0, 1.0).speedup == pytest.approx(4)
    missed = by_time("a", "s", 9.0, "goal", 8.0, 1.0)
    assert not missed.meets_target
    assert "NOT REACHED" in line(missed)
    assert missed.to_dict()["meets_target"] is False


def test_decode_cpu_compares_with_transformers_and_memory_bandwidth():
    rows = list(engine_decode.ON_CPU["decode_cpu"](SMOKE))
    assert [row.baseline for row in rows] == ["transformers", "reading the parameters once per token"]
    assert all(row.value > 0 and row.baseline_value > 0 for row in rows)


def test_decode_cpu_of_a_batch_compares_with_transformers():
    (row,) = engine_decode.ON_CPU["decode_cpu_batch_8"](SMOKE)
    assert row.baseline == "transformers"
    assert row.target == 1.5


@pytest.mark.parametrize(("run", "n"), [(engine_decode.prefill, 2), (engine_decode.first_token, 1)])
def test_benchmarks_without_library_baseline_yield_rows(run, n):
    rows = list(run(SMOKE))
    assert len(rows) == n
    assert all(isinstance(row, Row) and row.value > 0 for row in rows)


def test_translate_without_data_yields_no_rows():
    assert list(engine_decode.ON_GPU["translate_greedy"](SMOKE)) == []


def test_measure_with_filter_runs_matching_benchmarks(tmp_path):
    rows = measure(SMOKE, tmp_path / "engine.json", name_filter="decode_cpu")
    assert len(rows) == 3
    assert (tmp_path / "engine.json").is_file()
