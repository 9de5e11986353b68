"""A run small enough for a test: five letters, a decoder with a few hundred parameters, milliseconds per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clearhead.training import Progress, read_log

SETTINGS: dict[str, Any] = {
    "n_symbols": 5,
    "max_length": 7,
    "n_train": 97,
    "n_validation": 23,
    "d_model": 12,
    "n_heads": 3,
    "n_layers": 1,
    "d_ff": 13,
    "batch.budget": 131,
    "batch.multiple": 1,
    "steps": 11,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 4,
    "checkpoint_every": 3,
    "lr_max": 0.01,
    "device": "cpu",
}
TIMES = ("time", "tokens_per_s")


def rows(run: Path | str) -> list[dict[str, Any]]:
    """A run's log without what a clock decides."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_log(run)]


def final(folder):
    """Every stored tensor of the last checkpoint."""
    newest = max(path for path in folder.iterdir() if path.name.startswith("step-"))
    return {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}


def exported(folder):
    return load_file(folder / "model/model.safetensors")


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    for first, second in ((final(a), final(b)), (exported(a), exported(b))):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


class At(Progress):
    """Does something once, after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, step):
        if step == self.step:
            self.act()
