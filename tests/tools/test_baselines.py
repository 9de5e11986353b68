"""The startup hook that declares torchvision's operators."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

from tools.baselines import HOOK

DECLARE = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.mark.parametrize("before", ["", DECLARE], ids=["undeclared", "declared by the user"])
def test_hook_lets_torchvision_be_imported_whoever_declares_its_operators(before):
    pytest.importorskip("torchvision", reason="the extra `peers` installs it")
    # -S: without the startup files of this environment, one of which is the hook.
    path = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r})\n"
    script = path + HOOK + before + "\nimport torchvision, torch\nassert torch.ops.torchvision.nms"
    process = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
