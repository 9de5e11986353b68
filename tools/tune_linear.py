"""Measure how to compute small-batch linear layers on this GPU, and print the table of `fused_linear_config`.

    python -m tools.tune_linear tables.json

For every shape and number of rows it times all candidates in a CUDA graph over copies of the weight that exceed the L2
cache, and selects the fastest. A selection for fewer rows is never slower than one for more rows.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import sys
from pathlib import Path

import torch
from torch import nn

from clearhead.ops.activations import SwiGLU
from clearhead.ops.fused_linear import FusedLinearSpec, fused_linear_reference
from clearhead.ops.fused_linear_config import LayerKind, LinearConfig, device_name

SHAPES: list[tuple[int, int, LayerKind]] = [
    *((768, 768, "plain"), (768, 3072, "plain"), (896, 4864, "plain")),
    *((2048, 2048, "plain"), (2048, 5632, "plain"), (2304, 9216, "plain")),
    *((2304, 768, "normed"), (3072, 768, "normed"), (50257, 768, "normed")),
    *((1152, 896, "normed"), (2560, 2048, "normed"), (32000, 2048, "normed")),
    *((4864, 896, "gated"), (5632, 2048, "gated"), (9216, 2304, "gated")),
]
ROWS = (1, 2, 8, 16, 32, 64, 128)
# BN, BK, stages, warps
TILES = (
    *((16, 128, 4, 4), (16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 3, 4), (32, 128, 6, 4)),
    *((64, 64, 5, 4), (64, 128, 4, 4), (64, 128, 4, 8), (128, 64, 4, 8), (128, 64, 5, 8)),
)
WEIGHT_BYTES = 120 << 20  # more than the L2 cache
PROCESSES = 14


def candidates(R: int, N: int, M: int, kind: LayerKind) -> list[LinearConfig]:
    """Return the configs to measure."""
    configs = [LinearConfig("library")]
    if R <= 4:
        configs.append(LinearConfig("rows"))
    if 2 <= R <= 16 and M <= 2048:
        sizes = ((16, 4), (16, 8), (32, 8)) if M <= 1024 else ((16, 16),)
        configs += [LinearConfig("resident", BN, warps=warps) for BN, warps in sizes]
    for (BN, BK, stages, warps), parts in itertools.product(TILES, (1, 2, 4, 8)):
        programs = math.ceil(N / BN) * parts
        if R == 128 and BN < 64:
            continue
        if (parts > 1 and (programs > 1100 or parts * 2 * BK > M)) or (parts < 8 and programs < 64):
            continue
        for fuses_norm in (True,) if kind == "plain" else (True, False):
            if (R <= 32 if fuses_norm else R >= 32) or kind == "plain":
                configs.append(LinearConfig("tiles", BN, BK, stages, warps, parts, fuses_norm))
    return configs


def spec_of(N: int, M: int, kind: LayerKind, norm: nn.RMSNorm | None) -> FusedLinearSpec:
    """Return a layer with random parameters."""
    weight = torch.randn(N, M, device="cuda", dtype=torch.bfloat16) * M**-0.5
    if kind == "gated":
        return FusedLinearSpec(weight, None, norm, SwiGLU(), weight.clone())
    return FusedLinearSpec(weight, None, norm)


def run(x: torch.Tensor, spec: FusedLinearSpec, residual: torch.Tensor | None, config: LinearConfig) -> torch.Tensor:
    """Compute the layer as `config` says."""
    if config.kernel == "library":
        return fused_linear_reference(x, spec, None if residual is None else residual)
    from clearhead.ops.fused_linear_triton import launch

    return launch(x, spec, residual, config)


def inputs(R: int, N: int, M: int, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor | None, nn.RMSNorm | None]:
    """Return the input, the residual and the norm of a layer."""
    x = torch.randn(R, M, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(R, N, device="cuda", dtype=torch.bfloat16) if kind == "plain" else None
    norm = None if kind == "plain" else nn.RMSNorm(M, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    return x, residual, norm


def compile_cases(cases: list[tuple[int, int, int, LayerKind, LinearConfig]]) -> None:
    """Launch every case once, which compiles its kernel into the cache of all processes."""
    with torch.no_grad():
        for R, N, M, kind, config in cases:
            x, residual, norm = inputs(R, N, M, kind)
            spec = spec_of(N, M, kind, norm)
            try:
                run(x, spec, residual, config)
            except Exception as error:  # the measurement reports it again
                print(f"{R} × {N} × {M} {kind} {config}: {error}", file=sys.stderr)


def microseconds(R: int, N: int, M: int, kind: LayerKind, config: LinearConfig, specs: list[FusedLinearSpec]) -> float:
    """Return the time of one layer, as one of many in a CUDA graph."""
    x, residual, _ = inputs(R, N, M, kind)
    run(x, specs[0], residual, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for spec in specs:
            run(x, spec, residual, config)
    graph.replay()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(specs))
    return min(times)


def preferred(timed: list[tuple[float, LinearConfig]]) -> tuple[float, LinearConfig]:
    """Return the fastest config; the library only if it is clearly faster, because the other kernels start early."""
    kernels = [pair for pair in timed if pair[1].kernel != "library"]
    return kernels[0] if kernels and kernels[0][0] <= 1.1 * timed[0][0] else timed[0]


def measure_shape(N: int, M: int, kind: LayerKind) -> dict[int, tuple[float, LinearConfig]]:
    """Return the fastest config per number of rows, and its time."""
    _, _, norm = inputs(1, N, M, kind)
    n_bytes = N * M * 2 * (2 if kind == "gated" else 1)
    specs = [spec_of(N, M, kind, norm) for _ in range(max(2, min(64, WEIGHT_BYTES // n_bytes)))]
    best: dict[int, tuple[float, LinearConfig]] = {}
    for R in ROWS:
        timed = []
        for config in candidates(R, N, M, kind):
            try:
                timed.append((microseconds(R, N, M, kind, config, specs), config))
            except Exception as error:  # one failed candidate must not lose the others
                print(f"{R} × {N} × {M} {kind} {config}: {error}", file=sys.stderr)
        timed.sort(key=lambda pair: pair[0])
        best[R] = preferred(timed)
        library = next((time for time, config in timed if config.kernel == "library"), math.nan)
        print(
            f"{kind:6} {N:6} × {M:5} R={R:2}: {timed[0][0]:7.2f} µs = {n_bytes / timed[0][0] / 1e6:5.2f} TB/s, library "
            f"{library:7.2f}; {', '.join(f'{t:.2f} {tuple(c)}' for t, c in timed[:3])}",
            flush=True,
        )
    for smaller, larger in reversed(list(itertools.pairwise(ROWS))):
        if best[smaller][0] > best[larger][0]:
            best[smaller] = best[larger]
    return best


def main(path: Path) -> None:
    """Measure all shapes and write the table."""
    cases: dict[tuple[object, ...], tuple[int, int, int, LayerKind, LinearConfig]] = {}
    for (N, M, kind), R in itertools.product(SHAPES, ROWS):
        for config in candidates(R, N, M, kind):
            if config.kernel == "tiles":
                even = N % config.BN == 0 and M % (config.BK * config.parts) == 0
                length = M if config.fuses_norm and kind != "plain" else 0
                key = (kind, max(16, R), even, length, config._replace(parts=min(config.parts, 2)))
                cases.setdefault(key, (R, N, M, kind, config))
    print(f"{len(cases)} kernels to compile", flush=True)
    every = list(cases.values())
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_cases, [every[i::PROCESSES] for i in range(PROCESSES)])
    print("compiled", flush=True)
    rows = []
    with torch.no_grad():
        for N, M, kind in SHAPES:
            for R, (_, config) in measure_shape(N, M, kind).items():
                rows.append([R, N, M, kind, list(config)])
            table = {device_name(torch.device("cuda", 0)): rows}
            path.write_text(json.dumps(table).replace("]], [", "]],\n[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
