"""Draw one head of a bias for the terminal, a notebook or as SVG."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from clearhead.attention.biases.base import Bias, TensorBias, check_heads, lower
from clearhead.errors import ShapeError
from clearhead.masks.drawing import Drawing

_MAX_CELLS = 128


@dataclass(frozen=True)
class BiasDrawing(Drawing):
    """A drawn bias: `print` it, display it in a notebook, or write `.svg()` to a file.

    Attributes:
        head: The head that is drawn.
        low: Smallest bias of the drawing, shown blank.
        high: Largest bias of the drawing, shown as █."""

    head: int = 0
    low: float = 0.0
    high: float = 0.0

    @property
    def is_shaded(self) -> bool:
        return True

    @property
    def caption(self) -> str:
        return f"head {self.head}, {super().caption}"

    @property
    def legend(self) -> str:
        return f"blank {self.low:g}, ░▒▓ between, █ {self.high:g}"


def draw(
    bias: Bias, T: int, S: int | None = None, *, query_offset: int = 0, head: int = 0, cells: int = 32
) -> BiasDrawing:
    """Draw a head of a bias with at most `cells` × `cells` cells (up to 128); see `Bias.draw`."""
    S = T if S is None else S
    for name, value, least, most in (
        ("T", T, 0, None),
        ("S", S, 0, None),
        ("query_offset", query_offset, 0, None),
        ("cells", cells, 1, _MAX_CELLS),
        ("head", head, 0, max(bias.n_heads or 1, 1) - 1),
    ):
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ShapeError(f"{name} is {value}; expected a whole number {limit}")
    check_heads(bias, bias.n_heads or 1)
    rows, columns = _middles(T, cells), _middles(S, cells)
    if not len(rows) or not len(columns):
        return BiasDrawing(str(bias), T, S, query_offset, (), (), T, head)
    device = bias.tensors[0].device if bias.tensors else None
    values, tensor = lower(bias, T, S, query_offset, device, torch.float64)
    table = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    if values is not None:
        values = values.detach().cpu()
        table = table + values[min(head, len(values) - 1)][columns - rows[:, None] + (T - 1)]
    if tensor is not None:
        table = table + _cells_of(TensorBias(tensor), T, S, head)[rows[:, None], columns]
    finite = table[table.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    shades = ((table - low) / (high - low) if high > low else torch.ones_like(table)).clamp(0.0, 1.0)
    picture = tuple([tuple(row) for row in shades.tolist()])
    return BiasDrawing(str(bias), T, S, query_offset, (), picture, T, head, low, high)


def _middles(n: int, cells: int) -> torch.Tensor:
    """Return the positions at the middle of each cell."""
    size = min(n, cells)
    index = torch.arange(size)
    return (2 * index + 1) * n // (2 * max(size, 1))


def _cells_of(bias: TensorBias, T: int, S: int, head: int) -> torch.Tensor:
    """Return the tensor of a head, averaged over the batch, (T, S)."""
    tensor = bias.tensor.detach().double().cpu()
    while tensor.dim() < 3:
        tensor = tensor[None]
    tensor = tensor.select(-3, min(head, tensor.shape[-3] - 1))
    return tensor.reshape(-1, *tensor.shape[-2:]).mean(0).expand(T, S)
