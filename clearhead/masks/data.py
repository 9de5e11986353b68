"""Masks that contain tensors: padding, documents, allow, forbid.

They are equal only to masks with the same tensor objects, print the name of their tensor (`padding(lengths)`), and
prepend its batch dimensions. Values are read when the mask is used, so do not modify the tensor afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead.errors import DtypeError, ShapeError
from clearhead.masks.base import Leaf, Mask
from clearhead.masks.pair_interval import PairInterval
from clearhead.masks.regions import UNBOUNDED, KeyInterval, KeyIntervalFunction, PairGrid


@dataclass(frozen=True, repr=False, eq=False)
class DataMask(Leaf):
    """A leaf with tensors; `names` are their names in the text of the expression."""

    data: tuple[Tensor, ...]
    names: tuple[str, ...]
    is_structural = False
    constrains_sizes = True

    @property
    def versions(self) -> tuple[int, ...] | None:
        if any([tensor.is_inference() for tensor in self.data]):
            return None  # torch does not count modifications of inference tensors
        return tuple([tensor._version for tensor in self.data])

    @property
    def device(self) -> torch.device | None:
        return self.data[0].device

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or len(self.data) != len(other.data):
            return False
        return all(a is b for a, b in zip(self.data, other.data, strict=True))

    def __hash__(self) -> int:
        return hash((type(self).__name__, *[id(tensor) for tensor in self.data]))

    def __str__(self) -> str:
        named = [f"left_pad={name}" for name in self.names[1:]]  # only `padding` has a second tensor
        return f"{type(self).__name__.lower()}({', '.join([self.names[0], *named])})"


class Padding(DataMask):
    """left_pad ≤ j < left_pad + lengths; see `padding`. `data` is (lengths,) or (lengths, left_pad)."""

    uses_query = False

    @property
    def lengths(self) -> Tensor:
        """Number of real tokens of each sequence, (*batch)."""
        return self.data[0]

    @property
    def left_pad(self) -> Tensor | None:
        """Number of padding tokens before them, (*batch), or None for none."""
        return self.data[1] if len(self.data) > 1 else None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.lengths.shape, 1) if self.lengths.ndim else ()

    def _bounds(self, device: torch.device, rank: int) -> tuple[Tensor | int, Tensor]:
        """Return the first real key and the key after the last, each (*batch, 1 for the heads, then `rank` ones)."""
        shape = (*self.batch_shape, *[1] * rank)
        lengths = self.lengths.to(device=device, dtype=torch.int64).reshape(shape)
        if self.left_pad is None:
            return 0, lengths
        left_pad = self.left_pad.to(device=device, dtype=torch.int64).reshape(shape)
        return left_pad, left_pad + lengths

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        start, stop = self._bounds(j.device, max(p.ndim, j.ndim))
        return (start <= j) & (j < stop)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        start, stop = self._bounds(self.lengths.device, 1)
        if swapped:
            return lambda p: KeyInterval(0, torch.where((start <= p) & (p < stop), UNBOUNDED, 0))
        return lambda p: KeyInterval(start, stop)

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(key_padding=self.data)


class Documents(DataMask):
    """ids[p] = ids[j] ≥ 0; see `documents`. `data` is (ids,)."""

    symmetric = True

    @property
    def ids(self) -> Tensor:
        """The document of each position, (*batch, N)."""
        return self.data[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.ids.shape[:-1], 1) if self.ids.ndim > 1 else ()

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        N = self.ids.shape[-1]
        if N < S or (T > 0 and N < query_offset + T):
            raise ShapeError(
                f"documents({self.names[0]}) has ids for {N} positions, but S={S} keys with T={T} queries from "
                f"position {query_offset} need {max(S, query_offset + T)}; pass ids for every position"
            )

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        rank = max(p.ndim, j.ndim)
        query_ids, key_ids = self._at(p, rank), self._at(j, rank)
        return (query_ids == key_ids) & (query_ids >= 0)

    def _at(self, positions: Tensor, rank: int) -> Tensor:
        """Return the documents of these positions, (*batch_shape, *positions); −1 for positions without one."""
        ids = self.ids.to(positions.device, torch.int64)
        N = ids.shape[-1]
        positions = positions.reshape((*[1] * (rank - positions.ndim), *positions.shape))
        if N == 0:
            return torch.full_like(positions, -1)
        documents = (ids.unsqueeze(-2) if ids.ndim > 1 else ids)[..., positions.clamp(0, N - 1)]
        return torch.where((positions >= 0) & (positions < N), documents, -1)

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        runs = _runs(self.ids.long())
        if runs is None:
            return None
        start, stop = runs
        if self.ids.ndim > 1:
            start, stop = start.unsqueeze(-2), stop.unsqueeze(-2)  # (*batch, 1, N)

        def keys(p: Tensor) -> KeyInterval:
            beyond = p >= start.shape[-1]
            p = p.clamp(max=max(start.shape[-1] - 1, 0))
            return KeyInterval(start[..., p], torch.where(beyond, 0, stop[..., p]))

        return keys

    def pair_interval(self) -> PairInterval | None:
        return PairInterval(ids=self.ids)


class Allow(DataMask):
    """A bool tensor whose True may attend; see `allow`. `data` is (tensor,)."""

    @property
    def tensor(self) -> Tensor:
        """The tensor, (…, T, S)."""
        return self.data[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[:-2])

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return not position  # rows and columns are counted from 0, whatever their positions

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        expected = (S, T) if swapped else (T, S)
        shape = tuple(self.tensor.shape[-2:])
        if shape != expected:
            context = " (the mask is under .T)" if swapped else ""
            raise ShapeError(
                f"{self} contains a tensor of {shape[0]} × {shape[1]}, but {expected[0]} × {expected[1]} is "
                f"expected{context}: its last two dimensions are queries and keys and must match exactly"
            )

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        tensor = self.tensor.to(p.device)
        if grid.is_full:
            full = tensor.mT if grid.swapped else tensor
            return full.clone(memory_format=torch.contiguous_format)
        row, column = (p, j - grid.query_offset) if grid.swapped else (p - grid.query_offset, j)
        # `scattered(…).T` may list positions without a query: entries outside the tensor are False.
        T, S = tensor.shape[-2:]
        in_range = (row >= 0) & (row < T) & (column >= 0) & (column < S)
        return tensor[..., row.clamp(0, T - 1), column.clamp(0, S - 1)] & in_range


class Forbid(Allow):
    """A bool tensor whose True is hidden; see `forbid`. `data` is (tensor,)."""

    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        return ~super().test(p, j, grid)


@explain_keywords
def padding(lengths: Tensor | Sequence[int], *, left_pad: Tensor | Sequence[int] | None = None) -> Mask:
    """Hide padding: sequence b sees its keys left_pad[b] ≤ j < left_pad[b] + lengths[b].

        padding([5])
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·

    Only keys are hidden; the outputs of padding queries are meaningless (`padding(l) & padding(l).T` hides their rows
    too). T ≠ S needs no `query_offset`.

    Args:
        lengths: Number of real tokens of each sequence, an integer tensor of any batch shape or a list. A length of 0
            or less allows nothing, a length above S all keys.
        left_pad: Number of padding tokens before them, of the same shape. Default: 0.

    Returns:
        A mask whose `dense` is (*batch, 1, T, S), the 1 for the heads.

    Raises:
        DtypeError: `lengths` or `left_pad` are not integers.
        ShapeError: Their shapes differ."""
    sizes = integer_tensor(lengths, "lengths", "padding")
    if left_pad is None:
        return Padding((sizes,), ("lengths",))
    starts = integer_tensor(left_pad, "left_pad", "padding")
    if starts.shape != sizes.shape:
        raise ShapeError(
            f"padding got lengths of shape {tuple(sizes.shape)} and left_pad of shape {tuple(starts.shape)}; "
            "expected equal shapes"
        )
    return Padding((sizes, starts), ("lengths", "left_pad"))


@explain_keywords
def documents(ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Restrict attention to the document of the query, for packed sequences: ids[p] = ids[j].

        documents([0, 0, 0, 5, 5, -1, 2, 2])
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        · · · ■ ■ · · ·
        · · · ■ ■ · · ·
        · · · · · · · ·
        · · · · · · ■ ■
        · · · · · · ■ ■

    A document may consist of several pieces. T ≠ S needs `query_offset`.

    Args:
        ids: Document of each position, an integer tensor (…, N) or a list; N must cover all keys and queries. A
            negative id is not a document: the token neither attends nor is attended to.

    Returns:
        A mask whose `dense` is (*batch, 1, T, S), the 1 for the heads, and (T, S) for ids (N,).

    Raises:
        DtypeError: `ids` are not integers.
        ShapeError: `ids` is a scalar."""
    tensor = integer_tensor(ids, "ids", "documents")
    if tensor.ndim == 0:
        raise ShapeError("documents got a scalar; expected ids (…, N), one for each position")
    return Documents((tensor,), ("ids",))


@explain_keywords
def allow(tensor: Tensor) -> Mask:
    """Convert a bool tensor (…, T, S) whose True may attend, as in `scaled_dot_product_attention`.

        allow(torch.eye(4, dtype=torch.bool))
        ■ · · ·
        · ■ · ·
        · · ■ ·
        · · · ■

    T and S must match exactly; row i belongs to query i whatever `query_offset` is. Leading dimensions are preserved:
    (B, 1, T, S) is one pattern per sequence, (H, T, S) one per head.

    Args:
        tensor: The bool tensor, (…, T, S).

    Returns:
        A mask; two masks of the same tensor object are equal.

    Raises:
        DtypeError: The tensor is not bool (0/1 and 0/−∞ masks have opposite meanings).
        ShapeError: The tensor has fewer than two dimensions.
    """
    return Allow((_bools(tensor, "allow"),), ("tensor",))


@explain_keywords
def forbid(tensor: Tensor) -> Mask:
    """Convert a bool tensor (…, T, S) whose True is hidden, as in `nn.MultiheadAttention`.

        forbid(torch.eye(4, dtype=torch.bool))
        · ■ ■ ■
        ■ · ■ ■
        ■ ■ · ■
        ■ ■ ■ ·

    Equal in effect to `~allow(tensor)`, with the same rules.

    Args:
        tensor: The bool tensor, (…, T, S).

    Returns:
        A mask; two masks of the same tensor object are equal.

    Raises:
        DtypeError: The tensor is not bool.
        ShapeError: The tensor has fewer than two dimensions.
    """
    return Forbid((_bools(tensor, "forbid"),), ("tensor",))


def integer_tensor(value: object, name: str, owner: str) -> Tensor:
    """Return an integer tensor of an argument; raise `DtypeError` for other values."""
    if not isinstance(value, Tensor):
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            hint = "; for one length shared by all sequences use prefix(n)" if owner == "padding" else ""
            raise DtypeError(f"the {name} of {owner} is {value!r}; expected a tensor or list of integers{hint}")
        try:
            tensor = torch.tensor(value) if len(value) else torch.zeros(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"the {name} of {owner} cannot be converted to a tensor: {error}; expected integers"
            raise DtypeError(message) from None
    else:
        tensor = value
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise DtypeError(f"the {name} of {owner} have dtype {tensor.dtype}; expected integers (torch.int64)")
    return tensor


def _bools(value: object, owner: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise DtypeError(f"{owner} got {type(value).__name__}; expected a bool tensor (…, T, S)")
    if value.dtype != torch.bool:
        meaning = "may attend" if owner == "allow" else "is hidden"
        raise DtypeError(
            f"{owner} got a tensor of {value.dtype}; expected torch.bool, whose True {meaning}: compare first, for "
            f"example {owner}(tensor != 0)"
        )
    if value.ndim < 2:
        raise ShapeError(f"{owner} got a tensor of shape {tuple(value.shape)}; expected (…, T, S)")
    return value


def _runs(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return where the document of each position starts and stops, (*batch, N).

    Returns None if a document has several pieces.
    """
    N = ids.shape[-1]
    index = torch.arange(N, device=ids.device).expand(ids.shape)
    if N == 0:
        return index, index
    change = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    first = torch.cat([edge, change], -1)
    last = torch.cat([change, edge], -1)
    has_document = ids >= 0
    ordered = ids.sort(-1).values
    distinct = torch.cat([edge, ordered[..., 1:] != ordered[..., :-1]], -1) & (ordered >= 0)
    if not torch.equal((first & has_document).sum(-1), distinct.sum(-1)):
        return None
    start = torch.where(first, index, 0).cummax(-1).values
    stop = torch.where(last, index + 1, N).flip(-1).cummin(-1).values.flip(-1)
    return start, torch.where(has_document, stop, start)
