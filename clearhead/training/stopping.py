"""The ways a run ends before its last step: a signal, and numbers that are no longer finite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from clearhead.errors import ClearheadError

_SHOWN = 16


@dataclass
class Interruption:
    """Set by SIGINT or SIGTERM; the run looks at it between steps."""

    signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def listening() -> Iterator[Interruption]:
    """Inside the block the first Ctrl-C or SIGTERM is only noted; a second one acts as it did before.

    Python lets only the main thread listen for signals; in any other thread this does nothing."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        interruption.signal = signal.Signals(number).name
        signal.signal(number, before[number])

    for number in map(int, (signal.SIGINT, signal.SIGTERM)):
        # A handler that was not set from Python reads as None and cannot be put back; the default stands in for it.
        before[number] = signal.getsignal(number) or signal.SIG_DFL
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Taken:
    """Which examples one batch was made of, as it was planned for all processes together."""

    epoch: int
    number: int  # of the batch in its epoch, from 0
    of: int
    rows: Tensor

    def __str__(self) -> str:
        shown = ", ".join(str(row) for row in self.rows[:_SHOWN].tolist())
        more = f", … ({len(self.rows)} of them)" if len(self.rows) > _SHOWN else ""
        return f"epoch {self.epoch}, batch {self.number} of {self.of}, examples {shown}{more}"


class DivergedError(ClearheadError, ArithmeticError):
    """The loss or its gradient is no longer a finite number. `step` and `batches` say where it happened."""

    def __init__(self, what: str, step: int, batches: Sequence[Taken], checkpoint: Path | None) -> None:
        self.step, self.batches, self.checkpoint = step, tuple(batches), checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint from before it"
        super().__init__(
            f"{what} at step {step} ({'; '.join(map(str, batches))}), expected finite numbers; "
            f"the run was stopped and {kept}. "
            "Look at these examples, or start again with a lower lr_max, a longer warm-up or a smaller clip"
        )
