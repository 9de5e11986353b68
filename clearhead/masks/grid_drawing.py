"""`draw_on_grid`: what one position of an image or a video sees, as a picture of the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from clearhead.errors import MaskError
from clearhead.masks.base import Mask, as_mask, check_integer, short_str
from clearhead.masks.drawing import Drawing
from clearhead.masks.grids import Axis, Grid
from clearhead.masks.operators import leaves
from clearhead.masks.regions import PairGrid


@dataclass(frozen=True)
class GridDrawing(Drawing):
    """The positions of a grid that one query sees; planes of a grid with more than two dimensions are stacked.

    Attributes:
        position: Position of the query.
        coordinates: Its coordinates.
        sizes: Sizes of the grid.
        place: Row and column of the query in the picture."""

    position: int
    coordinates: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, int]

    @property
    def caption(self) -> str:
        """One sentence describing the query and the grid."""
        grid = " × ".join(map(str, self.sizes))
        text = f"what position {self.position}, at {self.coordinates}, sees on a grid of {grid}"
        if len(self.sizes) > 2:
            text += f", in planes of {self.sizes[-2]} rows"
        return text + (f", averaged over batch and heads of shape {self.batch_shape}" if self.batch_shape else "")

    def body(self, wide: bool = True) -> list[str]:
        """Return the rows of the grid: ■ is seen, · is not; the query itself is ◆ or ◇."""
        lines = super().body(wide)
        row, column = self.place
        line, at = lines[row], (1 + wide) * column
        mark = "◆" if self.cells[row][column] else "◇"
        return [*lines[:row], line[:at] + mark + line[at + 1 :], *lines[row + 1 :]]


def grid_of(mask: Mask) -> Grid | None:
    """Return the grid of an expression, that of its first axis; None if it has none."""
    axes = [atom.leaf for atom in leaves(mask) if isinstance(atom.leaf, Axis)]
    return axes[0].grid if axes else None


def draw_on_grid(mask: Mask, position: int | None = None, *, positions: int | None = None) -> GridDrawing:
    """Draw what one position sees, on the grid of the mask.

        print(draw_on_grid(axis(clamped(1, 1), 0, (4, 6)) & axis(clamped(1, 1), 1, (4, 6)), 8))

    Args:
        mask: A mask with an `axis`.
        position: Position of the query. Default: the middle of the grid.
        positions: Number of positions, if the grid's first size is −1.

    Returns:
        A drawing to print, to display in a notebook, or to write to a file (`.svg()`).

    Raises:
        MaskError: The mask has no grid, or the position is outside of it."""
    grid = grid_of(as_mask(mask))
    if grid is None:
        raise MaskError(f"{short_str(mask)} has no grid; expected a mask with axis(mask, dim, grid=(…))")
    n = grid.positions
    if grid.is_open:
        if positions is None:
            raise MaskError(f"the grid {grid} has no fixed number of positions; pass positions=")
        n = check_integer(positions, "positions", least=1)
    mask.check(n)
    sizes = (grid.size(0, n), *grid.sizes[1:])
    index = torch.arange(n)
    coordinates = [grid.coordinate(index, dim) for dim in range(len(sizes))]
    columns = sizes[-1]
    rows = torch.zeros_like(index)
    for size, coordinate in zip(sizes[:-1], coordinates[:-1], strict=True):
        rows = rows * size + coordinate
    if position is None:
        position = int(((rows == math.prod(sizes[:-1]) // 2) & (coordinates[-1] == columns // 2)).long().argmax())
    if check_integer(position, "the position") >= n:
        raise MaskError(f"the position is {position}; expected less than {n}, the number of positions")
    p = torch.tensor(position)
    allowed = mask.test(p, index, PairGrid(n)).broadcast_to((*mask.batch_shape, n)).reshape(-1, n)
    cells = torch.zeros(math.prod(sizes[:-1]), columns, dtype=torch.float64)
    cells[rows, coordinates[-1]] = allowed.double().mean(0).cpu()
    return GridDrawing(
        str(mask),
        len(cells),
        columns,
        0,
        mask.batch_shape,
        tuple([tuple(row) for row in cells.tolist()]),
        len(cells),
        position,
        tuple([int(coordinate[position]) for coordinate in coordinates]),
        sizes,
        (int(rows[position]), int(coordinates[-1][position])),
    )
