"""`Mask`: which queries may attend to which keys, as an immutable expression instead of a tensor.

A mask is a predicate over a query position p and a key position j; True means "may attend". Query row i has position
p = i + query_offset, key column j at position j. Everything a mask can do (tests, dense tensors, counts,
pictures, text) is declared here; the kinds of masks are in `structural.py`, `data.py` and `operators.py`."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from clearhead._core.shapes import Bool, Integer
from clearhead._core.validation import check_int
from clearhead.errors import DtypeError, MaskError, MaskTypeError, ShapeError
from clearhead.masks.pair_interval import PairInterval
from clearhead.masks.regions import KeyIntervalFunction, PairGrid, Region

if TYPE_CHECKING:
    from clearhead.masks.drawing import Drawing

MAX_DEPTH = 100
"""Maximum nesting of an expression: recursive functions over it are at most this deep."""
MAX_NODES = 1000
"""Maximum number of masks and operators in one expression."""
MAX_INTEGER = 2**31 - 1
"""Largest size, position and argument: sums and products of two of them fit into 64 bits."""


class Mask(ABC):
    """An immutable, hashable expression for which queries may attend to which keys (True = may attend).

    Compose masks with `&` (both), `|` (either), `~` (not) and `.T` (queries and keys exchanged). Two masks are equal if
    their expressions are equal; masks of tensors are equal if they contain the same tensor objects."""

    parts: tuple[Mask, ...] = ()
    """The masks that an operator combines; none for a leaf."""
    depth: int = 1
    nodes: int = 1
    is_structural: bool = True
    """Whether it contains no tensor, so that it is the same for every batch and `parse` reads its text."""
    constrains_sizes: bool = False
    """Whether it fits some numbers of queries and keys only, as tensors and grids do."""

    # -- dependencies ------------------------------------------------------------------------------------------------

    @property
    def uses_query_position(self) -> bool:
        """Whether the query position matters, so that T ≠ S requires `query_offset`."""
        return self._uses_query(False, position=True)

    @property
    def depends_on_query(self) -> bool:
        """Whether queries can differ. If not, one row (…, 1, S) describes all, as for `every` and `padding`."""
        return self._uses_query(False, position=False)

    @property
    def depends_on_length(self) -> bool:
        """Whether adding keys at the end can change an existing pair, as for `scattered`."""
        return False

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of `dense`: () for structural masks, (B, 1) for `padding` of B lengths."""
        return ()

    @property
    def versions(self) -> tuple[int, ...] | None:
        """In-place modification count of each tensor, for caches of derived values; None if unknown."""
        return ()

    @property
    def device(self) -> torch.device | None:
        """Device of the mask's tensors; None if it has none."""
        return None

    # -- tests and tensors --------------------------------------------------------------------------------------------

    def check(self, T: int, S: int | None = None, query_offset: int | None = None) -> int:
        """Return the position of the first query (0 if `query_offset` is not needed).

        Raises:
            MaskError: A size is negative or too large, or the mask needs `query_offset`.
            ShapeError: The tensors of the mask do not fit these sizes."""
        S = T if S is None else S
        has_plain_sizes = type(T) is int and type(S) is int
        if not has_plain_sizes or not (0 <= T <= MAX_INTEGER and 0 <= S <= MAX_INTEGER):
            _check_size("T (the number of queries)", T)
            _check_size("S (the number of keys)", S)
        if query_offset is None:
            # Compared first only outside of graphs, to which it would add a guard even if sizes are irrelevant.
            is_square = not torch.compiler.is_compiling() and T == S
            if not is_square and self.uses_query_position and T != S:
                hint = f"; query_offset={S - T} if the queries are the last {T} of the {S} keys" if S > T else ""
                raise MaskError(
                    f"{short_str(self)} depends on query positions, and T={T} queries with S={S} keys do not "
                    f"determine them; pass query_offset, the position of the first query among the keys{hint}"
                )
            query_offset = 0
        else:
            _check_size("query_offset (the position of the first query among the keys)", query_offset)
        if self.constrains_sizes:
            self._check_data(T, S, query_offset, False)
        return query_offset

    def allows(
        self, p: Integer[Tensor, "..."], j: Integer[Tensor, "..."], *, keys: int, query_offset: int = 0
    ) -> Bool[Tensor, "..."]:
        """Test pairs: may the query at position p attend to the key at position j, of `keys` keys?

        Args:
            p: Query positions, integers.
            j: Key positions, integers that broadcast with p.
            keys: Number of keys S.
            query_offset: Position of query row 0. Only `allow` and `forbid` need it, because their tensors are laid
                out by row.

        Returns:
            Bools of shape (*batch_shape, *common shape of p and j)."""
        for name, positions in (("p", p), ("j", j)):
            if not isinstance(positions, Tensor):
                raise DtypeError(f"{name} is a {type(positions).__name__}; expected a tensor of integer positions")
            if positions.dtype.is_floating_point or positions.dtype == torch.bool:
                raise DtypeError(f"{name} has dtype {positions.dtype}; expected integer positions (torch.int64)")
        _check_size("keys", keys)
        p, j = p.long(), j.long()  # narrower integers would overflow in differences and hashes
        allowed = self.test(p, j, PairGrid(keys, query_offset))
        return allowed.broadcast_to((*self.batch_shape, *common_shape([tuple(p.shape), tuple(j.shape)])))

    def dense(
        self, T: int, S: int | None = None, *, query_offset: int | None = None, device: torch.device | str | None = None
    ) -> Bool[Tensor, "..."]:
        """Return the bool tensor (*batch_shape, T, S), by default on the device of the mask's tensors."""
        S = T if S is None else S
        start = self.check(T, S, query_offset)
        device = self.device if device is None else device
        p = torch.arange(T, device=device)[:, None] + start  # (T, 1)
        j = torch.arange(S, device=device)[None, :]  # (1, S)
        allowed = self.test(p, j, PairGrid(S, start, is_full=True))
        return allowed.broadcast_to((*self.batch_shape, T, S)).contiguous()

    # -- numbers ------------------------------------------------------------------------------------------------------

    def count(self, T: int, S: int | None = None, *, query_offset: int | None = None) -> int:
        """Return the number of allowed pairs, summed over the batch; exact, usually without building T × S."""
        from clearhead.masks.count import count

        return count(self, T, S, query_offset=query_offset)

    def density(self, T: int, S: int | None = None, *, query_offset: int | None = None) -> float:
        """Return the fraction of pairs that are allowed; 0.0 if there are no pairs."""
        S = T if S is None else S
        allowed, pairs = self.count(T, S, query_offset=query_offset), T * S * math.prod(self.batch_shape)
        return allowed / pairs if pairs else 0.0

    def may_be_empty(self, T: int, S: int | None = None, *, query_offset: int | None = None) -> bool:
        """Return False if every query provably has a visible key, else True.

        The cost depends on the expression only, not on T and S; tensor values are not read."""
        S = T if S is None else S
        start = self.check(T, S, query_offset)
        if T == 0:
            return False
        return S == 0 or not self._proves_nonempty(start, start + T - 1, S)

    def classify(self, region: Region) -> bool | None:
        """Return True if every pair of the region is allowed, False if none is, None if mixed or undecided."""
        return None

    # -- display ------------------------------------------------------------------------------------------------------

    def draw(self, T: int, S: int | None = None, *, query_offset: int | None = None, cells: int = 32) -> Drawing:
        """Return a picture for the terminal (`str`), a notebook or a file (`.svg()`).

        It is shaded if it has more than `cells` positions per side.
        """
        from clearhead.masks.drawing import draw

        return draw(self, T, S, query_offset=query_offset, cells=cells)

    @abstractmethod
    def __str__(self) -> str:
        """Return the expression in the notation of `parse`, with the fewest parentheses."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from clearhead.masks.drawing import html

        return html(self)

    # -- text ---------------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """Return the text of a structural mask; `parse` and `from_text` are the inverse.

        Raises:
            MaskError: The mask contains tensors, which a configuration cannot store."""
        if not self.is_structural:
            raise MaskError(
                f"{self} contains data (lengths, ids or a tensor), which a configuration cannot store; "
                "store the structural part and pass the other part to forward as mask="
            )
        return str(self)

    @classmethod
    def from_text(cls, text: str) -> Mask:
        """Return the mask that a configuration stored, also in the notation of version 0.2."""
        from clearhead.masks.parse import parse

        return parse(re.sub(r"\boffset=", "start=", re.sub(r"\bstride\(", "dilated(", text)))

    # -- operators ----------------------------------------------------------------------------------------------------

    def __and__(self, other: object) -> Mask:
        from clearhead.masks.operators import And, join

        return join(And, [self, _operand(other, "&")])

    def __or__(self, other: object) -> Mask:
        from clearhead.masks.operators import Or, join

        return join(Or, [self, _operand(other, "|")])

    def __rand__(self, other: object) -> Mask:
        return _operand(other, "&") & self

    def __ror__(self, other: object) -> Mask:
        return _operand(other, "|") | self

    def __invert__(self) -> Mask:
        # torch.compile traces & | and .T of masks, but not yet ~ of any object: build such masks outside the graph.
        from clearhead.masks.operators import Not, wrap

        return wrap(Not, self)

    @property
    def T(self) -> Mask:  # noqa: N802 (transposition, as in torch)
        """The mask with queries and keys exchanged: m.T allows (p, j) if m allows (j, p)."""
        from clearhead.masks.operators import Transposed, wrap

        return wrap(Transposed, self)

    def __bool__(self) -> NoReturn:
        raise MaskTypeError(
            f"{short_str(self)} is an expression without a truth value: combine masks with & | ~ "
            "(not with and, or, not), and compare with None by `is`"
        )

    # -- methods of subclasses -----------------------------------------------------------------------------------------

    @abstractmethod
    def test(self, p: Tensor, j: Tensor, grid: PairGrid) -> Tensor:
        """Evaluate the predicate, in any shape that broadcasts to (*batch_shape, *common shape of p and j)."""

    @abstractmethod
    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        """Return whether the predicate depends on its first argument (second if swapped): its position, or at all."""

    def _check_data(self, T: int, S: int, query_offset: int, swapped: bool) -> None:
        """Raise if the tensors and grids inside do not fit these sizes."""
        return

    def _proves_nonempty(self, first: int, last: int, keys: int) -> bool:
        """Return whether each query from position first to last provably has a visible key."""
        if self.classify(Region.nearest(first, last, keys)):
            return True
        candidates = [key for key in {0, *self._candidate_keys()} if key < keys]
        return any([self.classify(Region.box(first, last, key, key)) for key in candidates])

    def _candidate_keys(self) -> tuple[int, ...]:
        """Return keys that every query may see."""
        return ()


class Leaf(Mask):
    """A mask that is not composed of other masks.

    `uses_query` and `uses_key` are the positions that the predicate uses; with `by_distance` it depends only on the
    distance p − j."""

    __match_args__: ClassVar[tuple[str, ...]] = ()  # the names of its fields, set by `dataclass`
    uses_query: ClassVar[bool] = True
    uses_key: ClassVar[bool] = True
    by_distance: ClassVar[bool] = False

    @property
    def symmetric(self) -> bool:
        """Whether `.T` leaves the mask unchanged."""
        return False

    def key_intervals(self, swapped: bool, grid: PairGrid | None = None) -> KeyIntervalFunction | None:
        """Return the function from query positions (N,) to their `KeyInterval`, or None if the keys have another form.

        If swapped: from key positions to the queries that see them. Masks that depend on the number of keys or on the
        position of the first query need the `grid` of the pairs, and return None without it."""
        return None

    def pair_interval(self) -> PairInterval | None:
        """Return the pairs as a `PairInterval`, or None if they have another form."""
        return None

    def _uses_query(self, swapped: bool, *, position: bool) -> bool:
        return self.uses_key if swapped else self.uses_query

    def arguments(self) -> tuple[int, ...]:
        """Return the arguments of a structural leaf's constructor, in order."""
        return tuple([getattr(self, name) for name in type(self).__match_args__])

    def __str__(self) -> str:
        return type(self).__name__.lower() + "(" + ", ".join([str(int(value)) for value in self.arguments()]) + ")"


def as_mask(value: object) -> Mask:
    """Return `value` if it is a mask, and `full()` for None.

    Args:
        value: A mask, or None for `full()`.

    Raises:
        MaskTypeError: The value is something else; the message contains advice.
    """
    if value is None:
        from clearhead.masks.structural import Full

        return Full()
    return _operand(value, None)


def check_integer(value: object, name: str, *, least: int = 0) -> int:
    """Return `value` as an int between `least` and 2³¹ − 1, or raise a MaskError that contains `name`."""
    return check_int(value, name, minimum=least, maximum=MAX_INTEGER, error=MaskError)


def short_str(mask: Mask) -> str:
    """Return the expression for a message, truncated to 80 characters."""
    text = str(mask)
    return text if len(text) <= 80 else text[:77] + "…"


def common_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that these broadcast to, or raise a ShapeError."""
    common: tuple[int, ...] = ()
    for shape in [shape for shape in shapes if shape]:
        long, short = (common, shape) if len(common) >= len(shape) else (shape, common)
        front = len(long) - len(short)
        for x, y in zip(long[front:], short, strict=True):
            if x != y and x != 1 and y != 1:
                raise ShapeError(
                    f"shapes {common} and {shape} do not broadcast ({x} against {y}); expected equal sizes or 1. Masks "
                    "combined with & or | describe the same batch (padding and documents count a 1 for the heads)"
                )
        common = long[:front] + tuple([y if x == 1 else x for x, y in zip(long[front:], short, strict=True)])
    return common


def _check_size(name: str, value: object) -> None:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        if 0 <= value <= MAX_INTEGER:
            return
        raise MaskError(f"{name} is {value}; expected between 0 and {MAX_INTEGER}")
    check_integer(value, name)


def _operand(value: object, sign: str | None) -> Mask:
    if isinstance(value, Mask):
        return value
    context = "as a mask" if sign is None else f"as an operand of {sign} with a mask"
    if isinstance(value, Tensor):
        raise MaskTypeError(
            f"got a tensor of {value.dtype} and shape {tuple(value.shape)} {context}; use allow(tensor) "
            "if True may attend, as in scaled_dot_product_attention, or forbid(tensor) if True is hidden, as in "
            "nn.MultiheadAttention"
        )
    raise MaskTypeError(
        f"got {type(value).__name__} {context}; expected a Mask such as causal() or window(2, 2), or a bool tensor "
        "inside allow(tensor) (True may attend) or forbid(tensor) (True is hidden)"
    )
