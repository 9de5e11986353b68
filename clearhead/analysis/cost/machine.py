"""Measured performance of a machine, and the predicted duration of a kernel on it.

There are two main ceilings: the FLOP/s of large matrix products and the bandwidth of large copies. The duration of a
kernel is its FLOPs at the first plus its bytes at the second: arithmetic overlaps the middle of loading and storing but
not its start and end, which dominate in the short products of models. Four kinds of kernel stay far below these
ceilings on a GPU and have separate ones: half-precision products with a width that is not a multiple of 8, convolutions
over such a number of channels, fused attention (each forward and backward), and reductions over rows. Each ceiling is
measured (`analysis/cost/measure.py`) at one general shape that is not taken from any model.

For small models and kernels more numbers matter: the duration of an empty kernel, the time the host needs to start a
pass and to launch a kernel (a faster GPU waits for its host), and the workspace of the matrix library."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from clearhead._core.atomic_io import write_atomically
from clearhead._core.call_types import Kwargs
from clearhead._core.json_types import JSONObject
from clearhead.analysis.cost.operators import Ceiling, KernelCost
from clearhead.errors import ConfigError

_BUNDLED = Path(__file__).parent / "machines"
_LEGACY_KEYS = {
    "matrix_rate": "gemm_flops",
    "launch": "kernel_launch_s",
    "workspace": "workspace_bytes",
    "odd_rate": "unaligned_gemm_flops",
    "odd_backward_rate": "unaligned_gemm_backward_flops",
    "row_sum_rate": "reduction_bandwidth",
    "issue": "host_launch_s",
    "begin": "host_pass_s",
    "attention_rate": "attention_flops",
    "attention_backward_rate": "attention_backward_flops",
    "convolution_rate": "unaligned_convolution_flops",
    "convolution_backward_rate": "unaligned_convolution_backward_flops",
}


@dataclass(frozen=True)
class Machine:
    """Measured performance of one machine, as stored in its JSON file.

    A missing specific rate falls back to the general one.

    Args:
        name: Name of the device.
        device: "cuda" or "cpu".
        gemm_flops: FLOP/s of large matrix products, by dtype name.
        bandwidth: Bytes per second of large copies.
        kernel_launch_s: Seconds of a kernel that does nothing.
        workspace_bytes: Memory that the matrix library keeps.
        unaligned_gemm_flops: FLOP/s if a width is not a multiple of 8, by dtype name.
        unaligned_gemm_backward_flops: The same for the gradients.
        reduction_bandwidth: Bytes per second of a sum over many rows, by dtype name.
        host_launch_s: Host seconds per kernel, for "forward" and "training".
        host_pass_s: Host seconds per pass that do not depend on its kernels, for "forward" and "training".
        attention_flops: FLOP/s of fused attention, by dtype name.
        attention_backward_flops: The same for its gradients.
        unaligned_convolution_flops: FLOP/s over channels that are not a multiple of 8, by dtype name.
        unaligned_convolution_backward_flops: The same for the gradients.

    Example:
        >>> cost("gpt2", tokens=1024).time(Machine.read("h200")).seconds
    """

    name: str
    device: str
    gemm_flops: dict[str, float]
    bandwidth: float
    kernel_launch_s: float
    workspace_bytes: int = 0
    unaligned_gemm_flops: dict[str, float] = field(default_factory=dict)
    unaligned_gemm_backward_flops: dict[str, float] = field(default_factory=dict)
    reduction_bandwidth: dict[str, float] = field(default_factory=dict)
    host_launch_s: dict[str, float] = field(default_factory=dict)
    host_pass_s: dict[str, float] = field(default_factory=dict)
    attention_flops: dict[str, float] = field(default_factory=dict)
    attention_backward_flops: dict[str, float] = field(default_factory=dict)
    unaligned_convolution_flops: dict[str, float] = field(default_factory=dict)
    unaligned_convolution_backward_flops: dict[str, float] = field(default_factory=dict)

    def seconds(self, kernel: KernelCost, dtype: torch.dtype) -> tuple[float, float, float]:
        """Return the seconds of a kernel for arithmetic, memory traffic and launch."""
        name = dtype_name(dtype)
        rates = {
            Ceiling.UNALIGNED_GEMM: self.unaligned_gemm_flops,
            Ceiling.UNALIGNED_GEMM_BACKWARD: self.unaligned_gemm_backward_flops or self.unaligned_gemm_flops,
            Ceiling.ATTENTION: self.attention_flops,
            Ceiling.ATTENTION_BACKWARD: self.attention_backward_flops,
            Ceiling.UNALIGNED_CONVOLUTION: self.unaligned_convolution_flops or self.unaligned_gemm_flops,
            Ceiling.UNALIGNED_CONVOLUTION_BACKWARD: (
                self.unaligned_convolution_backward_flops or self.unaligned_gemm_backward_flops
            ),
        }
        if name not in self.gemm_flops:
            dtypes = ", ".join(self.gemm_flops)
            raise ConfigError(
                f"{self.name} was measured in {dtypes}, not in {name}; choose one of those dtypes, or measure it"
            )
        rate = rates.get(kernel.ceiling, {}).get(name, self.gemm_flops[name])
        bandwidths = self.reduction_bandwidth if kernel.ceiling is Ceiling.REDUCTION else {}
        return kernel.flops / rate, kernel.n_bytes / bandwidths.get(name, self.bandwidth), self.kernel_launch_s

    def to_dict(self) -> JSONObject:
        """Return the measured values as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Kwargs) -> Machine:
        """Create a machine from the values of `to_dict`, or of a file written by version 0.2."""
        return cls(**{_LEGACY_KEYS.get(key, key): value for key, value in data.items()})

    @classmethod
    def read(cls, name: str | Path) -> Machine:
        """Read a bundled machine ("h200"), or a file written by `write`.

        Raises:
            ConfigError: The machine or file does not exist, or the file is not a machine.
        """
        path = _BUNDLED / f"{str(name).lower()}.json"
        path = path if path.exists() else Path(name)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (AttributeError, OSError, TypeError, ValueError) as error:
            bundled = ", ".join(sorted(file.stem for file in _BUNDLED.glob("*.json")))
            raise ConfigError(
                f"device is {str(name)!r}; expected cpu, cuda, a bundled machine ({bundled}), or a file written by "
                "clearhead cost --save-machine FILE"
            ) from error

    def write(self, path: str | Path) -> None:
        """Write the machine as JSON, for `clearhead cost --device FILE`."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
