"""The Triton kernels, run by Triton's interpreter on the CPU, hold to the reference at tiny sizes.

Triton decides when it is imported whether it interprets, so the cases run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

CASES = [
    # mask, (B, H, K, T, S, D, E), offset, dtype, bias, dense pieces, split long lists
    ("window(2, 2) | every(4)", (1, 2, 1, 67, 67, 16, 16), 0, "float32", False, True, False),
    # (Triton's interpreter has no bfloat16; the GPU runs of `clearhead bench sparse` are in it.)
    ("window(12, 9) | every(8)", (1, 1, 1, 37, 71, 16, 16), 30, "float16", False, False, False),
    ("causal() & (window(19, 0) | every(12))", (1, 2, 1, 71, 71, 5, 11), 0, "float32", False, False, True),
    ("causal() | prefix(11)", (1, 1, 1, 67, 67, 16, 16), 0, "float32", False, True, False),
    ("causal() & (window(3, 0) | stride(2))", (1, 1, 1, 71, 71, 16, 16), 0, "float32", False, False, False),
    ("every(2).T | window(2, 1)", (1, 1, 1, 71, 71, 16, 16), 0, "float32", False, False, True),
    (
        "~(window(3, 3) | every(5)) & scattered(9, 1)",
        (1, 1, 1, 41, 41, 16, 16),
        0,
        "float16",
        False,
        False,
        False,
    ),
    ("window(5, 5)", (1, 2, 2, 37, 37, 7, 7), 0, "float32", True, False, False),
    ("~full()", (1, 1, 1, 19, 19, 16, 16), 0, "float32", False, False, False),
    ("documents & causal()", (2, 2, 2, 53, 53, 16, 16), 0, "float32", False, False, False),
    ("allow by head", (1, 2, 1, 37, 37, 16, 16), 0, "float32", False, False, False),
]


def case(number):
    """One case, in the interpreting process: errors of the kernels, of the reference in the same dtype, and roundings."""
    import torch

    from clearhead.attention import attend
    from clearhead.attention.kernels import gathered_launch
    from clearhead.attention.kernels.gathered_ops import gathered
    from clearhead.attention.plan import Blocking, plan
    from clearhead.attention.planning import schedule
    from clearhead.masks import allow, causal, documents, parse

    text, (B, H, K, T, S, D, E), offset, name, with_bias, dense, split = CASES[number]
    tile = gathered_launch.Tile(32, 32, 16, 4, 1)
    gathered_launch.tiles_for = lambda dtype, width: gathered_launch.Tiles(tile, tile, tile)
    if split:
        schedule.SHORTEST, schedule.PROGRAMS = 2, 1
    generator = torch.Generator().manual_seed(number)
    dtype = getattr(torch, name)
    if text.startswith("documents"):
        ids = torch.randint(0, 2, (B, T), generator=generator).cumsum(-1) // 9
        mask = documents(ids) & causal()
    elif text.startswith("allow"):
        mask = allow(torch.rand(H, T, S, generator=generator) < 0.2)
    else:
        mask = parse(text)
    q, k, v, g = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, E))
    )
    bias = torch.randn(1, H, T, S, generator=generator) if with_bias else None
    made = plan(mask, T, S, offset=offset, blocking=Blocking(32, 32, 16 if dense else None, dense))

    def run(way, inputs, grad):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = way(*inputs)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs)]

    def reference(q, k, v):
        low = None if bias is None else bias.to(q.dtype if q.dtype == torch.float64 else torch.float32)
        return attend(q, k, v, mask, offset=offset, bias=low, impl="reference")

    exact = run(reference, [x.double() for x in (q, k, v)], g.double())
    plain = run(reference, [q, k, v], g)
    fast = run(lambda q, k, v: gathered(q, k, v, bias, made.handle, D**-0.5)[0], [q, k, v], g)
    rows = []
    for f, p, e in zip(fast, plain, exact, strict=True):
        rows.append(
            {
                "finite": bool(f.isfinite().all()),
                "fast": (f.double() - e).abs().max().item(),
                "plain": (p.double() - e).abs().max().item(),
                "rounding": torch.finfo(dtype).eps * e.abs().max().item(),
            }
        )
    return rows


@pytest.fixture(scope="module")
def results():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.attention.test_gathered_triton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n][0])
def test_kernels_err_at_most_twice_as_much_as_the_reference(results, number):
    for name, row in zip(("out", "dq", "dk", "dv"), results[number], strict=True):
        assert row["finite"], name
        assert row["fast"] <= 2 * row["plain"] + 2 * row["rounding"], (name, row)


if __name__ == "__main__":
    print(json.dumps([case(number) for number in range(len(CASES))]))
