"""A small training run with several checkpoints."""

from __future__ import annotations

from pathlib import Path

from clearhead.training import train


def train_letters(folder: Path) -> Path:
    """Train a small model that sorts letters for 12 steps, with a checkpoint every 3 steps; return the folder."""
    settings = {"steps": 12, "warmup_steps": 2, "checkpoint_every": 3, "eval_every": 3, "keep": 5, "log_every": 2}
    train(
        "sort-dedup", out=folder, overrides=settings | {"device": "cpu", "data.n_train": 256, "data.n_validation": 16}
    )
    return folder
