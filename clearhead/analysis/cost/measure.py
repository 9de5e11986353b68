"""A machine's numbers, measured, and a run of a model beside what they predict for it.

Each rate of a `Machine` is measured at one general shape that belongs to no model. A run is one
training step or one forward pass with random inputs. On a GPU its peak is the allocator's own. On a CPU every tensor's
storage is watched from its making to its end, which sees what torch returns from its operations and not what a kernel
needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clearhead.analysis.cost.machine import Machine, dtype_name
from clearhead.analysis.cost.predict import build_module, cost, model_builder, preset, set_impl
from clearhead.analysis.cost.recorder import OpRecorder
from clearhead.analysis.cost.result import Cost
from clearhead.analysis.cost.timing import on_device, one_thread, peak_of, time_of
from clearhead.analysis.inputs.example import Example, Tokens, example
from clearhead.masks import Mask
from clearhead.models import DecoderConfig

_DEEPER = 8  # times as many layers, where the host's part is told from the rest


def measure_machine(device: torch.device | str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Machine:
    """Measure large products, copies and sums, a long attention and many tiny additions on a device.

    Host times need a model; see `with_issue`."""
    where = torch.device(device)
    is_gpu = where.type == "cuda"
    named = {dtype_name(dtype): dtype for dtype in dtypes}
    own = named if is_gpu else {}  # on a CPU they change little
    rates: dict[str, dict[str, float]] = {}
    with one_thread(device):
        for kind, measured in _BOTH_WAYS.items():
            # There is no fused kernel in float64.
            both = {n: measured(where, d) for n, d in own.items() if kind != "attention" or d.itemsize < 8}
            rates[f"{kind}_flops"] = {name: forward for name, (forward, _) in both.items()}
            rates[f"{kind}_backward_flops"] = {name: backward for name, (_, backward) in both.items()}
        return Machine(
            name=torch.cuda.get_device_name(where) if is_gpu else "CPU, one thread",
            device=where.type,
            gemm_flops={n: _matrix_rate(where, dtype, 8192 if is_gpu else 1024) for n, dtype in named.items()},
            bandwidth=_bandwidth(where, 2**30 if is_gpu else 2**27),
            kernel_launch_s=_launch(where),
            workspace_bytes=_workspace(where, dtypes) if is_gpu else 0,
            reduction_bandwidth={name: _row_sum_rate(where, dtype) for name, dtype in own.items()},
            **rates,
        )


def _matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    # Random numbers: a GPU is faster on zeros than it will ever be on data.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2 * n**3 / time_of(lambda: torch.mm(a, b, out=out), busy=0.5)


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
    forward = operations / time_of(lambda: torch.mm(x, w.t()))
    return forward, 2 * operations / time_of(gradients)


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
    forward = operations / time_of(lambda: F.conv2d(x, w, stride=patch))
    return forward, operations / time_of(gradient)


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

    forward = 2 * product * n / time_of(ahead, busy=0.5)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v)

    def back() -> None:
        for _ in range(n):
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return forward, 5 * product * n / time_of(back, busy=0.5)


_BOTH_WAYS: dict[str, Callable[[torch.device, torch.dtype], tuple[float, float]]] = {
    "unaligned_gemm": _odd_rates, "unaligned_convolution": _convolution_rates, "attention": _attention_rates,
}  # fmt: skip


def _bandwidth(device: torch.device, n_bytes: int) -> float:
    source = torch.randn(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / time_of(lambda: target.copy_(source))


def _row_sum_rate(device: torch.device, dtype: torch.dtype, rows: int = 2**15, width: int = 1024) -> float:
    x = torch.randn(rows, width, device=device).to(dtype)
    return x.numel() * x.element_size() / time_of(lambda: x.sum(0))


def _launch(device: torch.device, n: int = 500) -> float:
    """Time an operation takes when there is nothing to compute: what running one costs the device."""
    x = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(n):
            torch.add(x, 1.0)

    if device.type != "cuda":
        return time_of(many, seconds=0.2) / n
    return median(on_device(many)[0] for _ in range(5)) / 1e3 / n


def _workspace(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> int:
    """Bytes that stay allocated after a small product whose tensors are gone: the library's own."""
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier products, so that they are seen being made
    before = torch.cuda.memory_allocated(device)
    for dtype in dtypes:
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.randn(64, 64, device=device, dtype=dtype)).sum().backward()
        del layer
    torch.cuda.synchronize()
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
    tiny = preset("tiny-decoder")
    assert isinstance(tiny, DecoderConfig)
    depths = [tiny, tiny.replace(n_layers=_DEEPER * tiny.n_layers)]
    how: dict[str, Any] = {"tokens": 8, "batch": 1, "dtype": torch.float32, "device": machine.device}
    cases = [(config, how | {"training": training}) for training in (False, True) for config in depths]
    took = [[measure(config, **sizes, seconds=0.2).seconds for config, sizes in cases] for _ in range(rounds)]
    fastest = [min(times) for times in zip(*took, strict=True)]
    launches = [cost(config, **sizes).kernel_launches for config, sizes in cases]
    issue, begin = {}, {}
    for name, (small, deep) in (("forward", (0, 1)), ("training", (2, 3))):
        issue[name] = max(0.0, fastest[deep] - fastest[small]) / (launches[deep] - launches[small])
        begin[name] = max(0.0, fastest[small] - issue[name] * launches[small])
    return replace(machine, host_launch_s=issue, host_pass_s=begin)


# ---------------------------------------------------------------------- what was predicted, run here


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    seconds: float
    peak_bytes: int


def beside(predicted: Cost, machine: Machine, measured: dict[str, float]) -> dict[str, Any]:
    """A prediction for this machine beside what was measured on it, what limits it, and predicted over measured."""
    took = predicted.time(machine)
    told = {"peak_bytes": predicted.memory.peak.value + machine.workspace_bytes, "seconds": took.seconds}
    ratio = {name: told[what] / measured[what] for name, what in (("memory", "peak_bytes"), ("time", "seconds"))}
    return {"predicted": told, "measured": measured, "bottleneck": took.bottleneck, "ratio": ratio}


def measure(
    subject: Any,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cpu",
    seconds: float = 0.5,
) -> Measured:
    """Builds the model, runs it until it is steady, then takes the peak of one run and, unless `seconds` is 0, the time
    of several."""
    model = model_builder(subject)
    made = set_impl(build_module(model.build, str(device) if model.is_fresh else "cpu"), impl).to(
        device=device, dtype=dtype
    )
    how: dict[str, Any] = {"tokens": tokens, "batch": batch, "dtype": dtype, "device": device, "mask": mask}
    given = example(made, model.label, **how, inputs=model.inputs)
    with one_thread(device):
        step = _step(made, given, training)
        step()
        peak = _peak(step, made, given, device)
        return Measured(time_of(step, seconds=seconds) if seconds else 0.0, peak)


def _step(model: nn.Module, given: Example, training: bool) -> Callable[[], None]:
    """One training step, or one forward pass without gradients."""
    model.train(training)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if training else None

    def step() -> None:
        if optimiser is None:
            with torch.inference_mode():
                given.run(model)
            return
        optimiser.zero_grad(set_to_none=True)
        given.loss(model).backward()
        optimiser.step()

    return step


def _peak(step: Callable[[], None], model: nn.Module, given: Example, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        step()
        return peak_of(step)
    with OpRecorder() as watch:
        for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *given.tensors):
            if tensor is not None:
                watch.track(tensor)
        step()  # the optimiser's state is seen when it is touched, so the peak of a second run is the one that counts
        began = watch.events
        step()
    return watch.log.peak_bytes(since=began, until=watch.events)
