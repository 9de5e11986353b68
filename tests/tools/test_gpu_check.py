"""`tools/gpu_check.py`: selected tests and benchmarks, and checks that fail or run out of time."""

from __future__ import annotations

import sys
import time

from benchmarks.cli import app
from tools.gpu_check import ROOT, Check, checks, gpu_tests, run

FAR_DEADLINE = time.monotonic() + 1e6  # eleven days, which no machine is too busy to meet


def python(code):
    return Check("example", (sys.executable, "-c", code))


def test_gpu_tests_contain_all_files_of_that_name():
    files = gpu_tests(ROOT)
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_gpu.py")} <= set(files)
    assert "sparse" in files[0]


def test_checks_name_existing_benchmarks(tmp_path):
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    benchmarks = [check for check in checks(tmp_path) if "benchmarks" in check.command]
    assert len({check.name for check in benchmarks}) == len(benchmarks)
    assert {check.command[3] for check in benchmarks} == commands - {"study", "explore", "cost"}


def test_run_reports_status_and_last_line():
    result = run(python("print('first'); print('last'); raise SystemExit(3)"), FAR_DEADLINE)
    assert (result.status, result.passed) == (3, False)
    assert result.line().endswith("last")
    assert "failed (3)" in result.line()
    assert run(python("pass"), FAR_DEADLINE).passed


def test_run_past_the_deadline_ends_the_process():
    result = run(python("import time; print('started', flush=True); time.sleep(10**6)"), 0.0)
    assert result.status is None
    assert not result.passed
    assert "out of time" in result.line()
