"""Plan the trainings of the study, most informative first, within a time limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clearhead.course.claims.study import ORIGINAL, PERMUTED
from clearhead.errors import ConfigError
from tools.study.training import Optimisation

# Range of the factor that scales the length of all trainings.
_SHORTEST, _LONGEST = 0.5, 2.0
_RESERVE = 0.1  # share of the remaining time, for evaluation and slow trainings


@dataclass(frozen=True)
class Settings:
    """Size of the study. `sizes` are numbers of training images; larger numbers than available mean all."""

    seconds: float = 210.0
    sizes: tuple[int, ...] = (250, 1_000, 4_000, 16_000, 1_000_000)
    moved_sizes: tuple[int, ...] = (1_000, 4_000)
    large_sizes: tuple[int, ...] = (1_000, 4_000, 1_000_000)
    seeds: int = 3
    more_seeds: int = 2  # for sizes up to `tuning_size`, where variance is largest
    held_out: int = 2_000  # training images excluded from training, for choosing the learning rate
    tuning_size: int = 4_000
    tuning_steps: int = 600
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    min_steps: int = 1_000
    max_steps: int = 4_000
    optimisation: Optimisation = Optimisation()

    def __post_init__(self) -> None:
        counts = (*self.sizes, self.seeds, self.held_out, self.tuning_size, self.tuning_steps, self.min_steps)
        if min(counts) < 1 or not self.rates or not self.seconds > 0 or self.min_steps > self.max_steps:
            raise ConfigError(
                f"{self}: expected sizes, seeds, steps and seconds above 0, and a learning rate to choose"
            )

    def steps(self, n: int) -> int:
        """Return the number of updates for n images: one per two images, within bounds, for every network."""
        return min(max(n // 2, self.min_steps), self.max_steps)


@dataclass(frozen=True)
class Job:
    """One training: network, number and kind of images, and seed."""

    network: str
    n_train: int
    seed: int
    pictures: str = ORIGINAL


def jobs(settings: Settings, n_available: int) -> list[Job]:
    """Return all trainings: the two compared networks once at every size, then repetitions and controls."""

    def cross(
        networks: Sequence[str], sizes: Iterable[int], seeds: Iterable[int], pictures: str = ORIGINAL
    ) -> list[Job]:
        counts = sorted({min(n, n_available) for n in sizes})
        return [Job(name, n, seed, pictures) for seed in seeds for n in counts for name in networks]

    pair, seeds, later = ("vit", "cnn"), range(settings.seeds), range(1, settings.seeds)
    small = [n for n in settings.sizes if n <= settings.tuning_size]
    more = range(settings.seeds, settings.seeds + settings.more_seeds)
    candidates = [
        *cross(pair, settings.sizes, [0]),
        *cross(pair, small, later),
        *cross(pair, settings.moved_sizes[:1], seeds, PERMUTED),
        *cross(("exam-cnn",), settings.sizes, seeds),
        *cross(("exam-cnn",), settings.moved_sizes, seeds, PERMUTED),
        *cross(("vit-large",), settings.large_sizes, [0]),
        *cross(pair, settings.sizes[-1:], later),
        *cross(pair, settings.moved_sizes, seeds, PERMUTED),
        *cross(("vit-large",), settings.large_sizes, later),
        *cross(pair, settings.sizes, later),
        *cross(pair, small, more),
    ]
    return list(dict.fromkeys(candidates))


def factor(settings: Settings, planned: Sequence[Job], pace: Mapping[str, float], seconds_left: float) -> float:
    """Return the factor by which all trainings are scaled, given seconds per update and the remaining seconds."""
    needed = sum(settings.steps(job.n_train) * pace[job.network] for job in planned)
    return min(max(seconds_left * (1 - _RESERVE) / needed, _SHORTEST), _LONGEST) if needed else 1.0
