"""The language of derivations in float64: torch's own functions, masks and automatic differentiation, which know
nothing of the exact numbers that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clearhead import masks

_TIE = 1e-9


class Doubles:
    """Matrices as float64 tensors of two dimensions."""

    def number(self, value: int) -> Tensor:
        return torch.tensor([[float(value)]], dtype=torch.float64)

    def table(self, rows: list[list[Tensor]]) -> Tensor:
        return torch.cat([torch.cat(row, 1) for row in rows])

    def operate(self, sign: str, a: Tensor, b: Tensor) -> Tensor:
        functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "**": torch.pow, "@": torch.matmul,
        }  # fmt: skip
        return functions[sign](a, b)

    def transpose(self, a: Tensor) -> Tensor:
        return a.T

    def reshape(self, a: Tensor, like: Tensor) -> Tensor:
        return a.reshape(like.shape)

    def jacobian(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        made: Tensor = torch.autograd.functional.jacobian(function, x)
        return made.reshape(-1, x.numel())

    @property
    def functions(self) -> Mapping[str, Callable[..., Tensor]]:
        return _FUNCTIONS


def _softmax(scores: Tensor, temperature: Tensor | None = None) -> Tensor:
    T = torch.ones(1, 1, dtype=scores.dtype) if temperature is None else temperature
    scores, T = torch.broadcast_tensors(scores, T[:, :1])
    hard = (scores >= scores.amax(-1, keepdim=True) - _TIE).to(scores.dtype)
    soft = (scores / T.where(T > 0, 1.0)).softmax(-1)
    return torch.where(T > 0, soft, hard / hard.sum(-1, keepdim=True))


def _band(n: Tensor, weights: Tensor) -> Tensor:
    places, most = torch.arange(int(n)), weights.shape[1]
    which = places - places[:, None] + most // 2
    return weights[0][which.clamp(0, most - 1)].masked_fill((which < 0) | (which >= most), -torch.inf)


def _picked(a: Tensor, places: Tensor) -> Tensor:
    return a[places.flatten().long() - 1]


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "abs": torch.abs, "tanh": torch.tanh, "relu": torch.relu,
    "sigmoid": torch.sigmoid, "ceil": torch.ceil, "floor": torch.floor,
    "nonzero": lambda a: (a.abs() > _TIE).to(a.dtype),
    "sign": lambda a: a.where(a.abs() > _TIE, 0.0).sign(), "flat": lambda a: a.reshape(-1, 1),
    "shaped": lambda a, like: a.reshape(like.shape),
    "masked": lambda scores, may: scores.masked_fill(may == 0, -torch.inf),
    "softmax": _softmax, "layer_norm": lambda a: torch.nn.functional.layer_norm(a, a.shape[-1:], eps=0.0),
    "max": lambda a: a.max().reshape(1, 1), "sum": lambda a: a.sum().reshape(1, 1),
    "mean": lambda a: a.mean().reshape(1, 1), "row_sums": lambda a: a.sum(1, keepdim=True),
    "row_means": lambda a: a.mean(1, keepdim=True), "diag": lambda a: torch.diag(a[0]),
    "eye": lambda n: torch.eye(int(n), dtype=torch.float64),
    "ones": lambda t, s: torch.ones(int(t), int(s), dtype=torch.float64),
    "causal": lambda n: masks.causal().dense(int(n)).double(),
    "padding": lambda t, s, kept: masks.padding(torch.tensor([int(kept)])).dense(int(t), int(s))[0, 0].double(),
    "band": _band, "rows": _picked, "columns": lambda a, places: _picked(a.T, places).T,
    "beside": lambda *parts: torch.cat(parts, 1), "below": lambda *parts: torch.cat(parts),
    "pick": lambda a, places: a.gather(1, places.flatten().long()[:, None] - 1),
}  # fmt: skip
