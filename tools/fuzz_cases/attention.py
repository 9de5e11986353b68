"""Calls of `attend`: every implementation, forward and backward, compared with `oracle.attention`.

The reference must be within the rounding bound. The error of every other implementation may be twice that of the
reference plus the bound, because the reference may be exact by coincidence.
"""

from __future__ import annotations

import math
import random
import typing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.attention import Dot, ScaledDot, Softmax, attend
from clearhead.attention.observe import Impl
from clearhead.errors import ImplementationError
from tools.fuzz_cases import Case, CaseFailure, expressions
from tools.fuzz_cases.expressions import Sizes
from tools.fuzz_cases.reference import Exact, Rounding, attention

DTYPES = ("float16", "bfloat16", "float32", "float64")
IMPLEMENTATIONS = ("reference", *sorted(set(typing.get_args(Impl)) - {"reference"}))
SLACK = 8  # roundings of q, scores, weights, products and sums, twice for the backward pass


def draw(chance: random.Random, device: str) -> Case:
    B = chance.choice([0, 1, 1, 2, 3])
    case = {
        "device": device,
        "dtype": chance.choice(DTYPES),
        "lead": chance.choice([[B], [B], [B], [], [2, B]]),
        "K": chance.choice([1, 1, 2, 3]),
        "groups": chance.choice([1, 1, 2, 3, 0] if chance.random() < 0.2 else [1, 1, 2, 3]),
        "T": chance.choice([0, 1, 2, 3, 5, 7, 11, 13]),
        "S": chance.choice([0, 1, 2, 3, 5, 7, 11, 13]),
        "D": chance.choice([1, 2, 3, 7, 8, 16, 0]),
        "E": chance.choice([1, 2, 5, 8, 16, 0]),
        "offset": chance.choice([0, 0, 1, 3, 6, 9]),
        "mask": None if chance.random() < 0.15 else expressions.draw(chance, data=True, depth=chance.randint(0, 3)),
        "bias": None if chance.random() < 0.4 else _draw_bias(chance),
        "temperature": chance.choice([1.0, 1.0, 1.0, 0.3, 0.3, 0.01, 3.0, 1e-4, 0.0, math.inf]),
        "scores": chance.choice(["ScaledDot", "ScaledDot", "Dot"]),
        "size": chance.choice([1.0, 1.0, 1.0, 0.0, 1e-3, 30.0, 3e3, 1e18]),  # of queries and keys
        "values": chance.choice([1.0, 1.0, 1e-3, 1e3]),
        "upstream": chance.choice([1.0, 1.0, 0.0, 1e-3, 8e3]),
        "seed": chance.randint(0, 999),
    }
    if device != "cpu":  # GPU kernels do not inspect the data first, as documented in `attend`
        case |= {"size": chance.choice([1.0, 1e-3, 30.0])}
    if chance.random() < 0.5:
        case["S"] = case["T"]
    if chance.random() < 0.04:  # long enough for plans, tiles and many blocks
        T = chance.choice([256, 1024, 2048])
        case |= {"T": T, "S": T, "K": 1, "groups": 1, "offset": 0}
        case |= {"lead": chance.choice([[0], [1]]), "D": chance.choice([16, 32, 64]), "E": chance.choice([16, 32, 64])}
    return case


def _draw_bias(chance: random.Random) -> Case:
    return {
        "dtype": chance.choice(DTYPES),
        "shape": [chance.randint(0, 1) for _ in range(4)],  # of batch, head, query, key: 1 is full, 0 one for all
        "size": chance.choice([1.0, 10.0, 10.0, 1e3, 3e4, 1e30, 0.0]),
        "hidden": chance.choice([0, 0, 0, 1, 2]),  # some keys: 1 by −∞, 2 by the dtype's minimum
        "grad": chance.randint(0, 1),
        "short": chance.randint(0, 1),  # without the leading dimensions that are 1
    }


def check(case: Case) -> list[str]:
    inputs, sizes = _inputs(case)
    exact = _exact(case, inputs, sizes)
    tried, reference = [f"{case['dtype']}"], None
    for impl in IMPLEMENTATIONS:
        try:
            results = _run(case, inputs, sizes, impl)
        except ImplementationError:
            if impl in ("auto", "reference"):
                raise
            continue
        errors = _compare(case, impl, results, exact, reference)
        reference = errors if impl == "reference" else reference
        tried.append(impl)
    return tried + [kind for kind in ("mask", "bias") if case[kind]]


# -- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> tuple[dict[str, Tensor], Sizes]:
    """Draw q, k, v, the upstream gradient and the bias, each clamped and rounded to its dtype."""
    lead, K, T, S = tuple(case["lead"]), case["K"], case["T"], case["S"]
    H = K * case["groups"]
    # Without an offset, positions of queries and keys agree; documents need an id for every position.
    sizes = Sizes(lead, H, T, S, case["offset"])
    g = torch.Generator().manual_seed(case["seed"])
    shapes = {"q": (H, T, case["D"]), "k": (K, S, case["D"]), "v": (K, S, case["E"]), "up": (H, T, case["E"])}
    scales = {"q": case["size"], "k": case["size"], "v": case["values"], "up": case["upstream"]}
    inputs = {}
    for name, shape in shapes.items():
        x = torch.randn(*lead, *shape, generator=g, dtype=torch.float64) * scales[name]
        inputs[name] = _to(x, case["dtype"]).to(case["device"])
    if case["bias"]:
        inputs["bias"] = _bias(case["bias"], sizes, g).to(case["device"])
    return inputs, sizes


def _to(x: Tensor, dtype: str) -> Tensor:
    kind = getattr(torch, dtype)
    most = torch.finfo(kind).max / 4
    return x.clamp(-most, most).to(kind)


def _bias(spec: Case, sizes: Sizes, g: torch.Generator) -> Tensor:
    full = (*sizes.lead, sizes.H, sizes.T, sizes.S)
    flags = [spec["shape"][0]] * len(sizes.lead) + spec["shape"][1:]
    shape = [n if flag else 1 for n, flag in zip(full, flags, strict=True)]
    x = _to(torch.randn(shape, generator=g, dtype=torch.float64) * spec["size"], spec["dtype"])
    hidden = torch.rand(shape, generator=g) < 0.3
    if spec["hidden"]:
        x = x.masked_fill(hidden, -math.inf if spec["hidden"] == 1 else torch.finfo(x.dtype).min)
    while spec["short"] and x.dim() and x.shape[0] == 1:
        x = x[0]
    return x


# -- running and comparing --------------------------------------------------------------------------------------------


def _run(case: Case, inputs: dict[str, Tensor], sizes: Sizes, impl: str) -> dict[str, np.ndarray]:
    leaves = {name: x.detach().clone() for name, x in inputs.items()}
    names = ["q", "k", "v"] + ["bias"] * bool(case["bias"] and case["bias"]["grad"])
    for name in names:
        leaves[name].requires_grad_()
    out = attend(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        None if case["mask"] is None else expressions.build(case["mask"], sizes, case["device"]),
        scores=ScaledDot() if case["scores"] == "ScaledDot" else Dot(),
        normalizer=Softmax(temperature=case["temperature"]),
        bias=leaves.get("bias"),
        query_offset=sizes.offset,
        impl=typing.cast(Any, impl),
    )
    if out.shape != leaves["up"].shape or out.dtype != leaves["q"].dtype:
        raise CaseFailure(f"{impl} gives {tuple(out.shape)} of {out.dtype}; expected {tuple(leaves['up'].shape)}")
    out.backward(leaves["up"])
    results = {"out": out.detach()}
    for name in names:
        grad = leaves[name].grad
        results["d" + name] = torch.zeros_like(leaves[name]) if grad is None else grad
    return {name: x.double().cpu().numpy() for name, x in results.items()}


def _exact(case: Case, inputs: dict[str, Tensor], sizes: Sizes) -> Exact:
    """Return the result of the oracle in the shapes of the call."""
    N = math.prod(sizes.lead)
    q, k, v, up = (_flat(inputs[name], N) for name in ("q", "k", "v", "up"))
    allowed = True if case["mask"] is None else expressions.table(case["mask"], sizes)
    bias = inputs["bias"].double().cpu().numpy() if case["bias"] else np.zeros(())
    full = (N, sizes.H, sizes.T, sizes.S)
    exact = attention(
        q,
        k,
        v,
        up,
        np.broadcast_to(allowed, sizes.full).reshape(full),
        np.broadcast_to(bias, sizes.full).reshape(full),
        scale=1 / math.sqrt(max(case["D"], 1)) if case["scores"] == "ScaledDot" else 1.0,
        temperature=case["temperature"],
        rounding=_rounding(case),
    )
    for values in (exact.values, exact.bounds):
        for name in ("out", "dq", "dk", "dv"):
            shape = inputs["up" if name == "out" else name[1:]].shape
            values[name] = values[name].reshape(tuple(shape))
        values["dbias"] = _summed(values["dbias"].reshape(sizes.full), bias.shape)
    return exact


def _flat(x: Tensor, N: int) -> np.ndarray:
    return x.double().cpu().numpy().reshape(N, *x.shape[-3:])


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum x to a shape that broadcasts to it."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    for axis, n in enumerate(shape):
        x = x.sum(axis, keepdims=True) if n == 1 else x
    return x


def _rounding(case: Case) -> Rounding:
    info = torch.finfo(getattr(torch, case["dtype"]))
    terms = math.sqrt(max(case["T"], case["S"], case["D"], 1))
    wide = case["dtype"] == "float64"
    # The exponential of torch's fused CPU kernel has 20 correct bits in float32.
    unit = max(info.eps, 2.0**-20 if case["dtype"] == "float32" else 0.0, (info.eps if wide else 2.0**-23) * terms)
    # The exponential of a GPU flushes subnormal float32 values to 0.
    flushed = 0.0 if wide or case["device"] == "cpu" else torch.finfo(torch.float32).smallest_normal
    least = max(info.smallest_normal * info.eps, flushed)
    return Rounding(unit, (info.eps if wide else 2.0**-23) * (2 + terms), least)


def _compare(
    case: Case, impl: str, results: dict, exact: Exact, reference: dict[str, float] | None
) -> dict[str, float]:
    """Return the largest error of each result in units of its bound; raise `CaseFailure` if one is too large."""
    most = torch.finfo(getattr(torch, case["dtype"])).max
    errors = {}
    for name, value in results.items():
        expected, bound = exact.values[name], SLACK * exact.bounds[name]
        if name == "dbias":
            info = torch.finfo(getattr(torch, case["bias"]["dtype"]))
            most = info.max
            bound = bound + info.eps * abs(expected) + info.smallest_normal * info.eps
        sure = _sure(value, exact, name)
        # Other implementations use torch's kernels, which keep parts of the backward pass in the inputs' dtype.
        fits = abs(expected) + np.nan_to_num(bound, posinf=0.0) < most
        if name != "out" and impl != "reference":
            fits &= exact.inner < most
        if not np.isfinite(value[fits]).all():
            raise CaseFailure(f"{impl}: {name} is not finite")
        with np.errstate(all="ignore"):
            ratio = np.where(sure & fits & np.isfinite(bound), abs(value - expected) / bound, 0.0)
        errors[name] = float(np.nan_to_num(ratio).max(initial=0.0))
        allowed = 1.0 if reference is None else 1.0 + 2 * reference[name]
        if errors[name] > allowed:
            index = np.unravel_index(int(np.nan_to_num(ratio).argmax()), ratio.shape)
            raise CaseFailure(
                f"{impl}: {name} is {value[index]:.6g}, expected {expected[index]:.6g}; the error is "
                f"{abs(value - expected)[index]:.2g}, the rounding bound {bound[index]:.2g}, "
                f"allowed {allowed * bound[index]:.2g}"
            )
    return errors


def _sure(actual: np.ndarray, exact: Exact, name: str) -> Any:
    """Return where results are unique: at temperature 0, rounding decides between nearly equal scores."""
    if not exact.unsure:
        return True
    if name not in ("out", "dq"):
        return False
    sure = np.ones(actual.shape[:-1], dtype=bool).reshape(-1, *actual.shape[-3:-1])
    for b, h, i in exact.unsure:
        sure[b, h, i] = False
    return sure.reshape(actual.shape[:-1])[..., None]
