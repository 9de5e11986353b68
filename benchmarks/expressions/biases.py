"""Biases by distance and soft caps in long sequences, compared with the same call without them and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.changing.options import Options, forward_backward, tensors
from benchmarks.expressions import flex
from benchmarks.expressions.memory import add_memory
from benchmarks.timed import Contender, Job, Timing, describe_error, time_contenders
from clearhead.attention import SoftCapped, attend
from clearhead.attention.biases import alibi, buckets, distance, logarithm, relative
from clearhead.attention.biases.expressions import alibi_slopes
from clearhead.masks import Mask, causal, every, window
from clearhead.masks.catalogue import neighborhood

LENGTH = 16384
SMOKE_LENGTH = 96
CAP = 50.0
SLOWDOWN = 1.25  # with a bias
N_BUCKETS = 32


@dataclass(frozen=True)
class Modification:
    """Options of `attend`, and the same for FlexAttention; both read the same parameters.

    Attributes:
        options: Returns the options of `attend` from the parameters.
        score_mod: Returns the `score_mod` of FlexAttention from the parameters and the length.
        parameters: Returns the parameters (H heads, device), which get gradients if they require them.
    """

    options: Callable[[Tensor], dict[str, Any]]
    score_mod: Callable[[Tensor, int], flex.Modification]
    parameters: Callable[[int, str], Tensor]


def _slopes(heads: int, device: str) -> Tensor:
    return alibi_slopes(heads, device, torch.float32)


def _table(heads: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(N_BUCKETS, heads, generator=generator, device=device).requires_grad_()


def _alibi_mod(slopes: Tensor, length: int) -> flex.Modification:
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def _logarithm_mod(slopes: Tensor, length: int) -> flex.Modification:
    return lambda score, b, h, q, k: score - 2.0 * torch.log1p(slopes[h] * (q - k).abs())


def _relative_mod(table: Tensor, length: int) -> flex.Modification:
    """Look the bucket of each distance up in a list, which is faster than to compute it."""
    one_hot = torch.arange(N_BUCKETS, dtype=torch.float32)[:, None]
    numbers = relative(one_hot, buckets(N_BUCKETS, 128)).distance_values(length, length)[0]
    bucket = numbers.to(table.device, torch.int64)
    return lambda score, b, h, q, k: score + table[bucket[k - q + length - 1], h]


def _cap_mod(slopes: Tensor, length: int) -> flex.Modification:
    return lambda score, b, h, q, k: CAP * torch.tanh(score / CAP)


MODIFICATIONS = {
    "ALiBi": Modification(lambda slopes: {"bias": alibi(slopes)}, _alibi_mod, _slopes),
    "T5": Modification(lambda table: {"bias": relative(table, buckets(N_BUCKETS, 128))}, _relative_mod, _table),
    "KERPLE, logarithmic": Modification(
        lambda slopes: {"bias": distance(logarithm(-2.0, slopes))}, _logarithm_mod, _slopes
    ),
    "soft cap": Modification(lambda slopes: {"scores": SoftCapped(CAP)}, _cap_mod, _slopes),
}
PLANNED: dict[str, Callable[[bool], Mask]] = {
    "causal window and landmarks": lambda is_smoke: causal() & (window(1024, 0) | every(64)),
    "neighborhood 128 × 128": lambda is_smoke: neighborhood((8, 12) if is_smoke else (128, 128), 7),
}
"""Masks that follow a plan, for `LENGTH` tokens or those of a smoke test."""


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each modification of the scores under causal()."""
    for length in options.lengths_or((LENGTH,) if not options.smoke else (SMOKE_LENGTH,)):
        for name in MODIFICATIONS:
            if options.name_filter not in name:
                continue
            row = Timing(section="biases", name=name, sizes={"length": length})
            has_flex = options.peers and options.is_gpu
            measure, without_flex = (partial(_measure, options, name, length, x) for x in (has_flex, False))
            ahead = (partial(_run_once, options, name, length),) if has_flex else ()
            yield Job(row, measure, ahead, without_peer=without_flex)


def plan_jobs(options: Options) -> Iterator[Job]:
    """Return one job for each modification of the scores under masks that follow a plan."""
    length = SMOKE_LENGTH if options.smoke else LENGTH
    for mask_name in PLANNED:
        for name in MODIFICATIONS:
            label = f"{name}, {mask_name}"
            if options.name_filter in label:
                row = Timing(section="plans", name=label, sizes={"length": length})
                measure = partial(_measure_plan, options, mask_name, name, length)
                yield Job(row, measure, (partial(_run_plan_once, options, mask_name, name, length),))


def _step(mask: Mask, parameters: Tensor, options: dict[str, Any], qkv: Any, grad: Tensor) -> None:
    """Run forward and backward, also for the parameters if they require gradients."""
    if parameters.requires_grad and "bias" in options:
        q, k, v = qkv
        out = attend(q, k, v, mask, **options)
        torch.autograd.grad(out, (*qkv, parameters), grad)
    else:
        forward_backward(partial(attend, mask=mask, **options), qkv, grad)


def _measure(options: Options, name: str, length: int, has_flex: bool, row: Timing) -> None:
    """Measure one row under causal()."""
    row.targets = {"bias / plain": SLOWDOWN, "bias / flex": 1.0, "flex / plain": None}
    modification = MODIFICATIONS[name]
    qkv, grad = tensors(options, 1, length)
    parameters = modification.parameters(options.heads, options.device)
    modified = modification.options(parameters)
    mask = causal()
    steps: dict[str, Callable[[], object]] = {
        "bias": lambda: _step(mask, parameters, modified, qkv, grad),
        "plain": lambda: _step(mask, parameters, {}, qkv, grad),
    }
    if has_flex:
        try:
            steps["flex"] = _flex_step(options, name, length, parameters, qkv, grad)
        except Exception as error:  # the compiler may raise anything
            row.notes["flex"] = describe_error(error)
    elif options.peers and options.is_gpu:
        row.notes["flex"] = "not measured: its compilation failed or took too long"
    _time(row, steps, options)


def _measure_plan(options: Options, mask_name: str, name: str, length: int, row: Timing) -> None:
    """Measure one row under a mask that follows a plan."""
    row.targets = {"bias / plain": SLOWDOWN}
    modification = MODIFICATIONS[name]
    mask = PLANNED[mask_name](options.smoke)
    qkv, grad = tensors(options, 1, length)
    parameters = modification.parameters(options.heads, options.device)
    modified = modification.options(parameters) | {"impl": "sparse"}
    steps: dict[str, Callable[[], object]] = {
        "bias": lambda: _step(mask, parameters, modified, qkv, grad),
        "plain": lambda: _step(mask, parameters, {"impl": "sparse"}, qkv, grad),
    }
    _time(row, steps, options)


def _time(row: Timing, steps: dict[str, Callable[[], object]], options: Options) -> None:
    """Add the times and the memory of all steps."""
    contenders = [Contender(name, lambda step, run=run: run()) for name, run in steps.items()]  # type: ignore[misc]
    time_contenders(row, contenders, seconds=options.seconds, device=options.device)
    add_memory(row.facts, {name: run for name, run in steps.items() if name in row.times}, options.device)


def _flex_step(
    options: Options, name: str, length: int, parameters: Tensor, qkv: Any, grad: Tensor
) -> Callable[[], object]:
    """Return forward and backward with FlexAttention and a prepared block mask."""
    score_mod = MODIFICATIONS[name].score_mod(parameters, length)
    attention = flex.attention_under(flex.prepare_mask(flex.causal, length, options.device), score_mod)
    leaves = (*qkv, parameters) if parameters.requires_grad else qkv
    return lambda: torch.autograd.grad(attention(*qkv), leaves, grad)


def _run_once(options: Options, name: str, length: int) -> None:
    """Compile the kernels of a row, in a worker."""
    modification = MODIFICATIONS[name]
    qkv, grad = tensors(options, 1, length)
    parameters = modification.parameters(options.heads, options.device)
    _step(causal(), parameters, modification.options(parameters), qkv, grad)
    _flex_step(options, name, length, parameters, qkv, grad)()


def _run_plan_once(options: Options, mask_name: str, name: str, length: int) -> None:
    """Compile our kernels of a row under a mask that follows a plan, in a worker."""
    modification = MODIFICATIONS[name]
    qkv, grad = tensors(options, 1, length)
    parameters = modification.parameters(options.heads, options.device)
    modified = modification.options(parameters) | {"impl": "sparse"}
    _step(PLANNED[mask_name](options.smoke), parameters, modified, qkv, grad)
