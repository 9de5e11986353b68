"""Rows with times of several implementations: ratios, targets, failures, resuming and the summary."""

from __future__ import annotations

import json
import signal
from functools import partial

import pytest

from benchmarks.ahead import Background, run_ahead
from benchmarks.results import machine
from benchmarks.timed import (
    MAX_ROUNDS,
    Contender,
    Job,
    Timing,
    abandon_after,
    line,
    read_rows,
    run_jobs,
    summarize,
    summary_cells,
    time_contenders,
)
from clearhead.errors import StorageError


def row(name, value, peer, target=1.5, section="a"):
    times = {"value": value, "peer": peer}
    return Timing(section=section, name=name, sizes={"length": 7}, times=times, targets={"value / peer": target})


def fill(row, value):
    row.times |= {"value": value, "peer": 2.0}
    row.targets["value / peer"] = 1.5


def fail(row):
    raise ValueError("no such\nkernel")


def job(name, measure):
    return Job(Timing(section="a", name=name), measure)


def test_timing_reports_ratios_of_measured_pairs_and_missed_targets():
    timing = row("x", 4.0, 2.0)
    timing.targets |= {"value / best": 1.0, "peer / value": None}
    assert timing.ratios == {"value / peer": 2.0, "peer / value": 0.5}
    assert timing.missed == ["value / peer"]
    assert row("x", 3.0, 2.0).missed == []  # exactly the target
    assert "value / peer: 2.00 TOO SLOW" in line(timing)
    assert timing.to_dict()["missed"] == ["value / peer"]


def test_time_contenders_runs_all_alternately_with_new_arguments():
    calls: list[tuple[str, int]] = []
    timing = Timing(section="a", name="x")
    contenders = [
        Contender("twice", lambda step: calls.append(("twice", step)), lambda step: 2 * step),
        Contender("once", lambda step: calls.append(("once", step))),
    ]
    time_contenders(timing, contenders, seconds=1e6, device="cpu")
    assert sorted(step for name, step in calls if name == "once") == list(range(MAX_ROUNDS + 2))
    assert sorted(step for name, step in calls if name == "twice") == [2 * n for n in range(MAX_ROUNDS + 2)]
    assert timing.times.keys() == timing.spread.keys() == {"twice", "once"}
    assert timing.notes == {}


def test_time_contenders_with_slow_call_keeps_its_single_measurement():
    calls: list[int] = []
    timing = Timing(section="a", name="x")
    time_contenders(timing, [Contender("slow", calls.append)], seconds=-1.0, device="cpu")
    assert calls == [0, 1]
    assert timing.times["slow"] > 0


def test_time_contenders_calls_a_hopeless_contender_once(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr("benchmarks.timed.HOPELESS", 0.0)
    monkeypatch.setattr("benchmarks.timed.MIN_HOPELESS", 0.0)
    timing = Timing(section="a", name="x")
    contenders = [Contender("good", str), Contender("hopeless", calls.append, stops_early=True)]
    time_contenders(timing, contenders, seconds=1e6, device="cpu")
    assert calls == [0]
    assert timing.times.keys() == {"good", "hopeless"}


def test_abandon_after_raises_in_the_innermost_block_and_keeps_the_outer_limit():
    before, _ = signal.getitimer(signal.ITIMER_REAL)  # of pytest-timeout, if it is active
    with abandon_after(1000.0):
        with pytest.raises(TimeoutError, match="abandoned after 0 s"), abandon_after(0.01):
            signal.pause()
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining <= 1000
        with pytest.raises(TimeoutError, match="abandoned after 1000 s"):
            signal.raise_signal(signal.SIGALRM)
    after, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (after > 0) == (before > 0)


@pytest.mark.parametrize("failing_step", [0, 1, 5])
def test_time_contenders_notes_a_failure_and_measures_the_others(failing_step):
    def run(step):
        if step == failing_step:
            raise RuntimeError("out of memory")

    timing = Timing(section="a", name="x")
    time_contenders(timing, [Contender("failing", run), Contender("good", str)], seconds=1e6, device="cpu")
    assert timing.notes == {"failing": "RuntimeError: out of memory"}
    assert timing.times.keys() == {"good"}


def test_run_jobs_keeps_failed_rows_and_resumes_from_its_file(tmp_path):
    out = tmp_path / "rows.json"
    rows = run_jobs([job("good", partial(fill, value=1.0)), job("bad", fail)], out)
    assert [timing.name for timing in rows] == ["good", "bad"]
    assert rows[1].notes == {"row": "ValueError: no such kernel"}
    assert read_rows(out) == rows
    measured: list[str] = []
    jobs = [job("good", fail), job("new", partial(fill, value=4.0))]
    resumed = run_jobs(jobs, out, on_row=lambda timing: measured.append(timing.name), earlier=rows)
    assert measured == ["new"]
    assert [timing.name for timing in resumed] == ["good", "bad", "new"]
    document = json.loads(out.read_text())
    assert document["summary"][0]["met"] == 1
    assert document["rows"][2]["missed"] == ["value / peer"]


def test_run_jobs_without_time_returns_earlier_rows():
    earlier = [row("x", 1.0, 2.0)]
    assert run_jobs([job("new", fail)], seconds=-1.0, earlier=earlier) == earlier


def test_run_jobs_replaces_rows_that_follow_from_others(tmp_path):
    def finish(rows):
        return [Timing(section="total", name="count", facts={"rows": len(rows)})]

    first = run_jobs([job("x", partial(fill, value=1.0))], finish=finish)
    second = run_jobs([job("y", partial(fill, value=1.0))], earlier=first, finish=finish)
    assert [(timing.name, timing.facts) for timing in second if timing.section == "total"] == [("count", {"rows": 3})]


def test_summarize_names_best_and_worst_point_of_each_section():
    rows = [row("x", 1.0, 2.0), row("y", 4.0, 2.0), row("z", 2.0, 2.0), row("w", 1.0, 1.0, None, "b")]
    first, second = summarize(rows)
    assert (first["rows"], first["met"], first["target"], first["median"]) == (3, 2, 1.5, 1.0)
    assert first["best"] == {"ratio": 0.5, "point": "x, length 7"}
    assert first["worst"] == {"ratio": 2.0, "point": "y, length 7"}
    assert (second["section"], second["target"], second["met"]) == ("b", None, None)
    assert summary_cells(rows)[0][2:4] == ("≤ 1.5", "2 of 3")


@pytest.mark.bad_input
def test_read_rows_of_another_machine_raises_storage_error(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"machine": {**machine(), "gpu": "NVIDIA X1"}, "rows": []}))
    with pytest.raises(StorageError, match="was measured on NVIDIA X1"):
        read_rows(path)
    path.write_text("[]")
    with pytest.raises(StorageError, match="cannot be read as results"):
        read_rows(path)


def test_background_ends_with_its_tasks():
    background = Background({"a": fail}, workers=0, seconds=10.0)
    background.wait(float("inf"))
    background.wait(-1.0)
    assert background.done == set()


def test_background_reports_tasks_that_succeed():
    background = Background({"good": partial(len, ""), "bad": partial(fail, None)}, workers=1, seconds=60.0)
    background.wait(60.0)
    assert background.done == {"good"}


def test_run_ahead_without_workers_runs_nothing():
    assert run_ahead({"a": fail}, workers=0, seconds=10.0) == set()
    assert run_ahead({}, workers=2, seconds=10.0) == set()
