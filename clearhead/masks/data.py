"""Masks that hold tensors: padding, documents, allow, block.

They are equal only to masks that hold the very same tensors, print the name of their tensor (`padding(lengths)`), and
add its batch dimensions in front. Values are read when the mask is used: do not change a tensor that you gave away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import DtypeError, ShapeError
from clearhead.masks.base import Leaf, Mask
from clearhead.masks.geometry import UNBOUNDED, Grid, Keys, KeysOf


@dataclass(frozen=True, repr=False, eq=False)
class _Data(Leaf):
    """A leaf with tensors; `names` is what they are called in the text of the expression."""

    data: tuple[Tensor, ...]
    names: tuple[str, ...]
    is_structural = False

    @property
    def versions(self) -> tuple[int, ...] | None:
        if any([tensor.is_inference() for tensor in self.data]):
            return None  # torch does not count changes of these
        return tuple([tensor._version for tensor in self.data])

    @property
    def device(self) -> torch.device | None:
        return self.data[0].device

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or len(self.data) != len(other.data):
            return False
        return all(mine is yours for mine, yours in zip(self.data, other.data, strict=True))

    def __hash__(self) -> int:
        return hash((type(self).__name__, *[id(tensor) for tensor in self.data]))

    def __str__(self) -> str:
        named = [f"before={name}" for name in self.names[1:]]  # of `padding` alone
        return f"{type(self).__name__.lower()}({', '.join([self.names[0], *named])})"


class Padding(_Data):
    """before ≤ j < before + lengths; see `padding`. `data` is (lengths,) or (lengths, before)."""

    reads_query = False

    @property
    def lengths(self) -> Tensor:
        """How many real tokens each sequence has, (*batch)."""
        return self.data[0]

    @property
    def before(self) -> Tensor | None:
        """How much padding stands in front of them, (*batch), or None for none."""
        return self.data[1] if len(self.data) > 1 else None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.lengths.shape, 1) if self.lengths.ndim else ()

    def _bounds(self, device: torch.device, rank: int) -> tuple[Tensor | int, Tensor]:
        """First real key and the key after the last, each (*batch, 1 for the heads, then `rank` ones)."""
        shape = (*self.batch_shape, *[1] * rank)
        lengths = self.lengths.to(device=device, dtype=torch.int64).reshape(shape)
        if self.before is None:
            return 0, lengths
        before = self.before.to(device=device, dtype=torch.int64).reshape(shape)
        return before, before + lengths

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        start, stop = self._bounds(j.device, max(p.ndim, j.ndim))
        return (start <= j) & (j < stop)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        start, stop = self._bounds(self.lengths.device, 1)
        if swapped:
            return lambda p: Keys(0, torch.where((start <= p) & (p < stop), UNBOUNDED, 0))
        return lambda p: Keys(start, stop)


class Documents(_Data):
    """ids[p] = ids[j] ≥ 0; see `documents`. `data` is (ids,)."""

    symmetric = True

    @property
    def ids(self) -> Tensor:
        """The document of each position, (*batch, N)."""
        return self.data[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (*self.ids.shape[:-1], 1) if self.ids.ndim > 1 else ()

    def _check_data(self, T: int, S: int, offset: int, swapped: bool) -> None:
        N = self.ids.shape[-1]
        if N < S or (T > 0 and N < offset + T):
            raise ShapeError(
                f"documents({self.names[0]}) knows {N} positions, and S={S} keys with T={T} queries from position "
                f"{offset} need {max(S, offset + T)}: give ids for every position"
            )

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        rank = max(p.ndim, j.ndim)
        mine, yours = self._at(p, rank), self._at(j, rank)
        return (mine == yours) & (mine >= 0)

    def _at(self, positions: Tensor, rank: int) -> Tensor:
        """The documents at these positions, (*batch_shape, *positions); −1 for positions that have none."""
        ids = self.ids.to(positions.device, torch.int64)
        N = ids.shape[-1]
        positions = positions.reshape((*[1] * (rank - positions.ndim), *positions.shape))
        if N == 0:
            return torch.full_like(positions, -1)
        found = (ids.unsqueeze(-2) if ids.ndim > 1 else ids)[..., positions.clamp(0, N - 1)]
        return torch.where((positions >= 0) & (positions < N), found, -1)

    def keys_of(self, swapped: bool) -> KeysOf | None:
        runs = _runs(self.ids.long())
        if runs is None:
            return None
        start, stop = runs
        if self.ids.ndim > 1:
            start, stop = start.unsqueeze(-2), stop.unsqueeze(-2)  # (*batch, 1, N)

        def keys(p: Tensor) -> Keys:
            beyond = p >= start.shape[-1]
            p = p.clamp(max=max(start.shape[-1] - 1, 0))
            return Keys(start[..., p], torch.where(beyond, 0, stop[..., p]))

        return keys


class Allow(_Data):
    """A bool tensor whose True may attend; see `allow`. `data` is (tensor,)."""

    @property
    def tensor(self) -> Tensor:
        """The tensor as it was given, (…, T, S)."""
        return self.data[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[:-2])

    def _reads(self, swapped: bool, *, place: bool) -> bool:
        return not place  # its rows and columns are counted, wherever they stand

    def _check_data(self, T: int, S: int, offset: int, swapped: bool) -> None:
        expected = (S, T) if swapped else (T, S)
        found = tuple(self.tensor.shape[-2:])
        if found != expected:
            turned = " (it stands under .T)" if swapped else ""
            raise ShapeError(
                f"{self} holds a tensor of {found[0]} × {found[1]} and is used where {expected[0]} × {expected[1]} is "
                f"needed{turned}: its last two dimensions are queries and keys and must match exactly"
            )

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        tensor = self.tensor.to(p.device)
        if grid.whole:
            whole = tensor.mT if grid.swapped else tensor
            return whole.clone(memory_format=torch.contiguous_format)
        row, column = (p, j - grid.offset) if grid.swapped else (p - grid.offset, j)
        # `scattered(…).T` may name positions where no query stands: outside of the tensor, nothing is marked.
        T, S = tensor.shape[-2:]
        inside = (row >= 0) & (row < T) & (column >= 0) & (column < S)
        return tensor[..., row.clamp(0, T - 1), column.clamp(0, S - 1)] & inside


class Block(Allow):
    """A bool tensor whose True is hidden; see `block`. `data` is (tensor,)."""

    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        return ~super().test(p, j, grid)


def padding(lengths: Tensor | Sequence[int], *, before: Tensor | Sequence[int] | None = None) -> Mask:
    """Only real tokens are seen: sequence b's keys before[b] ≤ j < before[b] + lengths[b] (before = 0 if not given).

        padding([5])
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ · · ·

    `lengths` is an integer tensor of any batch shape, or a list; `before`, of the same shape, is for padding on the
    left. `dense` gives (*batch, 1, T, S), the 1 for the heads. It hides keys only: what queries in the padding compute
    is for the caller to ignore (`padding(l) & padding(l).T` hides their rows too). A length of 0 or less allows
    nothing, one beyond S all keys. T ≠ S needs no offset."""
    sizes = _integers(lengths, "lengths", "padding")
    if before is None:
        return Padding((sizes,), ("lengths",))
    starts = _integers(before, "before", "padding")
    if starts.shape != sizes.shape:
        raise ShapeError(
            f"padding got lengths of shape {tuple(sizes.shape)} and before of shape {tuple(starts.shape)}; "
            "expected one number of each for every sequence"
        )
    return Padding((sizes, starts), ("lengths", "before"))


def documents(ids: Tensor | Sequence[Any]) -> Mask:
    """A query sees the keys of its own document, where several are packed into one sequence: ids[p] = ids[j].

        documents([0, 0, 0, 5, 5, -1, 2, 2])
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        ■ ■ ■ · · · · ·
        · · · ■ ■ · · ·
        · · · ■ ■ · · ·
        · · · · · · · ·
        · · · · · · ■ ■
        · · · · · · ■ ■

    `ids` is an integer tensor (…, N), or a list; N must cover the keys and the queries' positions. A negative id
    belongs to no document: it sees nothing and is not seen. A document may come in several pieces. `dense` gives
    (*batch, 1, T, S), the 1 for the heads, and (T, S) for ids (N,). T ≠ S needs `offset`."""
    tensor = _integers(ids, "ids", "documents")
    if tensor.ndim == 0:
        raise ShapeError("documents got a single number; expected ids (…, N), one for each position")
    return Documents((tensor,), ("ids",))


def allow(tensor: Tensor) -> Mask:
    """A bool tensor (…, T, S) whose **True may attend**, as in `scaled_dot_product_attention`.

        allow(torch.eye(4, dtype=torch.bool))
        ■ · · ·
        · ■ · ·
        · · ■ ·
        · · · ■

    Its size must match T and S exactly where it is used; row i belongs to query i whatever the offset is. Leading
    dimensions are kept: (B, 1, T, S) is one pattern a sequence, (H, T, S) one a head. Only bool is taken, because 0/1
    and 0/−∞ tensors say opposite things."""
    return Allow((_bools(tensor, "allow"),), ("tensor",))


def block(tensor: Tensor) -> Mask:
    """A bool tensor (…, T, S) whose **True is hidden**, as in `nn.MultiheadAttention`.

        block(torch.eye(4, dtype=torch.bool))
        · ■ ■ ■
        ■ · ■ ■
        ■ ■ · ■
        ■ ■ ■ ·

    The same as `~allow(tensor)`, with the same rules."""
    return Block((_bools(tensor, "block"),), ("tensor",))


def _integers(value: Any, name: str, owner: str) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            hint = "; for one length that all sequences share use prefix(n)" if owner == "padding" else ""
            raise DtypeError(f"the {name} of {owner} is {value!r}; expected a tensor or list of whole numbers{hint}")
        try:
            value = torch.tensor(value) if len(value) else torch.zeros(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the {name} of {owner}"
            raise DtypeError(f"{what} cannot be made a tensor: {error}; expected whole numbers") from None
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise DtypeError(f"the {name} of {owner} have dtype {value.dtype}; expected whole numbers (torch.int64)")
    return value


def _bools(value: Any, owner: str) -> Tensor:
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
    """For each position where its document starts and stops, (*batch, N) each; None if some document is in pieces."""
    N = ids.shape[-1]
    index = torch.arange(N, device=ids.device).expand(ids.shape)
    if N == 0:
        return index, index
    change = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    first = torch.cat([edge, change], -1)
    last = torch.cat([change, edge], -1)
    kept = ids >= 0
    ordered = ids.sort(-1).values
    distinct = torch.cat([edge, ordered[..., 1:] != ordered[..., :-1]], -1) & (ordered >= 0)
    if not torch.equal((first & kept).sum(-1), distinct.sum(-1)):
        return None
    start = torch.where(first, index, 0).cummax(-1).values
    stop = torch.where(last, index + 1, N).flip(-1).cummin(-1).values.flip(-1)
    return start, torch.where(kept, stop, start)
