"""A run that is killed ten times and resumed, compared with an uninterrupted run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead.training import train
from tests.training.killed import KILLS, LONG
from tests.training.tiny import rows

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGKILL and fork are how POSIX systems kill and start processes")
def test_run_killed_ten_times_equals_uninterrupted(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the killed processes, because another number of threads rounds differently
    try:
        train("sort-dedup", out=tmp_path / "whole", overrides=LONG)
    finally:
        torch.set_num_threads(threads)
    command = [sys.executable, "-m", "tests.training.killed", str(tmp_path / "killed"), "17"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith(f"kills {KILLS} status 0"), done.stdout + done.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    for part in ("step-00000090", "step-00000085", "model"):
        names = sorted(path.name for path in (tmp_path / "whole" / part).glob("*.safetensors"))
        assert names == sorted(path.name for path in (tmp_path / "killed" / part).glob("*.safetensors"))
        for name in names:
            expected, actual = (load_file(tmp_path / run / part / name) for run in ("whole", "killed"))
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[key], actual[key]) for key in expected)
