"""Strict mypy accepts the README's Python and a user's file, and infers the types of results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import clearhead
from tests.support.readme import fenced

ROOT = Path(__file__).parents[2]

USER = """
from pathlib import Path

import torch
from torch import nn

import clearhead as ch
from clearhead import analysis, hub, masks
from clearhead.analysis.checks import CheckReport, Ids, ModuleSpec
from clearhead.models import tiny_decoder


def report(model: nn.Module) -> CheckReport:
    return ch.check(ModuleSpec(model, inputs=Ids(50)), causal=True, only=["causality"])


def parameters() -> int:
    return int(ch.cost("tiny-decoder", tokens=7).parameters.value)


def shown(folder: Path) -> list[str]:
    trained = hub.pipeline(folder)
    album = analysis.attention_report(trained, "How are you?")
    return [made.target for made in hub.translations(trained, [album.title])]


model = ch.Decoder(tiny_decoder())
reveal_type(ch.check(model))
reveal_type(ch.cost(model, tokens=7))
x = torch.randn(1, 2, 3, 5)
reveal_type(ch.attend(x, x, x, masks.causal()))
ch.check(model, seed="0")  # an error: mypy sees the signatures, and not Any
"""


def test_strict_mypy_accepts_a_typed_user_package(tmp_path):
    assert (Path(clearhead.__file__).parent / "py.typed").is_file()
    package = tmp_path / "typed_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text(USER)
    for number, code in enumerate(fenced("python")):
        (package / f"readme_{number}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--python-version=3.11"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "typed_user"), str(package)]
    process = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    errors = [line for line in process.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, process.stdout + process.stderr
    assert re.search(r'own\.py:\d+: error: Argument "seed" to "check" has incompatible type', errors[0])
    kinds = re.findall(r'Revealed type is "([\w.]+)"', process.stdout)
    assert kinds == [
        "clearhead.analysis.checks.report.CheckReport",
        "clearhead.analysis.cost.result.Cost",
        "torch._tensor.Tensor",
    ]
