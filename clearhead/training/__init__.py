"""Training: `train("sort-dedup")` runs a recipe; `Trainer` trains a custom model on a custom task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead._core.lazy import lazy

if TYPE_CHECKING:
    from clearhead.training.averaging import EMA as EMA
    from clearhead.training.averaging import CheckpointAverage as CheckpointAverage
    from clearhead.training.callbacks import ExperimentLogger as ExperimentLogger
    from clearhead.training.callbacks import Progress as Progress
    from clearhead.training.callbacks import ProgressBar as ProgressBar
    from clearhead.training.callbacks import RunInfo as RunInfo
    from clearhead.training.callbacks import read_log as read_log
    from clearhead.training.config import EarlyStopping as EarlyStopping
    from clearhead.training.config import TrainConfig as TrainConfig
    from clearhead.training.distributed import DDP as DDP
    from clearhead.training.distributed import FSDP as FSDP
    from clearhead.training.launch import train as train
    from clearhead.training.plots import draw_run as draw_run
    from clearhead.training.plots import draw_schedule as draw_schedule
    from clearhead.training.presets import PRESETS as PRESETS
    from clearhead.training.presets import TASKS as TASKS
    from clearhead.training.recipe import Recipe as Recipe
    from clearhead.training.schedules import Constant as Constant
    from clearhead.training.schedules import InverseSqrt as InverseSqrt
    from clearhead.training.schedules import WarmupCosine as WarmupCosine
    from clearhead.training.summary import RunSummary as RunSummary
    from clearhead.training.trainer import Trainer as Trainer
    from clearhead.training.trainer_state import DivergedError as DivergedError

lazy(__name__)
