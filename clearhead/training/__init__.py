"""Training: `train("sort-dedup")`, and the parts it is made of."""

from __future__ import annotations

from clearhead.training.config import EMA, Constant, EarlyStopping, InverseRoot, LastK, TrainConfig, WarmupCosine
from clearhead.training.distributed import DDP, FSDP
from clearhead.training.figure import draw_run, draw_schedule
from clearhead.training.log import read_log
from clearhead.training.loop import Trainer
from clearhead.training.presets import PRESETS, TASKS
from clearhead.training.progress import Progress, ProgressBar, RunInfo
from clearhead.training.recipe import Recipe
from clearhead.training.run import Summary, train
from clearhead.training.stopping import DivergedError

__all__ = [
    "DDP",
    "EMA",
    "FSDP",
    "PRESETS",
    "TASKS",
    "Constant",
    "DivergedError",
    "EarlyStopping",
    "InverseRoot",
    "LastK",
    "Progress",
    "ProgressBar",
    "Recipe",
    "RunInfo",
    "Summary",
    "TrainConfig",
    "Trainer",
    "WarmupCosine",
    "draw_run",
    "draw_schedule",
    "read_log",
    "train",
]
