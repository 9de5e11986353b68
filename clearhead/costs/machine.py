"""What a machine can do, in a few measured numbers, and how long a kernel then takes on it.

Two ceilings: operations a second of large matrix products, and bytes a second of large copies. A kernel takes its
operations at the one plus its bytes at the other: arithmetic hides the middle of the loading and storing, but not its
beginning and end, and in models, whose products are short, that is most of it. Three kinds of kernel stay far below
these on a GPU and have ceilings of their own there: products in half precision with a width that is no multiple of 8,
fused attention (forward and backward), and sums over rows. Each is measured at one general shape, which is no model's.

Where models or kernels are small, more numbers matter: the time a kernel takes that has nothing to do, the time the
host takes to begin a pass and to issue a kernel (a faster GPU waits for it), and the memory that the matrix library
keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from clearhead.costs.operators import Ceiling, Kernel
from clearhead.disk import write_atomically
from clearhead.errors import ConfigError

_STORED = Path(__file__).parent / "machines"
_HEAD_START = 40_000_000  # cycles of the device, about 20 ms

__all__ = ["Machine", "dtype_name", "measure_machine", "one_thread", "synchronise", "time_of"]


@dataclass(frozen=True)
class Machine:
    """Measured numbers. Rates are per second, by dtype name where it matters; those that were not measured are taken to
    be the ordinary ones.
    """

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

    def seconds(self, kernel: Kernel, dtype: torch.dtype) -> tuple[float, float, float]:
        """A kernel's arithmetic, its memory traffic, and its launch."""
        name = dtype_name(dtype)
        rates = {
            Ceiling.ODD: self.odd_rate,
            Ceiling.ODD_BACKWARD: self.odd_backward_rate or self.odd_rate,
            Ceiling.ATTENTION: self.attention_rate,
            Ceiling.ATTENTION_BACKWARD: self.attention_backward_rate,
        }
        rate = rates.get(kernel.ceiling, {}).get(name, self.matrix_rate[name])
        bandwidths = self.row_sum_rate if kernel.ceiling is Ceiling.ROW_SUM else {}
        return (
            kernel.operations / rate,
            kernel.n_bytes / bandwidths.get(name, self.bandwidth),
            self.launch,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Machine:
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
                f"device is {str(name)!r}; expected cpu, cuda, a machine that is known ({known}), or a file that clearhead "
                "cost --machine-out FILE wrote"
            ) from error

    def write(self, path: str | Path) -> None:
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def synchronise(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def time_of(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    seconds: float = 0.5,
    least: int = 3,
    busy: float = 0.0,
) -> float:
    """What a call takes in a quiet moment: one in ten is faster. As many as fit into `seconds`, but `least`, after two.

    A shared host has slow moments, which are its neighbours' and not the machine's. A GPU multiplies faster in the
    first moments than it can for long: `busy` seconds of the same go before, where the lasting rate is wanted."""
    began = time.perf_counter()
    n = 0
    while n < 2 or time.perf_counter() - began < busy:
        call()
        synchronise(device)
        n += 1
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < least or (time.perf_counter() - began < seconds and len(times) < 100):
        start = time.perf_counter()
        call()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 10]


@contextmanager
def one_thread(device: torch.device | str) -> Iterator[None]:
    """On a CPU, one thread: threads that wait for each other on a shared machine measure the neighbours."""
    before = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_machine(device: torch.device | str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Machine:
    """The numbers of this device: large products, copies and sums, one long attention, many tiny additions. (`issue`
    takes a model: see `costs/measure.py`.)
    """
    with one_thread(device):
        return _measure_machine(torch.device(device), dtypes)


def _measure_machine(where: torch.device, dtypes: tuple[torch.dtype, ...]) -> Machine:
    is_gpu = where.type == "cuda"
    named = {dtype_name(dtype): dtype for dtype in dtypes}
    own = named if is_gpu else {}  # on a CPU they change little
    # There is no fused kernel in float64.
    odd = {n: _odd_rates(where, dtype) for n, dtype in own.items()}
    attention = {n: _attention_rates(where, dtype) for n, dtype in own.items() if dtype.itemsize < 8}
    return Machine(
        name=torch.cuda.get_device_name(where) if is_gpu else "CPU, one thread",
        device=where.type,
        matrix_rate={n: _matrix_rate(where, dtype, 8192 if is_gpu else 1024) for n, dtype in named.items()},
        bandwidth=_bandwidth(where, 2**30 if is_gpu else 2**27),
        launch=_launch(where),
        workspace=_workspace(where, dtypes) if is_gpu else 0,
        odd_rate={name: forward for name, (forward, _) in odd.items()},
        odd_backward_rate={name: backward for name, (_, backward) in odd.items()},
        row_sum_rate={name: _row_sum_rate(where, dtype) for name, dtype in own.items()},
        attention_rate={name: forward for name, (forward, _) in attention.items()},
        attention_backward_rate={name: backward for name, (_, backward) in attention.items()},
    )


def _matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    # Random numbers: a GPU is faster on zeros than it will ever be on data.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2 * n**3 / time_of(lambda: torch.mm(a, b, out=out), device, busy=0.5)


def _odd_rates(
    device: torch.device, dtype: torch.dtype, rows: int = 8192, d_in: int = 1024, d_out: int = 32767
) -> tuple[float, float]:
    """Of a linear map to an odd width, and of the gradients of its input and weights.
    A large square product of odd width is no measure of them: it is much faster.
    """
    x, w, y = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, d_in), (d_out, d_in), (rows, d_out)))

    def gradients() -> None:
        torch.mm(y, w)
        torch.mm(y.t(), x)

    operations = 2 * rows * d_in * d_out
    forward = operations / time_of(lambda: torch.mm(x, w.t()), device)
    return forward, 2 * operations / time_of(gradients, device)


def _attention_rates(
    device: torch.device,
    dtype: torch.dtype,
    batch: int = 4,
    heads: int = 16,
    tokens: int = 4096,
    width: int = 64,
) -> tuple[float, float]:
    """Forward and backward of one long fused attention, by the products it is charged for: two, and five."""
    # (B, T, H, D) seen as (B, H, T, D), as the heads of a projection lie.
    q, k, v, gradient = (
        torch.randn(batch, tokens, heads, width, device=device).to(dtype).transpose(1, 2) for _ in range(4)
    )
    product, n = 2 * batch * heads * tokens**2 * width, 4

    def ahead() -> None:
        for _ in range(n):  # in a row, so that what the host takes to begin is not counted for each
            F.scaled_dot_product_attention(q, k, v)

    forward = 2 * product * n / time_of(ahead, device, busy=0.5)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v)

    def back() -> None:
        for _ in range(n):
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return forward, 5 * product * n / time_of(back, device, busy=0.5)


def _bandwidth(device: torch.device, n_bytes: int) -> float:
    source = torch.randn(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / time_of(lambda: target.copy_(source), device)


def _row_sum_rate(device: torch.device, dtype: torch.dtype, rows: int = 2**15, width: int = 1024) -> float:
    x = torch.randn(rows, width, device=device).to(dtype)
    return x.numel() * x.element_size() / time_of(lambda: x.sum(0), device)


def _launch(device: torch.device, n: int = 500) -> float:
    """Time an operation takes when there is nothing to compute: what running one costs the device."""
    x = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(n):
            torch.add(x, 1.0)

    if device.type != "cuda":
        return time_of(many, device, seconds=0.2) / n
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)  # until all are issued: the device then runs them without waiting
        start.record()
        many()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / n)
    return median(times)


def _workspace(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> int:
    """Bytes that stay allocated after a small product whose tensors are gone: the library's own."""
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier products, so that they are seen being made
    before = torch.cuda.memory_allocated(device)
    for dtype in dtypes:
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.randn(64, 64, device=device, dtype=dtype)).sum().backward()
        del layer
    synchronise(device)
    return max(0, torch.cuda.memory_allocated(device) - before)
