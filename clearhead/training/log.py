"""What a run writes down as it goes: `log.jsonl`, one JSON object a line, and TensorBoard's files, if it is installed.

A resumed run first drops the rows beyond its step (and a last line torn by a kill), so the finished log has the rows of
a run that was never interrupted."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.disk import refusals, write_atomically
from clearhead.errors import StorageError

FILE_NAME = "log.jsonl"
Row = dict[str, Any]


def read_log(run: Path | str) -> list[Row]:
    """The rows of a run's log. A last line that is cut short, as a kill can leave it, is left out."""
    path = Path(run) / FILE_NAME if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise StorageError(f"there is no {path}: expected the log of a run, as training writes it")
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no object with a step")
        except ValueError as error:
            if number == len(lines):
                break  # no line end after it: torn while it was written
            raise StorageError(f"{path}, line {number}: not a row of a log ({error})") from error
        rows.append(row)
    return rows


class Log:
    """Appends rows. `after` is the step that the run stands at: rows beyond it are dropped."""

    def __init__(self, run: Path, *, after: int = 0) -> None:
        self.path = run / FILE_NAME
        if self.path.exists():
            kept = [row for row in read_log(run) if row["step"] <= after]
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:  # `purge_step` makes it forget what lies beyond the resumed step
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=after + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        with refusals(f"cannot write to {self.path}", then="make room and resume the run"):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in row.items():
                if self._board is not None and name not in ("kind", "step") and isinstance(value, int | float):
                    self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def sync(self) -> None:
        """Wait until all rows are on the disk: a checkpoint must not outlive the rows before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # of a row that is still in a buffer, because `write` could not write it
                if file is not None:
                    file.close()
