"""A machine's numbers, measured: the rates that `clearhead.costs.Machine` holds, each at one general shape that belongs
to no model, and what its host takes to issue a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from clearhead.costs import Machine, cost, preset
from clearhead.costs.machine import dtype_name
from clearhead.models import DecoderConfig

_HEAD_START = 40_000_000  # cycles of the device, about 20 ms
_DEEPER = 8  # times as many layers, where the host's part is told from the rest


def synchronise(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a GPU's allocator has given away at once during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def time_of(
    call: Callable[[], object], device: torch.device | str, *, seconds: float = 0.5, least: int = 3, busy: float = 0.0
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
    takes a model: see `with_issue`.)"""
    with one_thread(device):
        return _measured(torch.device(device), dtypes)


def _measured(where: torch.device, dtypes: tuple[torch.dtype, ...]) -> Machine:
    is_gpu = where.type == "cuda"
    named = {dtype_name(dtype): dtype for dtype in dtypes}
    own = named if is_gpu else {}  # on a CPU they change little
    # There is no fused kernel in float64.
    odd = {n: _odd_rates(where, dtype) for n, dtype in own.items()}
    convolution = {n: _convolution_rates(where, dtype) for n, dtype in own.items()}
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
        convolution_rate={name: forward for name, (forward, _) in convolution.items()},
        convolution_backward_rate={name: backward for name, (_, backward) in convolution.items()},
    )


def _matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    # Random numbers: a GPU is faster on zeros than it will ever be on data.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2 * n**3 / time_of(lambda: torch.mm(a, b, out=out), device, busy=0.5)


def _odd_rates(
    device: torch.device, dtype: torch.dtype, rows: int = 8192, d_in: int = 1024, d_out: int = 32767
) -> tuple[float, float]:
    """Of a linear map to an odd width, and of the gradients of its input and weights. A large square product of odd
    width is no measure of them: it is much faster."""
    x, w, y = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, d_in), (d_out, d_in), (rows, d_out)))

    def gradients() -> None:
        torch.mm(y, w)
        torch.mm(y.t(), x)

    operations = 2 * rows * d_in * d_out
    forward = operations / time_of(lambda: torch.mm(x, w.t()), device)
    return forward, 2 * operations / time_of(gradients, device)


def _convolution_rates(
    device: torch.device, dtype: torch.dtype, batch: int = 128, filters: int = 320, side: int = 18, patch: int = 12
) -> tuple[float, float]:
    """Of pictures with three channels cut into patches, and of the gradient of the filters."""
    pictures, kernels, maps = (batch, 3, *[side * patch] * 2), (filters, 3, patch, patch), (batch, filters, side, side)
    x, w, y = (torch.randn(shape, device=device).to(dtype) for shape in (pictures, kernels, maps))
    how = ((patch, patch), (0, 0), (1, 1), False, (0, 0), 1)

    def gradient() -> None:
        torch.ops.aten.convolution_backward(y, x, w, None, *how, (False, True, False))

    operations = 2 * y.numel() * w[0].numel()
    forward = operations / time_of(lambda: F.conv2d(x, w, stride=patch), device)
    return forward, operations / time_of(gradient, device)


def _attention_rates(
    device: torch.device, dtype: torch.dtype, batch: int = 4, heads: int = 16, tokens: int = 4096, width: int = 64
) -> tuple[float, float]:
    """Forward and backward of one long fused attention, by the products it is charged for: two, and five."""
    # (B, T, H, D) seen as (B, H, T, D), as the heads of a projection lie.
    shape = (4, batch, tokens, heads, width)
    q, k, v, gradient = torch.randn(shape, device=device).to(dtype).transpose(2, 3)
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


# ---------------------------------------------------------------------- the machine, with its host


def machine_here(device: str, dtypes: Iterable[torch.dtype]) -> Machine:
    """All numbers of this machine that predictions for these dtypes ask for."""
    return with_issue(measure_machine(device, tuple(dict.fromkeys(dtypes))))


def with_issue(machine: Machine, *, rounds: int = 10) -> Machine:
    """The machine's numbers and what its host takes to issue a kernel, and to begin a pass, in a quiet moment.

    Both come from a model too small to compute anything, at two depths: what the deeper one takes longer is
    issued. A host has slow moments that outlast one timing, so all are timed in turn, `rounds` times over, and the
    fastest count."""
    if machine.device == "cpu":
        return machine  # it issues nothing: it computes
    from clearhead.bench.trial import measure as _measure  # which times with what is above

    tiny = preset("tiny-decoder")
    assert isinstance(tiny, DecoderConfig)
    depths = [tiny, tiny.replace(n_layers=_DEEPER * tiny.n_layers)]
    how: dict[str, Any] = {"tokens": 8, "batch": 1, "dtype": torch.float32, "device": machine.device}
    cases = [(config, how | {"training": training}) for training in (False, True) for config in depths]
    took = [[_measure(config, **sizes, seconds=0.2).seconds for config, sizes in cases] for _ in range(rounds)]
    fastest = [min(times) for times in zip(*took, strict=True)]
    launches = [cost(config, **sizes).n_launches for config, sizes in cases]
    issue, begin = {}, {}
    for name, (small, deep) in (("forward", (0, 1)), ("training", (2, 3))):
        issue[name] = max(0.0, fastest[deep] - fastest[small]) / (launches[deep] - launches[small])
        begin[name] = max(0.0, fastest[small] - issue[name] * launches[small])
    return replace(machine, issue=issue, begin=begin)
