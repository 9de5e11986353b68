"""What a machine can do, in a few measured numbers, and how long a kernel then takes on it.

Two ceilings: operations a second of large matrix products, and bytes a second of large copies. A kernel takes its
operations at the one plus its bytes at the other: arithmetic hides the middle of the loading and storing, but not its
beginning and end, and in models, whose products are short, that is most of it. Four kinds of kernel stay far below
these on a GPU and have ceilings of their own there: products in half precision with a width that is no multiple of 8,
convolutions over as odd a number of channels, fused attention (each forward and backward), and sums over rows. Each is
measured (`bench/machine.py`) at one general shape, which is no model's.

Where models or kernels are small, more numbers matter: the time a kernel takes that has nothing to do, the time
the host takes to begin a pass and to issue a kernel (a faster GPU waits for it), and the memory that the matrix
library keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from clearhead.costs.operators import Ceiling, Kernel
from clearhead.disk import write_atomically
from clearhead.errors import ConfigError

_STORED = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """Measured numbers. Rates are per second, by dtype name where it matters; without a number of its own a kernel
    has the ordinary one."""

    name: str
    device: str
    matrix_rate: dict[str, float]
    bandwidth: float
    launch: float
    workspace: int = 0
    odd_rate: dict[str, float] = field(default_factory=dict)  # operations: a width is no multiple of 8
    odd_backward_rate: dict[str, float] = field(default_factory=dict)
    row_sum_rate: dict[str, float] = field(default_factory=dict)  # bytes, of a sum over many rows
    issue: dict[str, float] = field(default_factory=dict)  # host seconds a kernel: "forward", "training"
    begin: dict[str, float] = field(default_factory=dict)  # and a pass, whatever it does
    attention_rate: dict[str, float] = field(default_factory=dict)  # operations of the fused kernel
    attention_backward_rate: dict[str, float] = field(default_factory=dict)
    # Operations over channels that are no multiple of 8.
    convolution_rate: dict[str, float] = field(default_factory=dict)
    convolution_backward_rate: dict[str, float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel, dtype: torch.dtype) -> tuple[float, float, float]:
        """A kernel's arithmetic, its memory traffic, and its launch."""
        name = dtype_name(dtype)
        rates = {
            Ceiling.ODD: self.odd_rate,
            Ceiling.ODD_BACKWARD: self.odd_backward_rate or self.odd_rate,
            Ceiling.ATTENTION: self.attention_rate,
            Ceiling.ATTENTION_BACKWARD: self.attention_backward_rate,
            Ceiling.CONVOLUTION: self.convolution_rate or self.odd_rate,
            Ceiling.CONVOLUTION_BACKWARD: self.convolution_backward_rate or self.odd_backward_rate,
        }
        if name not in self.matrix_rate:
            known = ", ".join(self.matrix_rate)
            raise ConfigError(f"{self.name} was measured in {known}, not in {name}; choose one of those, or measure it")
        rate = rates.get(kernel.ceiling, {}).get(name, self.matrix_rate[name])
        bandwidths = self.row_sum_rate if kernel.ceiling is Ceiling.ROW_SUM else {}
        return kernel.operations / rate, kernel.n_bytes / bandwidths.get(name, self.bandwidth), self.launch

    def to_dict(self) -> dict[str, Any]:
        """What was measured of it, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Machine:
        """The machine that such values describe."""
        return cls(**data)

    @classmethod
    def read(cls, name: str | Path) -> Machine:
        """A stored description: one of those that come with the package ("h200"), or a file that `write` wrote."""
        path = _STORED / f"{str(name).lower()}.json"
        path = path if path.exists() else Path(name)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            known = ", ".join(sorted(file.stem for file in _STORED.glob("*.json")))
            raise ConfigError(
                f"device is {str(name)!r}; expected cpu, cuda, a machine that is known ({known}), or a file that "
                "clearhead cost --machine-out FILE wrote"
            ) from error

    def write(self, path: str | Path) -> None:
        """Store it as JSON, for `clearhead cost --device FILE`."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
