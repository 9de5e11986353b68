"""Measure a machine, and compare measured runs of a model with the prediction.

Each rate of a `Machine` is measured at one general shape that is not taken from a model. A run is one training step or
one forward pass with random inputs. On a GPU, its peak memory is that of the allocator. On a CPU, it is the sum of the
live storages of tensors, which excludes the temporary buffers of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from clearhead._core.json_types import JSONObject
from clearhead.analysis.cost.machine import Machine, dtype_name
from clearhead.analysis.cost.op_recorder import OpRecorder, checkpointing
from clearhead.analysis.cost.predict import build_module, cost, model_builder, preset, set_impl
from clearhead.analysis.cost.result import Cost
from clearhead.analysis.cost.timing import on_device, one_thread, peak_of, time_of
from clearhead.analysis.inputs.example import Example, Tokens, example
from clearhead.masks import Mask
from clearhead.models import DecoderConfig

_DEPTH_FACTOR = 8  # ratio of the depths whose difference is the host time per launch


def measure_machine(device: torch.device | str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Machine:
    """Measure large matrix products, copies and sums, a long attention and many tiny additions on a device.

    Host times need a model; see `add_host_times`.

    Args:
        device: The device.
        dtypes: Dtypes of the matrix products and, on a GPU, of the other kernels.

    Returns:
        The machine, without host times.
    """
    device_ = torch.device(device)
    is_gpu = device_.type == "cuda"
    dtypes_by_name = {dtype_name(dtype): dtype for dtype in dtypes}
    kernel_dtypes = dtypes_by_name if is_gpu else {}  # on a CPU these rates matter little
    rates: dict[str, dict[str, float]] = {}
    with one_thread(device):
        for kind, measure_rates in _KERNEL_RATES.items():
            # There is no fused kernel in float64.
            rates_by_dtype = {
                n: measure_rates(device_, d) for n, d in kernel_dtypes.items() if kind != "attention" or d.itemsize < 8
            }
            rates[f"{kind}_flops"] = {name: forward for name, (forward, _) in rates_by_dtype.items()}
            rates[f"{kind}_backward_flops"] = {name: backward for name, (_, backward) in rates_by_dtype.items()}
        return Machine(
            name=torch.cuda.get_device_name(device_) if is_gpu else "CPU, one thread",
            device=device_.type,
            gemm_flops={
                n: _matrix_rate(device_, dtype, 8192 if is_gpu else 1024) for n, dtype in dtypes_by_name.items()
            },
            bandwidth=_bandwidth(device_, 2**30 if is_gpu else 2**27),
            kernel_launch_s=_launch(device_),
            workspace_bytes=_workspace(device_, dtypes) if is_gpu else 0,
            reduction_bandwidth={name: _row_sum_rate(device_, dtype) for name, dtype in kernel_dtypes.items()},
            **rates,
        )


def _matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    # Random values, because a GPU is faster on zeros than on data.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return 2 * n**3 / time_of(lambda: torch.mm(a, b, out=out), warm_up_seconds=0.5)


def _odd_rates(
    device: torch.device, dtype: torch.dtype, rows: int = 8192, d_in: int = 1024, d_out: int = 32767
) -> tuple[float, float]:
    """Return the FLOP/s of a linear map to an odd width, forward and backward.

    A large square product of odd width is much faster and therefore not representative.
    """
    x = torch.randn(rows, d_in, device=device).to(dtype)
    w = torch.randn(d_out, d_in, device=device).to(dtype)
    y = torch.randn(rows, d_out, device=device).to(dtype)

    def gradients() -> None:
        torch.mm(y, w)
        torch.mm(y.t(), x)

    operations = 2 * rows * d_in * d_out
    forward = operations / time_of(lambda: torch.mm(x, w.t()))
    return forward, 2 * operations / time_of(gradients)


def _convolution_rates(
    device: torch.device, dtype: torch.dtype, batch: int = 128, filters: int = 320, side: int = 18, patch: int = 12
) -> tuple[float, float]:
    """Return the FLOP/s of a patch convolution over images of three channels, and of its filter gradient."""
    x = torch.randn(batch, 3, side * patch, side * patch, device=device).to(dtype)
    w = torch.randn(filters, 3, patch, patch, device=device).to(dtype)
    y = torch.randn(batch, filters, side, side, device=device).to(dtype)
    convolution_args = ((patch, patch), (0, 0), (1, 1), False, (0, 0), 1)

    def gradient() -> None:
        torch.ops.aten.convolution_backward(y, x, w, None, *convolution_args, (False, True, False))

    operations = 2 * y.numel() * w[0].numel()
    forward = operations / time_of(lambda: F.conv2d(x, w, stride=patch))
    return forward, operations / time_of(gradient)


def _attention_rates(
    device: torch.device, dtype: torch.dtype, batch: int = 4, heads: int = 16, tokens: int = 4096, width: int = 64
) -> tuple[float, float]:
    """Return the FLOP/s of one long fused attention: two products forward, five backward."""
    # (B, T, H, D) viewed as (B, H, T, D), the memory layout of projected heads.
    shape = (4, batch, tokens, heads, width)
    q, k, v, gradient = torch.randn(shape, device=device).to(dtype).transpose(2, 3)
    product = 2 * batch * heads * tokens**2 * width
    n = 4

    def run_forward() -> None:
        for _ in range(n):  # several calls, so that the host's launch time is not counted for each
            F.scaled_dot_product_attention(q, k, v)

    forward = 2 * product * n / time_of(run_forward, warm_up_seconds=0.5)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v)

    def run_backward() -> None:
        for _ in range(n):
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return forward, 5 * product * n / time_of(run_backward, warm_up_seconds=0.5)


_KERNEL_RATES: dict[str, Callable[[torch.device, torch.dtype], tuple[float, float]]] = {
    "unaligned_gemm": _odd_rates,
    "unaligned_convolution": _convolution_rates,
    "attention": _attention_rates,
}


def _bandwidth(device: torch.device, n_bytes: int) -> float:
    source = torch.randn(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / time_of(lambda: target.copy_(source))


def _row_sum_rate(device: torch.device, dtype: torch.dtype, rows: int = 2**15, width: int = 1024) -> float:
    x = torch.randn(rows, width, device=device).to(dtype)
    return x.numel() * x.element_size() / time_of(lambda: x.sum(0))


def _launch(device: torch.device, n: int = 500) -> float:
    """Return the device time of an operation on a tiny tensor: the cost of a kernel launch."""
    x = torch.ones(8, device=device)

    def run_additions() -> None:
        for _ in range(n):
            torch.add(x, 1.0)

    if device.type != "cuda":
        return time_of(run_additions, seconds=0.2) / n
    return median(on_device(run_additions)[0] for _ in range(5)) / 1e3 / n


def _workspace(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> int:
    """Return the bytes that cuBLAS keeps allocated after a small product whose tensors were freed."""
    torch._C._cuda_clearCublasWorkspaces()  # free earlier workspaces, so that their allocation is measured
    before = torch.cuda.memory_allocated(device)
    for dtype in dtypes:
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.randn(64, 64, device=device, dtype=dtype)).sum().backward()
        del layer
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_allocated(device) - before)


# ---------------------------------------------------------------------- the machine and its host


def measure_this_machine(device: str, dtypes: Iterable[torch.dtype]) -> Machine:
    """Measure everything that predictions for these dtypes need on this machine."""
    return add_host_times(measure_machine(device, tuple(dict.fromkeys(dtypes))))


def add_host_times(machine: Machine, *, rounds: int = 10) -> Machine:
    """Add the host time per kernel launch and per pass to a machine.

    Both are measured with a model so small that its time is the host's, at two depths: the difference is caused by the
    additional launches. A shared host has slow periods longer than one timing, so all cases are timed alternately,
    `rounds` times, and the minimum is used.

    Args:
        machine: A measured machine. A CPU is returned unchanged, because it launches nothing.
        rounds: Number of timings per case.

    Returns:
        The machine with `host_launch_s` and `host_pass_s`.
    """
    if machine.device == "cpu":
        return machine
    tiny = preset("tiny-decoder")
    assert isinstance(tiny, DecoderConfig)
    depths = [tiny, tiny.replace(n_layers=_DEPTH_FACTOR * tiny.n_layers)]
    cases = [(config, training) for training in (False, True) for config in depths]

    def duration(config: DecoderConfig, training: bool) -> float:
        measured = measure(
            config, tokens=8, batch=1, dtype=torch.float32, training=training, device=machine.device, seconds=0.2
        )
        return measured.seconds

    durations = [[duration(*case) for case in cases] for _ in range(rounds)]
    fastest = [min(times) for times in zip(*durations, strict=True)]
    launches = [
        cost(config, tokens=8, training=training, device=machine.device).kernel_launches for config, training in cases
    ]
    issue, begin = {}, {}
    for name, (small, deep) in (("forward", (0, 1)), ("training", (2, 3))):
        issue[name] = max(0.0, fastest[deep] - fastest[small]) / (launches[deep] - launches[small])
        begin[name] = max(0.0, fastest[small] - issue[name] * launches[small])
    return replace(machine, host_launch_s=issue, host_pass_s=begin)


# ---------------------------------------------------------------------- measured and predicted cost


@dataclass(frozen=True)
class MeasuredCost:
    """Measured duration and peak memory of one run."""

    seconds: float
    peak_bytes: int


def compare_with_measured(predicted: Cost, machine: Machine, measured: dict[str, float]) -> JSONObject:
    """Return prediction and measurement as JSON data, with the bottleneck and the ratios predicted / measured."""
    prediction = predicted.time(machine)
    predicted_values = {
        "peak_bytes": predicted.memory.peak.value + machine.workspace_bytes,
        "seconds": prediction.seconds,
    }
    ratio = {
        name: predicted_values[key] / measured[key] for name, key in (("memory", "peak_bytes"), ("time", "seconds"))
    }
    return {"predicted": predicted_values, "measured": measured, "bottleneck": prediction.bottleneck, "ratio": ratio}


def measure(
    subject: object,
    *,
    tokens: Tokens = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    mask: Mask | None = None,
    impl: str = "auto",
    device: torch.device | str = "cpu",
    activation_checkpointing: bool = False,
    seconds: float = 0.5,
) -> MeasuredCost:
    """Build a model, warm it up, and measure the peak memory of one run and the duration of several.

    Args:
        subject: A model, a configuration, a name or a factory, as for `cost`.
        tokens: Number of tokens, or (target, source) for an encoder-decoder.
        batch: Batch size.
        dtype: Dtype of the parameters.
        training: Measure a training step instead of a forward pass.
        mask: Mask of the attention layers.
        impl: Implementation of attention.
        device: The device.
        activation_checkpointing: Save only the input of each block and recompute the block in backward.
        seconds: Time limit of the timing; 0 measures memory only.

    Returns:
        Duration in seconds (0 if not measured) and peak memory.
    """
    model = model_builder(subject)
    module = set_impl(build_module(model.build, str(device) if model.is_fresh else "cpu"), impl).to(
        device=device, dtype=dtype
    )
    inputs = example(
        module, model.label, tokens=tokens, batch=batch, dtype=dtype, device=device, mask=mask, inputs=model.inputs
    )
    with one_thread(device):
        step = _step(module, inputs, training, activation_checkpointing)
        step()
        peak = _peak(step, module, inputs, device)
        return MeasuredCost(time_of(step, seconds=seconds) if seconds else 0.0, peak)


def _step(model: nn.Module, inputs: Example, training: bool, activation_checkpointing: bool) -> Callable[[], None]:
    """Return a function that runs one training step, or one forward pass without gradients."""
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if training else None

    def step() -> None:
        if optimizer is None:
            with torch.inference_mode():
                inputs.run(model)
            return
        optimizer.zero_grad(set_to_none=True)
        with checkpointing(model) if activation_checkpointing else nullcontext():
            inputs.loss(model).backward()
        optimizer.step()

    return step


def _peak(step: Callable[[], None], model: nn.Module, inputs: Example, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        step()
        return peak_of(step)
    with OpRecorder() as recorder:
        for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *inputs.tensors):
            if tensor is not None:
                recorder.track(tensor)
        step()  # tracks the optimizer's state, which the peak of the second run includes
        first_event = recorder.events
        step()
    return recorder.log.peak_bytes(since=first_event, until=recorder.events)
