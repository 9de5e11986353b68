"""`import clearhead` needs only torch, and adds little work to importing torch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

# Makes modules appear uninstalled: imports fail, and find_spec returns None.
HIDE_MODULES = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.split(".")[0] in {hidden!r} else find(name, *where)
"""

USE_PUBLIC_NAMES = """
import torch
import clearhead as ch
from clearhead import masks
for name in ch.__all__:
    getattr(ch, name)
x = torch.randn(2, 5, 12)
assert ch.MultiHeadAttention(12, 3)(x, mask=masks.causal()).shape == x.shape
"""

USE_BUNDLED_MODELS = """
import clearhead as ch
from clearhead.errors import MissingDependencyError
print(len(ch.pipeline("shakespeare").generate("To be", max_new_tokens=3)))
try:
    ch.pipeline("en-es").translate("Hello world")
except MissingDependencyError as error:
    print(error)
"""

COUNT_CALLS = """
import cProfile, sys
import torch
before, profile = set(sys.modules), cProfile.Profile()
with profile:
    import clearhead
print(sum(entry.callcount for entry in profile.getstats()))
print(*sorted(set(sys.modules) - before))
"""


def run_python(code: str) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def other_dependencies() -> set[str]:
    """Return the top-level names of all dependencies except torch, and of libraries that only tests use."""
    names = {
        re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_")
        for requirement in importlib.metadata.requires("clearhead") or []
    }
    names |= {"sklearn", "PIL", "pandas", "triton", "tensorboard", "scipy", "pydantic"}
    # torch depends on sympy, and sympy on mpmath; numpy is optional for torch.
    return names - {"torch", "sympy", "mpmath"}


def test_import_without_optional_dependencies_works():
    hidden = other_dependencies()
    assert {"safetensors", "tokenizers", "typer", "rich", "matplotlib", "jaxtyping", "numpy"} <= hidden
    run_python(HIDE_MODULES.format(hidden=hidden) + USE_PUBLIC_NAMES)


def test_missing_tokenizer_library_is_reported_with_its_extra():
    """Characters need no library."""
    hidden = other_dependencies() - {"numpy", "safetensors"}
    length, message = run_python(HIDE_MODULES.format(hidden=hidden) + USE_BUNDLED_MODELS).splitlines()
    assert length == "3"
    assert message == "this tokenizer needs the tokenizers package: pip install 'clearhead[text]'"


def test_import_adds_few_calls_and_modules_to_torch():
    """Count work; `python -m benchmarks attention` measures time as a ratio to importing torch."""
    calls, modules = run_python(COUNT_CALLS).splitlines()
    own_modules = [name for name in modules.split() if name.split(".")[0] == "clearhead"]
    packages = {name.split(".")[1] for name in own_modules if "." in name}
    assert packages <= {"_core", "_version"}
    assert len(own_modules) < 90
    assert len(modules.split()) - len(own_modules) < 20, "expected only small parts of the standard library"
    assert int(calls) < 120_000
