"""The study's file: what it was made on and with, how, and one row a training. It is whole after every row."""

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
WHOLE = "whole"
MOVED = "patches moved"  # every picture's patches in one other order, the same for all pictures


@dataclass(frozen=True)
class Training:
    """One training and what came of it. Accuracies are shares of 1."""

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
    """All of it. `about` holds machine, versions, data, recipe, networks and the tuning."""

    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Training] = field(default_factory=list)

    def of(self, network: str, n_train: int, pictures: str = WHOLE) -> dict[int, Training]:
        """The rows of one network at one size, by seed."""
        expected = (network, n_train, pictures)
        return {row.seed: row for row in self.rows if (row.network, row.n_train, row.pictures) == expected}

    def sizes(self, networks: Sequence[str], pictures: str = WHOLE) -> list[int]:
        """The numbers of training pictures at which all of these networks were trained."""
        sizes = sorted({row.n_train for row in self.rows})
        return [n for n in sizes if all(self.of(name, n, pictures) for name in networks)]

    def write(self, path: Path) -> None:
        document = {**self.about, "rows": [asdict(row) for row in self.rows]}
        write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path | None = None) -> Study:
        """From a file; without one, the outcome that comes with the package."""
        source = resources.files("clearhead.course.claims") / "results" / NAME if path is None else path
        try:
            document = json.loads(source.read_text(encoding="utf-8"))
            expected = [f.name for f in fields(Training)]
            rows = [Training(**{name: row[name] for name in expected}) for row in document.pop("rows")]
        except FileNotFoundError as error:
            wanted_is = "expected a study's outcome; make it with python -m tools.study"
            raise StorageError(f"there is no file {source}: {wanted_is}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wrong = f"is not a study's outcome ({error!r}): make it again with python -m tools.study"
            raise StorageError(f"{source} {wrong}") from error
        return cls(document, rows)
