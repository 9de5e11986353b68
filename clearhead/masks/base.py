"""`Mask`: who may attend to whom, as an immutable expression and not as a tensor.

A mask is a predicate over a query position p and a key position j; True means "may attend". Query row i stands at
position p = i + offset, key column j at position j. Everything a mask can do (tests, dense tensors, counts, pictures,
text) is declared here; the kinds of masks are in `structural.py`, `data.py` and `operators.py`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from clearhead._shapes import Bool, Integer
from clearhead.errors import DtypeError, MaskError, MaskTypeError, ShapeError
from clearhead.masks.geometry import Grid, KeysOf, Region
from clearhead.values import whole

if TYPE_CHECKING:
    from clearhead.masks.drawing import Drawing

MAX_DEPTH = 100
"""How deep an expression may nest: every walk over it is a recursion of at most this depth."""
MAX_NODES = 1000
"""How many masks and operators one expression may hold."""
MAX_INTEGER = 2**31 - 1
"""The largest size, position and argument: sums and products of two of them stay inside 64 bits."""


class Mask(ABC):
    """An immutable, hashable expression that says which queries may attend to which keys (True = may attend).

    Compose with `&` (both), `|` (either), `~` (not) and `.T` (queries and keys exchanged). Two masks are equal when
    they are built the same way; masks made from tensors are equal when they hold the very same tensors."""

    depth: int = 1
    nodes: int = 1

    # -- what it depends on -------------------------------------------------------------------------------------------

    @property
    def uses_query_position(self) -> bool:
        """Whether the query's position matters, so that T ≠ S needs an `offset`."""
        return self._reads(False, place=True)

    @property
    def depends_on_query(self) -> bool:
        """Whether queries may differ at all. If not, one row (…, 1, S) says all, as for `every` and `padding`."""
        return self._reads(False, place=False)

    @property
    def is_structural(self) -> bool:
        """Whether it holds no tensor: then it is the same for every batch, and `parse` reads its text back."""
        return True

    @property
    def depends_on_length(self) -> bool:
        """Whether a pair's answer can change when keys are added at the end, as it does for `scattered`."""
        return False

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The dimensions that `dense` has before (T, S): () for structural masks, (B, 1) for `padding` of B lengths."""
        return ()

    @property
    def versions(self) -> tuple[int, ...] | None:
        """How often each tensor inside was changed in place, for those who keep what they made of it; None: unknown."""
        return ()

    @property
    def device(self) -> torch.device | None:
        """Where the mask's tensors are; None if it has none."""
        return None

    # -- tests and tensors --------------------------------------------------------------------------------------------

    def check(self, T: int, S: int | None = None, offset: int | None = None) -> int:
        """The position of the first query (0 where `offset` may be left out), or the error that these sizes deserve."""
        S = T if S is None else S
        _check_size("T (the number of queries)", T)
        _check_size("S (the number of keys)", S)
        if offset is None:
            if self.uses_query_position and T != S:  # in this order: sizes that do not matter leave no guard
                hint = f"; offset={S - T} if the queries are the last {T} of the {S} keys" if S > T else ""
                raise MaskError(
                    f"{brief(self)} depends on where a query stands among the keys, and T={T} queries with S={S} keys "
                    f"leave that open: give offset, the position of the first query among the keys{hint}"
                )
            offset = 0
        _check_size("offset (the position of the first query among the keys)", offset)
        self._check_data(T, S, offset, False)
        return offset

    def allows(
        self, p: Integer[Tensor, "..."], j: Integer[Tensor, "..."], *, keys: int, offset: int = 0
    ) -> Bool[Tensor, "..."]:
        """The definition: may the query at position p attend to the key at position j, when there are `keys` keys?

        p and j broadcast; the mask's `batch_shape` comes in front of their common shape. `offset` is the position of
        query row 0; only `allow` and `block` need it, whose tensors are laid out by row."""
        for name, positions in (("p", p), ("j", j)):
            if positions.dtype.is_floating_point or positions.dtype == torch.bool:
                raise DtypeError(f"{name} has dtype {positions.dtype}; positions are whole numbers (torch.int64)")
        p, j = p.long(), j.long()  # narrower numbers would wrap around in differences and hashes
        allowed = self.test(p, j, Grid(keys, offset))
        return allowed.broadcast_to((*self.batch_shape, *common_shape([tuple(p.shape), tuple(j.shape)])))

    def dense(
        self, T: int, S: int | None = None, *, offset: int | None = None, device: torch.device | str | None = None
    ) -> Bool[Tensor, "..."]:
        """The bool tensor (*batch_shape, T, S) itself. Without `device`, it is made where the mask's tensors are."""
        S = T if S is None else S
        start = self.check(T, S, offset)
        device = self.device if device is None else device
        p = torch.arange(T, device=device)[:, None] + start  # (T, 1)
        j = torch.arange(S, device=device)[None, :]  # (1, S)
        allowed = self.test(p, j, Grid(S, start, whole=True))
        return allowed.broadcast_to((*self.batch_shape, T, S)).contiguous()

    # -- numbers ------------------------------------------------------------------------------------------------------

    def count(self, T: int, S: int | None = None, *, offset: int | None = None) -> int:
        """How many pairs are allowed, over the batch too; exact, without building T × S wherever structure permits."""
        from clearhead.masks.count import count

        return count(self, T, S, offset=offset)

    def density(self, T: int, S: int | None = None, *, offset: int | None = None) -> float:
        """The allowed fraction of all pairs; 0.0 where there are no pairs."""
        S = T if S is None else S
        allowed, pairs = self.count(T, S, offset=offset), T * S * math.prod(self.batch_shape)
        return allowed / pairs if pairs else 0.0

    def may_be_empty(self, T: int, S: int | None = None, *, offset: int | None = None) -> bool:
        """Could some query be left with no key? False is a proof that none is; True may only mean "not proved".

        Costs a walk over the expression, whatever T and S are, and never looks into tensors."""
        S = T if S is None else S
        start = self.check(T, S, offset)
        if T == 0:
            return False
        return S == 0 or not self._fills(start, start + T - 1, S)

    def verdict(self, region: Region) -> bool | None:
        """True: every pair of the region is allowed; False: none is; None: mixed, or not known from structure."""
        return None

    # -- for people ---------------------------------------------------------------------------------------------------

    def draw(self, T: int, S: int | None = None, *, offset: int | None = None, cells: int = 32) -> Drawing:
        """A picture for the terminal (`str`), a notebook, or a file (`.svg()`); beyond `cells` a side, shaded."""
        from clearhead.masks.drawing import draw

        return draw(self, T, S, offset=offset, cells=cells)

    @abstractmethod
    def __str__(self) -> str:
        """The expression, as `parse` reads it, with no more parentheses than it needs."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from clearhead.masks.drawing import html

        return html(self)

    # -- text ---------------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """The expression as a configuration stores it; `from_text` is its inverse."""
        if not self.is_structural:
            raise MaskError(
                f"{self} holds data (lengths, ids or a tensor), which a configuration cannot store; "
                "keep the structural part here and pass the rest to forward as mask="
            )
        return str(self)

    @classmethod
    def from_text(cls, text: str) -> Mask:
        """The mask that a configuration stored."""
        from clearhead.masks.parse import parse

        return parse(text)

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
        # torch.compile traces & | and .T of masks, but not yet ~ of any object: make such masks outside the graph.
        from clearhead.masks.operators import Not, turned

        return turned(Not, self)

    @property
    def T(self) -> Mask:
        """Queries and keys exchanged: m.T allows (p, j) where m allows (j, p)."""
        from clearhead.masks.operators import Transposed, turned

        return turned(Transposed, self)

    def __bool__(self) -> NoReturn:
        raise MaskTypeError(
            f"{brief(self)} is an expression and is neither true nor false: combine masks with & | ~ "
            "(not with and, or, not), and compare with None by `is`"
        )

    # -- what each kind of mask defines -------------------------------------------------------------------------------

    @abstractmethod
    def test(self, p: Tensor, j: Tensor, grid: Grid) -> Tensor:
        """The predicate, in any shape that broadcasts to (*batch_shape, *common shape of p and j)."""

    @abstractmethod
    def _reads(self, swapped: bool, *, place: bool) -> bool:
        """Whether the answer depends on the first argument (on the second, if swapped): on its position, or at all."""

    def _check_data(self, T: int, S: int, offset: int, swapped: bool) -> None:
        """Raise if the tensors inside do not fit these sizes."""
        return

    def _fills(self, first: int, last: int, keys: int) -> bool:
        """Proof that every query from position first to last has a key: one rule for a key that all rows accept."""
        if self.verdict(Region.nearest(first, last, keys)):
            return True
        candidates = [key for key in {0, *self._landmarks()} if key < keys]
        return any([self.verdict(Region.box(first, last, key, key)) for key in candidates])

    def _landmarks(self) -> tuple[int, ...]:
        """Keys worth trying as the one that every query sees."""
        return ()


class Leaf(Mask):
    """A mask that is not made of other masks. `reads_query` and `reads_key` say which positions its predicate uses, and
    `by_distance` that it is p − j alone that counts."""

    reads_query: ClassVar[bool] = True
    reads_key: ClassVar[bool] = True
    by_distance: ClassVar[bool] = False

    @property
    def symmetric(self) -> bool:
        """Whether `.T` changes nothing."""
        return False

    def keys_of(self, swapped: bool) -> KeysOf | None:
        """The function from query positions (N,) to the `Keys` they see, or None where these are no such set.

        If swapped: from key positions to the queries that see them."""
        return None

    def _reads(self, swapped: bool, *, place: bool) -> bool:
        return self.reads_key if swapped else self.reads_query

    def __str__(self) -> str:
        numbers = ", ".join([str(value) for value in vars(self).values()])
        return f"{type(self).__name__.lower()}({numbers})"


def as_mask(value: object) -> Mask:
    """`value` itself if it is a mask, `full()` for None; anything else is refused with the way to say what is meant."""
    if value is None:
        from clearhead.masks.structural import Full

        return Full()
    return _operand(value, None)


def whole_number(value: Any, what: str, *, least: int = 0) -> int:
    """`value` as an int between `least` and 2³¹ − 1, or a MaskError that names `what`."""
    return whole(value, what, least=least, most=MAX_INTEGER, error=MaskError)


def brief(mask: Mask) -> str:
    """The expression for a message: cut where it is long."""
    text = str(mask)
    return text if len(text) <= 80 else text[:77] + "…"


def common_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these broadcast to, or a ShapeError."""
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


def _check_size(what: str, value: Any) -> None:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        if 0 <= value <= MAX_INTEGER:
            return
        raise MaskError(f"{what} is {value}; expected between 0 and {MAX_INTEGER}")
    whole_number(value, what)


def _operand(value: object, sign: str | None) -> Mask:
    if isinstance(value, Mask):
        return value
    place = "where a mask is wanted" if sign is None else f"beside {sign} of a mask"
    if isinstance(value, Tensor):
        raise MaskTypeError(
            f"got a tensor of {value.dtype} and shape {tuple(value.shape)} {place}; say what its True means: "
            "allow(tensor) if True may attend, as in scaled_dot_product_attention, or block(tensor) if True is hidden, "
            "as in nn.MultiheadAttention"
        )
    raise MaskTypeError(
        f"got {type(value).__name__} {place}; expected a Mask such as causal() or window(2, 2), or a bool tensor "
        "inside allow(tensor) (True may attend) or block(tensor) (True is hidden)"
    )
