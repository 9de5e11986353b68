"""Measure the sizes of the decode kernel's programs on this GPU, and print the table of `decode_config`.

    python -m tools.tune_decode decode_tables.json

For every number of rows, heads and capacity it times all candidates, as layers of one CUDA graph, and selects the
fastest candidate.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from clearhead.attention.decode import DecodeSlots
from clearhead.attention.decode_config import DecodeConfig
from clearhead.ops.fused_linear_config import device_name


class Case(NamedTuple):
    """A batch: rows, query heads, key/value heads, head width, capacity and used length."""

    R: int
    H: int
    K: int
    D: int
    S: int
    length: int


HEADS = ((12, 12, 64), (32, 4, 64), (8, 4, 256))
ROWS = (1, 4, 16, 64, 128)
LENGTHS = ((256, 150), (4096, 2000), (16_384, 8000))  # capacity and used length
BLOCKS = (32, 64, 128, 256)
MAX_CACHE = 2 << 30  # bytes of the keys and values of all layers
PROCESSES = 14


def candidates(G: int, D: int) -> list[DecodeConfig]:
    """Return the configs to measure."""
    configs = []
    for block, min_blocks, warps, programs in itertools.product(BLOCKS, (1, 4), (1, 2, 4, 8), (264, 768)):
        elements = block * D // (32 * warps)  # of keys per thread
        if 16 <= elements <= 64 and (warps > 1 or G == 1) and (min_blocks == 1 or block <= 64):
            configs.append(DecodeConfig(block, min_blocks, warps, programs))
    return configs


def cases() -> list[Case]:
    """Return the batches to measure."""
    return [
        Case(R, *heads, *sizes)
        for heads, R, sizes in itertools.product(HEADS, ROWS, LENGTHS)
        if R * heads[1] * sizes[0] * heads[2] * 4 <= MAX_CACHE // 2
    ]


def n_layers(case: Case) -> int:
    """Return how many layers exceed the L2 cache, within the memory budget."""
    n_bytes = case.R * case.K * case.S * case.D * 4
    return max(2, min(16, MAX_CACHE // n_bytes))


def launch(case: Case, config: DecodeConfig, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run one layer per cache."""
    from clearhead.attention.decode_triton import launch as launch_kernel

    heads = torch.randn(case.R, case.H + 2 * case.K, case.D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((case.R,), case.length, device="cuda")
    used = DecodeSlots(torch.arange(case.R, device="cuda"), lengths)
    for k, v in caches:
        launch_kernel(heads, k, v, used, 0.1, None, None, writes=True, config=config)


def caches_of(case: Case, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random keys and values of n layers."""
    shape = case.R, case.K, case.S, case.D
    k, v = (torch.randn(n, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return list(zip(k, v, strict=True))


def compile_cases(selected: list[tuple[Case, DecodeConfig]]) -> None:
    """Launch every case once, which compiles its kernel into the cache of all processes."""
    with torch.inference_mode():
        for case, config in selected:
            try:
                launch(case, config, caches_of(case, 1))
            except Exception as error:  # the measurement reports it again
                print(f"{case} {config}: {error}", file=sys.stderr)


def microseconds(case: Case, config: DecodeConfig, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the time of one layer, as one of many in a CUDA graph."""
    launch(case, config, caches[:1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(case, config, caches)
    graph.replay()
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(caches))
    return min(times)


def main(path: Path) -> None:
    """Measure all cases and write the table."""
    pairs = [(case, config) for case in cases() for config in candidates(case.H // case.K, case.D)]
    print(f"{len(pairs)} cases", flush=True)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_cases, [pairs[i::PROCESSES] for i in range(PROCESSES)])
    print("compiled", flush=True)
    rows = []
    with torch.inference_mode():
        for case in cases():
            caches = caches_of(case, n_layers(case))
            timed = []
            for config in candidates(case.H // case.K, case.D):
                try:
                    timed.append((microseconds(case, config, caches), config))
                except Exception as error:  # one failed candidate must not lose the others
                    print(f"{case} {config}: {error}", file=sys.stderr)
            timed.sort()
            rate = 4 * case.R * case.K * case.length * case.D / timed[0][0] / 1e6
            listed = ", ".join(f"{time:.2f} {tuple(config)}" for time, config in timed[:3])
            print(f"{tuple(case)}: {rate:5.2f} TB/s; {listed}; worst {timed[-1][0]:.2f}", flush=True)
            G = 1 if case.H == case.K else 16
            rows.append([case.R * case.K, G, case.D, case.S, list(timed[0][1])])
            del caches
    table = {device_name(torch.device("cuda", 0)): rows}
    path.write_text(json.dumps(table).replace("]], [", "]],\n[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
