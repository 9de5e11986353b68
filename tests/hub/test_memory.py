"""Loading holds the weights once: what is mapped from the file is the model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from clearhead.hub import convert
from clearhead.models import DecoderConfig
from clearhead.nn import RMSNorm, SwiGLU
from clearhead.nn.positions import Rotary

SIZES = {"d_model": 256, "n_heads": 4, "bias": False, "norm": RMSNorm(), "activation": SwiGLU(), "positions": Rotary()}
LARGE = DecoderConfig(vocab_size=20_011, n_layers=11, d_ff=1024, tie_embeddings=False, **SIZES)
SMALL = DecoderConfig(vocab_size=11, n_layers=11, d_ff=7, tie_embeddings=False, **SIZES)

# Imports and an equal number of small modules are in memory before the count begins; every page of the model is
# touched before it ends.
MEASURE = """
import pathlib, re, sys, torch
from clearhead.hub import checkpoint

def held(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

checkpoint.load_third_party(sys.argv[1])
assert "torch._dynamo" not in sys.modules, "loading does not compile, and torch's compiler is long to import"
for dtype in (torch.float32, torch.bfloat16):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = held("VmRSS")
    model = checkpoint.load_third_party(sys.argv[2], dtype=dtype)
    total = sum(weight.sum().item() for weight in model.parameters())
    assert total == total
    print(held("VmHWM") - before)
    del model
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux tells it")
def test_memory_peaks_at_the_weights_and_one_tensor(tmp_path):
    """As they are stored, and made numbers of another kind on the way, where the file's own are let go one by one."""
    large = LARGE.build()
    for name, model in (("small", SMALL.build()), ("large", large)):
        convert.export_third_party(model, tmp_path / name)
    command = [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert not said.returncode, said.stderr
    stored = [4 * weight.numel() for weight in large.parameters()]
    for taken, size in zip(map(int, said.stdout.split()), (sum(stored), sum(stored) / 2), strict=True):
        print(f"{taken / size:.3f} of the weights' {size:,.0f} bytes")
        assert taken <= size + max(stored)
        assert taken >= 0.9 * size, "or not every page was touched"
