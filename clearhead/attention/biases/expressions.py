"""The constructors of biases: `alibi`, `relative`, `distance`, and values that are computed ahead."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead._core.shapes import Float
from clearhead._core.validation import check_int, short_repr
from clearhead.attention.biases.base import Bias
from clearhead.attention.biases.buckets import Buckets, bucket_indices
from clearhead.attention.biases.functions import DistanceFunction, argument_text, per_head
from clearhead.errors import DtypeError, ShapeError

_MAX_HEADS = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    """−slope · |j − p|; see `alibi`. `slopes` is the number of heads, or a tensor."""

    slopes: int | Tensor
    names: tuple[str, ...] = ("slopes",)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,) if isinstance(self.slopes, Tensor) else ()

    @property
    def n_heads(self) -> int | None:
        heads = self.slopes.numel() if isinstance(self.slopes, Tensor) else self.slopes
        return None if heads == 1 else heads

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self.slopes, Tensor):
            slopes = self.slopes.to(relative.device, torch.promote_types(dtype, self.slopes.dtype))
        else:
            slopes = alibi_slopes(self.slopes, relative.device, dtype)
        return -slopes.reshape(-1, 1) * relative.abs().to(slopes.dtype)

    def arguments(self) -> tuple[object, ...]:
        return (self.slopes,)

    def __str__(self) -> str:
        return f"alibi({argument_text(self.slopes, self.names[0])})"


@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    """A learned value per head and bucket of distances; see `relative`."""

    table: Tensor
    buckets: Buckets
    names: tuple[str, ...] = ("table",)
    edges: tuple[int, ...] = field(default=())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    @property
    def n_heads(self) -> int | None:
        heads = self.table.shape[1]
        return None if heads == 1 else heads

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        # Converted first, so that the gradient of a bucket is summed in the wider dtype.
        table = self.table.to(relative.device, torch.promote_types(dtype, self.table.dtype))
        return table[bucket_indices(relative, self.buckets, self.edges)].T

    def arguments(self) -> tuple[object, ...]:
        return self.table, self.buckets

    def __str__(self) -> str:
        return f"relative({self.names[0]}, {self.buckets})"


@dataclass(frozen=True, eq=False, repr=False)
class Distance(Bias):
    """A function of |j − p|; see `distance`."""

    function: DistanceFunction

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([x for x in self.function.coefficients if isinstance(x, Tensor)])

    @property
    def n_heads(self) -> int | None:
        sizes = [size for size in [tensor.numel() for tensor in self.tensors] if size > 1]
        return sizes[0] if sizes else None

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        return self.function.values(relative.abs().to(dtype), dtype)

    def arguments(self) -> tuple[object, ...]:
        return (self.function,)

    def __str__(self) -> str:
        return f"distance({self.function})"


@dataclass(frozen=True, eq=False, repr=False)
class Tabulated(Bias):
    """A bias whose values by distance are already computed for T queries and S keys, as layers of a model share them.

    For other sizes it computes them again.

    Attributes:
        source: The bias.
        values: Its values by distance, (H or 1, T + S).
        sizes: T, S and the position of the first query.
    """

    source: Bias
    values: Tensor
    sizes: tuple[int, int, int]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, *self.source.tensors)

    @property
    def is_structural(self) -> bool:
        return self.source.is_structural

    @property
    def n_heads(self) -> int | None:
        return self.source.n_heads

    def at_distances(self, relative: Tensor, dtype: torch.dtype) -> Tensor:
        return self.source.at_distances(relative, dtype)

    def distance_values(
        self,
        T: int,
        S: int,
        query_offset: int = 0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "H N"]:
        """Return the stored values for these sizes, else those of the source."""
        if self.sizes == (T, S, query_offset):
            return self.values.to(device=device, dtype=dtype)
        return self.source.distance_values(T, S, query_offset, device=device, dtype=dtype)

    def dense(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        query_offset: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "H T S"]:
        """Return the bias of all pairs, (H or 1, T, S), by default for the stored sizes and in their dtype."""
        T = self.sizes[0] if T is None else T
        S = self.sizes[1] if S is None else S
        query_offset = self.sizes[2] if query_offset is None else query_offset
        dtype = self.values.dtype if dtype is None else dtype
        return super().dense(T, S, query_offset=query_offset, device=device, dtype=dtype)

    def arguments(self) -> tuple[object, ...]:
        return self.source, self.sizes

    def __str__(self) -> str:
        return str(self.source)


def alibi(slopes: int | Float[Tensor, "..."]) -> Alibi:
    """Return the bias −slope · |j − p| (Press et al., 2022): heads with steep slopes attend to near keys.

        alibi(2).draw(8)
        ██▓▓▓▓▒▒▒▒░░░░
        ▓▓██▓▓▓▓▒▒▒▒░░░░
        ▓▓▓▓██▓▓▓▓▒▒▒▒░░
        ▒▒▓▓▓▓██▓▓▓▓▒▒▒▒
        ▒▒▒▒▓▓▓▓██▓▓▓▓▒▒
        ░░▒▒▒▒▓▓▓▓██▓▓▓▓
        ░░░░▒▒▒▒▓▓▓▓██▓▓
          ░░░░▒▒▒▒▓▓▓▓██

    Args:
        slopes: One slope per head, (H,), or the number of heads, for the slopes of the paper: for H a power of two
            2^(−8/H), 2^(−16/H), …, 2^(−8); for another H those of the largest power of two n below it, then every
            second slope of 2n heads, from the steepest.

    Returns:
        The bias. Slopes that require gradients get them.

    Raises:
        ShapeError: If the slopes are not one number per head.
    """
    if isinstance(slopes, Tensor):
        return Alibi(per_head(slopes, "alibi: slopes"))
    return Alibi(check_int(slopes, "alibi: slopes (the number of heads)", minimum=1, maximum=_MAX_HEADS))


def alibi_slopes(n_heads: int, device: torch.device | str | None, dtype: torch.dtype) -> Float[Tensor, " H"]:
    """Return the slopes of the paper."""
    n = 1 << (n_heads.bit_length() - 1)  # the largest power of two that is at most H
    head = torch.arange(n_heads, device=device, dtype=dtype)
    regular = (head + 1) * (8 / n)
    between = (2 * (head - n) + 1) * (4 / n)  # the odd slopes of 2n heads are between the regular ones
    return torch.exp2(-torch.where(head < n, regular, between))


def relative(table: Float[Tensor, "N H"], buckets: Buckets | None = None) -> Relative:
    """Return a learned bias per head and bucket of distances (Raffel et al., 2020).

        relative(table, buckets(8, 6)).draw(8)
          ▓▓▓▓▓▓████████
        ░░  ▓▓▓▓▓▓██████
        ░░░░  ▓▓▓▓▓▓████
        ░░░░░░  ▓▓▓▓▓▓██
        ▒▒░░░░░░  ▓▓▓▓▓▓
        ▒▒▒▒░░░░░░  ▓▓▓▓
        ▒▒▒▒▒▒░░░░░░  ▓▓
        ▒▒▒▒▒▒▒▒░░░░░░

    In the drawing, the table counts the buckets from 0 to 7.

    Args:
        table: Value of each bucket and head, (n_buckets, H), or (n_buckets, 1) for values that all heads share.
        buckets: Buckets of the distances. Default: as many as the table has rows, up to distance 128, both directions.

    Returns:
        The bias. The table gets a gradient if it requires one.

    Raises:
        ShapeError: If the table does not have one row per bucket.
        DtypeError: If an argument has the wrong type.
    """
    if not isinstance(table, Tensor) or not table.is_floating_point():
        got = f"{table.dtype}" if isinstance(table, Tensor) else f"a {type(table).__name__}"
        raise DtypeError(f"relative: table is {got}; expected a floating-point tensor (n_buckets, heads)")
    if table.dim() != 2 or 0 in table.shape:
        raise ShapeError(f"relative: table has shape {tuple(table.shape)}; expected (n_buckets, heads)")
    if buckets is None:
        buckets = Buckets(table.shape[0])
    elif not isinstance(buckets, Buckets):
        raise DtypeError(f"relative: buckets is {short_repr(buckets)}; expected buckets such as buckets(32, 128)")
    if table.shape[0] != buckets.n_buckets:
        raise ShapeError(
            f"relative: table has {table.shape[0]} rows and {buckets} are {buckets.n_buckets} buckets; expected one "
            "row per bucket"
        )
    return Relative(table, buckets, edges=buckets.edges())


def distance(function: DistanceFunction) -> Distance:
    """Return the bias f(|j − p|), where f is `linear`, `clipped`, `logarithm`, `power` or `gaussian`.

        distance(gaussian(3.0)).draw(8)
        ██▓▓▓▓▓▓▓▓▒▒░░
        ▓▓██▓▓▓▓▓▓▓▓▒▒░░
        ▓▓▓▓██▓▓▓▓▓▓▓▓▒▒
        ▓▓▓▓▓▓██▓▓▓▓▓▓▓▓
        ▓▓▓▓▓▓▓▓██▓▓▓▓▓▓
        ▒▒▓▓▓▓▓▓▓▓██▓▓▓▓
        ░░▒▒▓▓▓▓▓▓▓▓██▓▓
          ░░▒▒▓▓▓▓▓▓▓▓██

    Args:
        function: The function, such as `logarithm(-1.0)`.

    Returns:
        The bias. Tensors in the function that require gradients get them.

    Raises:
        DtypeError: If the argument is not such a function.
        ShapeError: If its tensors are for different numbers of heads.
    """
    if not isinstance(function, DistanceFunction):
        raise DtypeError(
            f"distance: function is {short_repr(function)}; expected linear, clipped, logarithm, power or gaussian, "
            "such as linear(-0.5)"
        )
    sizes = {tensor.numel() for tensor in function.coefficients if isinstance(tensor, Tensor)} - {1}
    if len(sizes) > 1:
        raise ShapeError(f"distance: {function} has tensors of {sorted(sizes)} values; expected one number of heads")
    return Distance(function)


def tabulate(bias: Bias, T: int, S: int, query_offset: int, device: torch.device | None) -> Tabulated:
    """Return a bias with its values for these sizes, in float32 or the wider dtype of its tensors."""
    dtype = torch.float32
    for tensor in bias.tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    values = bias.distance_values(T, S, query_offset, device=device, dtype=dtype)
    return Tabulated(bias, values, (T, S, query_offset))
