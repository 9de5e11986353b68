"""Loading holds the weights once: what is mapped from the file is the model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from clearhead import interop
from clearhead.layers import RMSNorm, SwiGLU
from clearhead.models import DecoderConfig
from clearhead.positions import Rotary

SIZES = {"d_model": 256, "n_heads": 4, "bias": False, "norm": RMSNorm(), "activation": SwiGLU(), "positions": Rotary()}
LARGE = DecoderConfig(vocab_size=20_011, n_layers=11, d_ff=1024, tied=False, **SIZES)
SMALL = DecoderConfig(vocab_size=11, n_layers=1, d_ff=7, tied=False, **SIZES)

# What loading imports is in memory before the count begins; every page of the model is touched before it ends.
MEASURE = """
import pathlib, re, sys, torch
from clearhead import interop

def held(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

interop.load(sys.argv[1])
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = held("VmRSS")
model = interop.load(sys.argv[2])
total = sum(weight.sum().item() for weight in model.parameters())
assert total == total
print(held("VmHWM") - before)
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux tells it")
def test_memory_peaks_at_the_weights_and_one_tensor(tmp_path):
    for name, config in (("small", SMALL), ("large", LARGE)):
        interop.export(config.build(), tmp_path / name)
    command = [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    model = LARGE.build()
    sizes = [weight.numel() * weight.element_size() for weight in model.parameters()]
    print(f"{taken / sum(sizes):.3f} of the weights' {sum(sizes):,} bytes")
    assert taken <= sum(sizes) + max(sizes)
    assert taken >= 0.9 * sum(sizes), "or not every page was touched"
