"""Masks on grids of two or more dimensions: `axis` applies a mask to one coordinate, `clamped` is NATTEN's window.

A grid lays out positions in row-major order, or in tiles that are row-major inside. Attention on images and videos
combines one mask per axis with `&`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead.errors import MaskError, MaskTypeError, ShapeError
from clearhead.masks.base import MAX_DEPTH, MAX_INTEGER, MAX_NODES, Leaf, Mask, check_integer, short_str
from clearhead.masks.operators import Atom, PerHead, fold
from clearhead.masks.regions import UNBOUNDED, KeyInterval, KeyIntervalFunction, PairGrid, Region
from clearhead.masks.structural import Window

MAX_DIMENSIONS = 8
"""Largest number of dimensions of a grid."""


@dataclass(frozen=True)
class Grid:
    """A layout of positions as coordinates.

    Attributes:
        sizes: Number of coordinates per dimension; −1 as the first: as many as the positions need.
        tile: Tile size per dimension. Positions count through a tile before the next one; () for no tiles."""

    sizes: tuple[int, ...]
    tile: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the first size is determined by the number of positions."""
        return self.sizes[0] == -1

    @property
    def slab(self) -> int:
        """Number of positions per coordinate of the first dimension (per row of tiles, if there are tiles)."""
        return math.prod(self.sizes[1:]) * (self.tile[0] if self.tile else 1)

    @property
    def positions(self) -> int:
        """Number of positions of a grid that is not open."""
        return math.prod(self.sizes)

    def size(self, dim: int, positions: int) -> int:
        """Return the number of coordinates of a dimension, for a grid of this many positions."""
        if dim or not self.is_open:
            return self.sizes[dim]
        return -(-positions // self.slab) * (self.tile[0] if self.tile else 1)

    def digits(self, dim: int) -> tuple[tuple[int, int, int], ...]:
        """Return (stride, count, weight): the coordinate is Σ weight · (position // stride mod count).

        A count of 0 is unlimited."""
        inner, outer = self.sizes[dim + 1 :], 0 if dim == 0 else self.sizes[dim]
        if not self.tile:
            return ((math.prod(inner), outer, 1),)
        side, volume = self.tile[dim], math.prod(self.tile)
        tiles = math.prod([n // t for n, t in zip(inner, self.tile[dim + 1 :], strict=True)])
        return (volume * tiles, outer // side, side), (math.prod(self.tile[dim + 1 :]), side, 1)

    def coordinate(self, positions: Tensor, dim: int) -> Tensor:
        """Return the coordinates of positions along a dimension."""
        parts = []
        for stride, count, weight in self.digits(dim):
            digit = positions // stride if stride > 1 else positions
            digit = digit % count if count else digit
            parts.append(digit * weight if weight > 1 else digit)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def coordinate_range(self, first: int, last: int, dim: int) -> tuple[int, int]:
        """Return bounds of the coordinates of the positions from `first` to `last`."""
        low = high = 0
        for stride, count, weight in self.digits(dim):
            begin, end = first // stride, last // stride
            if count and begin // count == end // count:
                begin, end = begin % count, end % count
            elif count:
                begin, end = 0, count - 1
            low, high = low + begin * weight, high + end * weight
            if begin < end and weight > 1:
                return low, high + weight - 1  # several tiles: every coordinate of theirs
        return low, high

    def __str__(self) -> str:
        tile = f", tile={_numbers(self.tile)}" if self.tile else ""
        return f"grid={_numbers(self.sizes)}{tile}"


@dataclass(frozen=True, repr=False)
class Axis(Leaf):
    """A mask of coordinates along one dimension of a grid; see `axis`."""

    mask: Mask
    dim: int
    grid: Grid
    depth: int = field(default=2, compare=False)
    nodes: int = field(default=2, compare=False)
    is_structural: bool = field(default=False, compare=False)
    constrains_sizes = True

    @property
    def depends_on_length(self) -> bool:
        return self.dim == 0 and self.grid.is_open and self.mask.depends_on_length

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.mask.batch_shape

    @property
    def versions(self) -> tuple[int, ...] | None:
        return self.mask.versions

    @property
    def device(self) -> torch.device | None:
        return self.mask.device

    @property
    def symmetric(self) -> bool:
        return isinstance(self.mask, Leaf) and self.mask.symmetric

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        keys = self.grid.size(self.dim, grid.keys)
        coordinates = self.grid.coordinate(p, self.dim), self.grid.coordinate(j, self.dim)
        return self.mask.test(*coordinates, PairGrid(keys, 0, grid.swapped))

    def classify(self, region: Region) -> bool | None:
        queries = self.grid.coordinate_range(region.first_query, region.last_query, self.dim)
        keys = self.grid.coordinate_range(region.first_key, region.last_key, self.dim)
        if region.min_distance == region.max_distance == 0:
            return self.mask.classify(Region(*queries, *keys, 0, 0))
        return self.mask.classify(Region.box(*queries, *keys))

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        """Return intervals for the first dimension (slabs of consecutive positions), or for one key per line."""
        if self.grid.tile or not isinstance(self.mask, Leaf):
            return None
        n, stride = self.grid.sizes[self.dim], math.prod(self.grid.sizes[self.dim + 1 :])
        if self.dim:
            is_point = isinstance(self.mask, Window) and self.mask.before == self.mask.after == 0
            return (lambda p: KeyInterval(0, UNBOUNDED, n, p % n)) if is_point and stride == 1 else None
        keys = None if grid is None else self.grid.size(0, grid.keys)
        inner = self.mask.key_intervals(swapped, None if keys is None else PairGrid(keys))
        if inner is None or (stride > 1 and inner(torch.zeros(1, dtype=torch.int64)).modulus > 1):
            return None
        function = inner

        def intervals(p: Tensor) -> KeyInterval:
            start, stop, modulus, residue = function(p // stride)
            return KeyInterval(_scale(start, stride), _scale(stop, stride), modulus, residue)

        return intervals

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return self.mask._uses_query(swapped, position=False)  # rows of tensors are coordinates, hence positions

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        positions = max(S, query_offset + T)
        if not self.grid.is_open and positions != self.grid.positions and S and T:
            raise ShapeError(
                f"{short_str(self)} describes a grid of {self.grid.positions} positions, but S={S} keys with T={T} "
                f"queries from position {query_offset} are {positions}; pass a grid of {positions} positions, or −1 as "
                "its first size for any number"
            )
        if self.mask.constrains_sizes:
            keys = self.grid.size(self.dim, positions)
            self.mask._check_data(keys, keys, 0, swapped)

    def atom_of(self, inner: Atom) -> Atom:
        """Return the atom of an axis whose mask is a leaf of this one's."""
        return Atom(Axis(inner.leaf, self.dim, self.grid, is_structural=inner.leaf.is_structural), inner.swapped)

    def arguments(self) -> tuple[int, ...]:
        """Return the integers of the grid."""
        return (self.dim, *self.grid.sizes, *self.grid.tile)

    def __str__(self) -> str:
        # Converted with !s, because torch.compile cannot format objects in an f-string.
        return f"axis({self.mask!s}, {self.dim}, {self.grid!s})"


@dataclass(frozen=True, repr=False)
class Clamped(Leaf):
    """The window of `window(before, after)`, shifted to be inside the keys; see `clamped`."""

    before: int
    after: int
    depends_on_length = True

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        start, stop = self._bounds(p, grid.keys)
        return (j >= start) & (j < stop)

    def _bounds(self, p: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        width = min(self.before + self.after + 1, keys)
        start = (p - self.before).clamp(0, keys - width)
        return start, start + width

    def classify(self, region: Region) -> bool | None:
        # The number of keys is unknown. A second position that does not exceed the first one is certainly below it.
        always = 0 <= region.min_distance and region.max_distance <= self.before
        return True if always else None

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        if grid is None:
            return None
        keys = grid.keys

        def visible_keys(p: Tensor) -> KeyInterval:
            return KeyInterval(*self._bounds(p, keys))

        def visible_queries(j: Tensor) -> KeyInterval:
            width = min(self.before + self.after + 1, keys)
            # The start of the window, p − before clamped to 0 … keys − width, is between j − width + 1 and j.
            first = torch.where(j < width, 0, j - (width - 1) + self.before)
            stop = torch.where(j >= keys - width, UNBOUNDED, j + (self.before + 1))
            return KeyInterval(first, torch.where(j < keys, stop, 0))

        return visible_queries if swapped else visible_keys


@explain_keywords
def axis(mask: Mask, dim: int, grid: Sequence[int], tile: Sequence[int] | None = None) -> Mask:
    """Apply a mask to one coordinate of positions on a grid: p sees j if `mask` allows their coordinates.

        axis(window(1, 1), 1, grid=(2, 4))
        ■ ■ · · ■ ■ · ·
        ■ ■ ■ · ■ ■ ■ ·
        · ■ ■ ■ · ■ ■ ■
        · · ■ ■ · · ■ ■
        ■ ■ · · ■ ■ · ·
        ■ ■ ■ · ■ ■ ■ ·
        · ■ ■ ■ · ■ ■ ■
        · · ■ ■ · · ■ ■

    Neighborhood attention on an image of 64 × 64 patches is
    `axis(window(3, 3), 0, (64, 64)) & axis(window(3, 3), 1, (64, 64))`; with `clamped` windows it is that of NATTEN.
    T ≠ S needs `query_offset` if the inner mask does.

    Args:
        mask: A mask of coordinates: any expression, also with tensors (`padding` of the number of frames).
        dim: The dimension of the grid, from 0; negative ones count from the end.
        grid: Number of coordinates per dimension, whose product is the number of positions. The first may be −1: then
            there are as many as the positions need, as for frames that are generated one by one.
        tile: Tile size per dimension, if positions count through one tile after the other; each divides its size.

    Returns:
        A mask with the batch dimensions of `mask`.

    Raises:
        MaskTypeError: `mask` is not a mask, or `grid` or `tile` is not a sequence.
        MaskError: `dim`, `grid` or `tile` is invalid.

    Example:
        axis(causal(), 0, grid=(-1, 16))  # blocks of 16 tokens see themselves and the preceding blocks
    """
    if not isinstance(mask, Mask):
        raise MaskTypeError(f"the mask of axis is {type(mask).__name__}; expected a mask such as window(3, 3)")
    sizes = _sizes(grid, "grid")
    for number, size in enumerate(sizes):
        if not (number == 0 and size == -1):
            check_integer(size, f"grid[{number}] of axis", least=1)
    if math.prod(sizes[1:]) * abs(sizes[0]) > MAX_INTEGER:
        raise MaskError(f"the grid of axis is {_numbers(sizes)}; expected at most {MAX_INTEGER} positions")
    tiles = () if tile is None else _sizes(tile, "tile")
    if tiles and len(tiles) != len(sizes):
        raise MaskError(f"the tile of axis is {_numbers(tiles)}; expected {len(sizes)} sizes, as in the grid")
    for number, side in enumerate(tiles):
        check_integer(side, f"tile[{number}] of axis", least=1)
        if sizes[number] != -1 and sizes[number] % side:
            raise MaskError(
                f"tile[{number}] of axis is {side}, which does not divide the grid's size {sizes[number]}; expected a "
                "divisor"
            )
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(sizes) <= dim < len(sizes):
        raise MaskError(f"the dim of axis is {dim!r}; expected a dimension of the grid, 0 to {len(sizes) - 1}")
    depth, nodes = mask.depth + 1, mask.nodes + 1
    if depth > MAX_DEPTH or nodes > MAX_NODES:
        raise MaskError(
            f"the mask of axis is {mask.depth} deep and has {mask.nodes} masks and operators; expected less than "
            f"{MAX_DEPTH} and {MAX_NODES}"
        )
    has_tiles = any(side > 1 for side in tiles)
    return Axis(mask, dim % len(sizes), Grid(sizes, tiles if has_tiles else ()), depth, nodes, mask.is_structural)


@explain_keywords
def clamped(before: int, after: int) -> Mask:
    """A query sees a window of before + 1 + after keys around it, shifted at the ends so that its size is the same.

        clamped(2, 1)
        ■ ■ ■ ■ · · · ·
        ■ ■ ■ ■ · · · ·
        ■ ■ ■ ■ · · · ·
        · ■ ■ ■ ■ · · ·
        · · ■ ■ ■ ■ · ·
        · · · ■ ■ ■ ■ ·
        · · · · ■ ■ ■ ■
        · · · · ■ ■ ■ ■

    These are the windows of neighborhood attention (NATTEN). They depend on the number of keys (`depends_on_length` is
    True); inside `axis` that is the size of the grid. With fewer keys than the window, a query sees them all.
    T ≠ S needs `query_offset`.

    Args:
        before: Number of visible keys before the query, away from the ends, at least 0.
        after: Number of visible keys after the query, at least 0.

    Returns:
        An immutable mask, equal to every mask with the same arguments.

    Raises:
        MaskError: An argument is not a whole number of at least 0."""
    return Clamped(check_integer(before, "clamped's before"), check_integer(after, "clamped's after"))


def axes_of(mask: Mask) -> tuple[Grid, int] | None:
    """Return the grid and dimension that all leaves of an expression have in common; None if they differ."""
    if isinstance(mask, Axis):
        return mask.grid, mask.dim
    if isinstance(mask, (Leaf, PerHead)):
        return None
    parts: tuple[Mask, ...] = mask.parts  # type: ignore[attr-defined]
    first = axes_of(parts[0])
    return first if all([axes_of(part) == first for part in parts[1:]]) else None


def mask_of_coordinates(mask: Mask) -> Mask:
    """Return the mask of coordinates of an expression whose leaves are axes of one dimension (`axes_of`)."""
    result: Mask = fold(
        mask,
        leaf=_inner,
        and_=lambda a, b: a & b,
        or_=lambda a, b: a | b,
        not_=lambda a: ~a,
    )
    return result


def _inner(atom: Atom) -> Mask:
    leaf, swapped = atom
    assert isinstance(leaf, Axis)
    return leaf.mask.T if swapped else leaf.mask


def _scale(bound: Tensor | int, stride: int) -> Tensor | int:
    """Return a bound of coordinates as a bound of positions, without overflow."""
    most = UNBOUNDED // stride + 1
    return min(bound, most) * stride if isinstance(bound, int) else bound.clamp(max=most) * stride


def _sizes(value: object, name: str) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise MaskTypeError(f"the {name} of axis is {value!r}; expected one size per dimension, such as (64, 64)")
    sizes = tuple(value)
    if not 1 <= len(sizes) <= MAX_DIMENSIONS:
        raise MaskError(f"the {name} of axis has {len(sizes)} dimensions; expected 1 to {MAX_DIMENSIONS}")
    return sizes


def _numbers(sizes: tuple[int, ...]) -> str:
    """Return sizes in the notation of Python's tuples."""
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join([str(size) for size in sizes])})"
