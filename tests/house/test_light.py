"""`import clearhead` needs torch alone, and adds little to importing torch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

# As if it were not installed: an import of it fails, and find_spec finds nothing.
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.split(".")[0] in {hidden!r} else find(name, *where)
"""

TRY = """
import torch
import clearhead as ch
from clearhead import masks, positions
for name in ch.__all__:
    getattr(ch, name)
x = torch.randn(2, 5, 12)
assert ch.MultiHeadAttention(12, 3)(x, mask=masks.causal()).shape == x.shape
"""

COUNT = """
import cProfile, sys
import torch
before, profile = set(sys.modules), cProfile.Profile()
with profile:
    import clearhead
print(sum(entry.callcount for entry in profile.getstats()))
print(*sorted(set(sys.modules) - before))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def other_dependencies() -> set[str]:
    """The top-level names of every dependency but torch, and of all that the tests use."""
    names = {
        re.split(r"[^\w-]", wanted)[0].lower().replace("-", "_")
        for wanted in importlib.metadata.requires("clearhead") or []
    }
    names |= {"sklearn", "PIL", "pandas", "triton", "tensorboard", "scipy", "pydantic"}
    # sympy is torch's own dependency, numpy is optional to torch: torch tries it and goes on.
    return names - {"torch", "sympy"}


def test_import_needs_torch_alone():
    hidden = other_dependencies()
    assert {"safetensors", "tokenizers", "typer", "rich", "matplotlib", "jaxtyping", "numpy"} <= hidden
    run(HIDE.format(hidden=hidden) + TRY)


def test_import_adds_little_to_torch():
    """Work is counted here; `clearhead bench core` has the time, as a ratio to importing torch."""
    calls, modules = run(COUNT).splitlines()
    ours = [name for name in modules.split() if name.split(".")[0] == "clearhead"]
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert rooms <= {
        "_lazy",
        "_numbers",
        "_shapes",
        "_version",
        "attention",
        "config",
        "disk",
        "errors",
        "layers",
        "masks",
        "models",
        "positions",
        "values",
    }
    assert len(ours) < 90
    assert len(modules.split()) - len(ours) < 20, "small parts of the standard library alone"
    assert int(calls) < 120_000
