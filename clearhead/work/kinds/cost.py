"""What one attention layer costs: parameters, stored values and operations, by formula and in numbers.

Operations count two for each multiplication with its addition, of the matrix products alone.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from clearhead.attention import MultiHeadAttention
from clearhead.work.draw import Draw
from clearhead.work.kinds.base import Solved, difference, given
from clearhead.work.numbers import N
from clearhead.work.sheet import Check, Grid, Step
from clearhead.work.source import Source

KEYS = ("d_model", "heads", "tokens", "bias", "output", "bytes")


def solve(source: Source) -> Solved:
    d, h = source.whole("d_model", most=10**6), source.whole("heads", 1, most=10**6)
    if d % h:
        source.fail("heads", f"d_model is {d} and there are {h} heads; the heads must share it evenly")
    bias, output = source.flag("bias", False), source.flag("output", True)
    size = source.whole("bytes", 4, most=16)
    n = sympy.Integer(source.whole("tokens")) if "tokens" in source.values else N
    head = source.own("d_head", sympy.Integer(d // h))
    parameters = [[f"W_{name}", sympy.Integer(d * d)] for name in ("QKVO" if output else "QKV")]
    if bias:
        parameters.append(["biases", sympy.Integer(len(parameters) * d)])
    total = _sum(source, "parameters", parameters)
    stored = [["Q, K, V", 3 * n * d], ["attention weights", h * n**2], ["heads' outputs", n * d]]
    operations = [[f"projection {name}", 2 * n * d**2] for name in "QKV"]
    operations += [["scores Q·Kᵀ", 2 * n**2 * d], ["weighted sum P·V", 2 * n**2 * d]]
    if output:
        operations.append(["projection O", 2 * n * d**2])
    made = _sum(source, "operations", operations)
    steps = (
        given({"d": sympy.Integer(d), "h": sympy.Integer(h), "n": n}),
        Step("d_head", "Width of a head", Grid.one(head), "D", "D = d / h", r"D = d / h"),
        Step("per_head", "Parameters of one head (Q, K and V)", Grid.one(3 * d * head), "",
             "3·d·D", "3 d D"),
        Step("parameters", "Parameters", _column(parameters, "parameters"), "", "d·d for each projection", "d^2"),
        Step("parameters_total", "Parameters in all", Grid.one(total), "", "their sum", r"\sum"),
        Step("stored", "Values stored for n tokens", _column(stored, "values"), "", "3·n·d, h·n², n·d",
             r"3nd, \quad h n^2, \quad nd"),
        Step("stored_total", "Values stored in all", Grid.one(_sum(source, "stored", stored)), "",
             "h·n² + 4·n·d", r"h n^2 + 4 n d"),
        Step("weights_bytes", f"Bytes of the attention weights, {size} each", Grid.one(size * h * n**2), "",
             f"{size}·h·n²", rf"{size} h n^2"),
        Step("operations", "Operations of a forward pass", _column(operations, "operations"), "",
             "2·n·d² for a projection, 2·n²·d for scores and for the sum", r"2 n d^2, \quad 2 n^2 d"),
        Step("operations_total", "Operations in all", Grid.one(made), "", "their sum", r"\sum"),
    )  # fmt: skip
    remarks = (
        "Operations count a multiplication and its addition as two; count them as one and each number halves. "
        "Softmax and scaling add some n² per head and are left out.",
        "The number of heads changes neither the parameters nor the operations, only how many weights are stored."
        if h > 1
        else "The attention weights are no parameters: they are computed for each input.",
    )
    return Solved(steps, _checks(d, h, bias, output, total, made, n), remarks)


def vary(source: Source, draw: Draw) -> dict[str, Any]:
    heads = draw.whole(2, 16) if source.whole("heads", 1) > 1 else 1
    made = {"heads": heads, "d_model": heads * 8 * draw.whole(2, 16) * (1 if heads > 1 else 4)}
    made |= {"bytes": draw.pick((2, 4, 8))} if heads > 1 else {}
    return made | ({"tokens": 50 * draw.whole(2, 60)} if "tokens" in source.values else {})


def _sum(source: Source, key: str, rows: list[list[object]]) -> sympy.Expr:
    return sympy.expand(sympy.Add(*source.own(key, [row[1] for row in rows])))


def _column(rows: list[list[object]], name: str) -> Grid:
    return Grid.of([[row[1]] for row in rows], [str(row[0]) for row in rows], [name])


def _checks(
    d: int, h: int, bias: bool, output: bool, total: sympy.Expr, operations: sympy.Expr, n: sympy.Expr
) -> tuple[Check, ...]:
    """The parameters of a real layer, and the operations that torch counts for it."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        layer = MultiHeadAttention(d, h, bias=bias)
    names = ("q_proj", "k_proj", "v_proj") + (("o_proj",) if output else ())
    count = sum(p.numel() for name in names for p in getattr(layer, name).parameters())
    length = int(n) if n.is_Integer else 13  # a formula is tried at one length
    with FlopCounterMode(display=False) as counter:
        x = torch.empty(length, d, device="meta")
        q, k, v = (getattr(layer, name)(x).unflatten(-1, (h, -1)).transpose(0, 1) for name in names[:3])  # (h, n, D)
        z = ((q @ k.mT) @ v).transpose(0, 1).flatten(1)
        if output:
            layer.o_proj(z)
    exact = operations.subs(N, length)
    return (
        Check("the parameters of MultiHeadAttention", difference([[total]], _one(count))),
        Check("torch's count of the operations", difference([[exact]], _one(counter.get_total_flops()))),
    )


def _one(value: int) -> torch.Tensor:
    return torch.tensor([[float(value)]], dtype=torch.float64)
