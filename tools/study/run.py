"""Run the study: tune learning rates, then train until all jobs are done or the time limit is reached."""

from __future__ import annotations

import copy
import platform
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from clearhead._version import __version__
from clearhead.course.claims.study import ORIGINAL, PERMUTED, Study, Training
from clearhead.data.image_files import Images, load_images
from clearhead.data.image_transforms import ImageNormalize, prepare
from clearhead.errors import DataError
from tools.study.networks import NETWORKS, PATCH, Size, describe
from tools.study.plan import Job, Settings, factor, jobs
from tools.study.training import Pictures, Trainer

_TUNING_SEED = 1_000  # for tuning only; no row of the study uses it
_SPLIT_SEED = 2_000  # which training pictures are held out
_MOVING_SEED = 3_000  # the order of the moved patches

Say = Callable[[str], None]


def moved(images: Tensor, patch: int = PATCH) -> Tensor:
    """Permute the patches of all images (N, 1, height, width) by the same permutation."""
    N, C, height, width = images.shape
    rows, columns = height // patch, width // patch
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(_MOVING_SEED))
    cut = images.view(N, C, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    cut = cut.reshape(N, rows * columns, C, patch, patch)[:, order.to(images.device)]
    back = cut.view(N, rows, columns, C, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return back.reshape(N, C, height, width)


class Bench:
    """Images on the device, and one trainer per network."""

    def __init__(self, settings: Settings, train: Images, validation: Images, device: str, captured: bool) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.captured = captured
        self.trainers: dict[str, Trainer] = {}
        split = torch.randperm(len(train), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        if len(train) <= settings.held_out:
            raise DataError(
                f"got {len(train):,} training pictures, expected more than the {settings.held_out:,} held out"
            )
        pictures = self._load(train)
        self.held_out = pictures.part(split[: settings.held_out])
        training = pictures.part(split[settings.held_out :])
        check = self._load(validation)
        self.train = {ORIGINAL: training, PERMUTED: Pictures(moved(training.images), training.labels)}
        self.validation = {ORIGINAL: check, PERMUTED: Pictures(moved(check.images), check.labels)}

    @property
    def size(self) -> Size:
        height, width = self.held_out.images.shape[-2:]
        return height, width

    def _load(self, images: Images) -> Pictures:
        return Pictures(prepare(images.pixels, ImageNormalize()).to(self.device), images.labels.to(self.device))

    def trainer(self, name: str) -> Trainer:
        if name not in self.trainers:
            self.trainers[name] = Trainer(
                name, self.size, self.settings.optimisation, self.device, captured=self.captured
            )
        return self.trainers[name]

    def subset(self, n: int, seed: int, pictures: str) -> Pictures:
        """Return n training images; smaller subsets are contained in larger ones."""
        data = self.train[pictures]
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        return data.part(rows[:n])

    def tune(self, name: str) -> tuple[list[dict[str, float]], float]:
        """Return the held-out accuracy of each learning rate, and the seconds per update."""
        settings, trainer = self.settings, self.trainer(name)
        n = min(settings.tuning_size, len(self.train[ORIGINAL]))
        data = self.subset(n, _TUNING_SEED, ORIGINAL)
        tried, fastest = [], float("inf")
        for lr in settings.rates:
            seconds = trainer.run(data, steps=settings.tuning_steps, lr=lr, seed=_TUNING_SEED)
            tried.append({"lr": lr, "held_out": trainer.accuracy(self.held_out)})
            fastest = min(fastest, seconds)  # the first run also pays for choosing kernels
        return tried, fastest / settings.tuning_steps

    def train_one(self, job: Job, steps: int, lr: float) -> Training:
        trainer = self.trainer(job.network)
        data = self.subset(job.n_train, job.seed, job.pictures)
        seconds = trainer.run(data, steps=steps, lr=lr, seed=job.seed)
        return Training(
            network=job.network,
            n_train=len(data),
            seed=job.seed,
            pictures=job.pictures,
            steps=steps,
            lr=lr,
            validation=trainer.accuracy(self.validation[job.pictures]),
            training=trainer.accuracy(data),
            seconds=round(seconds, 3),
        )


def run(
    data: Path | str | None,
    out: Path,
    settings: Settings | None = None,
    *,
    begun: Study | None = None,
    only: Collection[str] = (),
    device: str | None = None,
    captured: bool = True,
    say: Say = print,
) -> Study:
    """Run the study on SVHN or other images of digits, and write it to `out` after every training.

    `begun` is a study to resume: its learning rates and lengths are reused, and its rows are not trained again.
    `only` restricts the networks; the smallest can be trained without a GPU.
    """
    settings = Settings() if settings is None else settings
    started = time.perf_counter()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32, as convolutions have it by default
    train, validation = load_images(data)
    bench = Bench(settings, train, validation, device, captured)
    planned = [j for j in jobs(settings, len(bench.train[ORIGINAL])) if not only or j.network in only]
    if begun is None:
        study = Study(_about(settings, bench))
        _tune(study, bench, planned, out, say)
        seconds_left = settings.seconds - (time.perf_counter() - started)
        study.about["recipe"]["steps_factor"] = round(factor(settings, planned, _pace(study), seconds_left), 3)
    else:
        study = Study(copy.deepcopy(begun.about), list(begun.rows))
        study.about.setdefault("taken_up", []).append(
            {"from_row": len(study.rows), "networks": list(only) or list(NETWORKS), **_where(bench.device)}
        )
    before, pace = study.about.get("seconds", 0.0), _pace(study)
    done = {Job(row.network, row.n_train, row.seed, row.pictures) for row in study.rows}
    for job in (job for job in planned if job not in done):
        steps = max(1, round(settings.steps(job.n_train) * study.about["recipe"]["steps_factor"]))
        if time.perf_counter() - started + steps * pace[job.network] > settings.seconds:
            say(f"skipped because of the time limit: {job}")
            continue
        row = bench.train_one(job, steps, study.about["networks"][job.network]["lr"])
        study.rows.append(row)
        study.about["seconds"] = round(before + time.perf_counter() - started, 1)
        study.write(out)
        say(
            f"{row.network:>9} {row.n_train:>6} {row.pictures} seed {row.seed}: "
            f"validation {row.validation:.4f}, training {row.training:.4f}, {row.seconds:.1f} s"
        )
    return study


def _tune(study: Study, bench: Bench, planned: list[Job], out: Path, say: Say) -> None:
    """Choose the learning rate of each network by the same rule, and measure its seconds per update."""
    for name in dict.fromkeys(job.network for job in planned):
        tried, pace = bench.tune(name)
        best = max(tried, key=lambda result: result["held_out"])["lr"]
        study.about["networks"][name] |= {
            "lr": best,
            "tuning": tried,
            "update_ms": round(pace * 1e3, 3),
            "captured": bench.trainer(name).graph is not None,
        }
        study.write(out)
        say(f"{name}: {pace * 1e3:.2f} ms per update, learning rate {best:g}")


def _pace(study: Study) -> dict[str, float]:
    """Return the seconds per update of each network."""
    return {name: entry["update_ms"] / 1e3 for name, entry in study.about["networks"].items() if "update_ms" in entry}


def _about(settings: Settings, bench: Bench) -> dict[str, object]:
    return {
        "study": "a vision Transformer against a convolutional network as the data grow",
        "command": "python -m tools.study --data svhn --out vit-against-cnn.json",
        **_where(bench.device),
        "data": {
            "training": len(bench.train[ORIGINAL]),
            "held_out": len(bench.held_out),
            "validation": len(bench.validation[ORIGINAL]),
            "picture": list(bench.size),
        },
        "recipe": {
            **asdict(settings),
            "optimiser": "AdamW, cross-entropy, no augmentation, no dropout; the weights after the last update",
            "learning_rate": "the best of `rates` on held-out training pictures, for each network on its own",
            "numbers": "float32, matrix products in TF32" if bench.device.type == "cuda" else "float32",
        },
        "networks": {name: describe(name, bench.size) for name in NETWORKS},
    }


def _where(device: torch.device) -> dict[str, dict[str, str | None]]:
    """Describe the machine and the versions."""
    return {
        "machine": {
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "processor": platform.machine(),
            "system": platform.system(),
        },
        "versions": {
            "clearhead": __version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    }
