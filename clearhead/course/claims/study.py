"""Results file of the study: machine, versions, recipe, and one row per training; complete after every row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError

NAME = "vit-against-cnn.json"
ORIGINAL = "whole"
PERMUTED = "patches moved"  # one permutation of the patches for all images


@dataclass(frozen=True)
class Training:
    """Result of one training; accuracies are between 0 and 1."""

    network: str
    n_train: int
    seed: int
    pictures: str
    steps: int
    lr: float
    validation: float
    training: float
    seconds: float


@dataclass
class Study:
    """Results of the study; `about` contains machine, versions, data, recipe, networks and tuning."""

    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Training] = field(default_factory=list)

    def of(self, network: str, n_train: int, pictures: str = ORIGINAL) -> dict[int, Training]:
        """Return the rows of one network at one size, by seed."""
        expected = (network, n_train, pictures)
        return {row.seed: row for row in self.rows if (row.network, row.n_train, row.pictures) == expected}

    def sizes(self, networks: Sequence[str], pictures: str = ORIGINAL) -> list[int]:
        """Return the numbers of training images at which all of these networks were trained."""
        sizes = sorted({row.n_train for row in self.rows})
        return [n for n in sizes if all(self.of(name, n, pictures) for name in networks)]

    def write(self, path: Path) -> None:
        document = {**self.about, "rows": [asdict(row) for row in self.rows]}
        write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path | None = None) -> Study:
        """Read a results file; by default the one in the package."""
        source = resources.files("clearhead.course.claims") / "results" / NAME if path is None else path
        try:
            document = json.loads(source.read_text(encoding="utf-8"))
            expected = [f.name for f in fields(Training)]
            rows = [Training(**{name: row[name] for name in expected}) for row in document.pop("rows")]
        except FileNotFoundError as error:
            hint = "write it with python -m tools.study"
            raise StorageError(f"file {source} does not exist; {hint}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"is not a results file of the study ({error!r}); write it with python -m tools.study"
            raise StorageError(f"{source} {problem}") from error
        return cls(document, rows)
