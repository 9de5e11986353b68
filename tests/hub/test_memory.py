"""Loading needs memory for one copy of the parameters, because tensors are memory-mapped."""

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

def status_bytes(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

checkpoint.load_third_party(sys.argv[1])
assert "torch._dynamo" not in sys.modules, "loading does not compile, and importing the compiler takes long"
for dtype in (torch.float32, torch.bfloat16):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    model = checkpoint.load_third_party(sys.argv[2], dtype=dtype)
    total = sum(weight.sum().item() for weight in model.parameters())
    assert total == total
    print(status_bytes("VmHWM") - before)
    del model
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_load_peak_memory_is_the_parameters_and_one_tensor(tmp_path):
    """In the stored dtype, and converted, when mappings are closed one by one."""
    large = LARGE.build()
    for name, model in (("small", SMALL.build()), ("large", large)):
        convert.export_third_party(model, tmp_path / name)
    command = [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert not process.returncode, process.stderr
    stored = [4 * weight.numel() for weight in large.parameters()]
    for peak, size in zip(map(int, process.stdout.split()), (sum(stored), sum(stored) / 2), strict=True):
        print(f"{peak / size:.3f} of the parameters' {size:,.0f} bytes")
        assert peak <= size + max(stored)
        assert peak >= 0.9 * size, "some pages were not touched"
