from clearhead import training
from clearhead.training import Constant, InverseSqrt, Recipe, TrainConfig, WarmupCosine, read_log, train
from clearhead.training.presets import recipe


settings = {"steps": 2, "warmup_steps": 0, "device": "cpu", "n_train": 64, "n_validation": 16}
summary = train("sort-dedup", preset="small", out="run", overrides=settings)  # a RunSummary
len(read_log("run")) > 0  # → True

picture = training.draw_schedule(WarmupCosine(lr_max=1e-3, warmup_steps=10, total_steps=100), 100, "schedule.svg")

Recipe.from_toml(recipe("sort-dedup").to_toml()).task  # → 'sort-dedup'

TrainConfig(steps=100, schedule=Constant(1e-3), averaging=training.EMA(0.99)).steps  # → 100

(InverseSqrt(warmup_steps=4000), training.CheckpointAverage(k=5), training.EarlyStopping(patience=3))

(training.DDP(), training.FSDP())  # how several processes share a run: TrainConfig(parallel=…)

class Quiet(training.Progress):
    """Hears of a run's beginning (a RunInfo), its steps and its end; a ProgressBar shows them."""

bar = training.ProgressBar()

class Run:
    """In place of `wandb.init(project="mine")`."""
    def log(self, values, *, step):
        assert "train/loss" in values or "valid/loss" in values
few = {"steps": 2, "warmup_steps": 0, "n_train": 64, "n_validation": 16, "device": "cpu"}
summary = train("sort-dedup", out="tracked", overrides=few, progress=[training.ExperimentLogger(Run()), training.Progress()])

# `train` builds a Trainer from a recipe; it raises DivergedError if a loss is not finite.
(training.Trainer, training.DivergedError)

summary = train("sort-dedup", preset="small", out="another", overrides={"steps": 2, "warmup_steps": 0, "n_train": 64, "n_validation": 16})
picture = training.draw_run("another", "run.svg")
