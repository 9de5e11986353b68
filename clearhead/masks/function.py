"""`from_function`: a mask from a predicate over positions, such as a `mask_mod` of FlexAttention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clearhead._core import counter_rng
from clearhead._core.keywords import explain_keywords
from clearhead.errors import DtypeError
from clearhead.masks.base import Mask, check_integer
from clearhead.masks.data import allow, documents
from clearhead.masks.regions import PairGrid
from clearhead.masks.structural import blocks, causal, dilated, every, full, prefix, window

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_MAX_PAIRS = 1 << 22  # positions that are all tested; of larger grids a corner and random pairs are
_CORNER = 1024
_N_RANDOM_PAIRS = 1 << 18
_STREAM = 602  # separates these random numbers from others


@explain_keywords
def from_function(
    function: MaskFunction,
    T: int,
    S: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str = "cpu",
) -> Mask:
    """Return the mask of a predicate over positions, as FlexAttention's `mask_mod`.

    A predicate that has the pattern of an expression (causal, a window, a prefix, blocks, every n-th key, documents,
    and their conjunctions with causal) becomes this expression. Any other becomes `allow` of a dense tensor, with a
    warning, because a dense mask costs as much memory and time as no mask.

    Up to four million pairs of positions are all tested. Of larger grids, a corner of 1,024 positions, the same at the
    end, and 262,144 random pairs are.

    Args:
        function: Takes the batch, head, query and key indices, and returns True where the query may attend to the key.
            The indices are integer tensors that broadcast.
        T: Number of queries.
        S: Number of keys; by default T.
        batch: Number of sequences, if the predicate depends on the first index.
        heads: Number of heads, if the predicate depends on the second index.
        device: Device of the index tensors, for predicates that read tensors.

    Returns:
        An expression, or `allow(tensor)`.

    Raises:
        DtypeError: If the function does not return bools.
        MaskError: If a size is not a positive integer.

    Example:
        from_function(lambda b, h, q, k: (q >= k) & (q - k < 256), 1024)  # causal() & window(255, …)
    """
    T = check_integer(T, "from_function: T", least=1)
    S = T if S is None else check_integer(S, "from_function: S", least=1)
    batch, heads = (
        None if size is None else check_integer(size, f"from_function: {name}", least=1)
        for name, size in (("batch", batch), ("heads", heads))
    )
    if T == S and batch is None and heads is None:
        n = T if T * T <= _MAX_PAIRS else min(T, _CORNER)
        corner = _evaluate(function, torch.arange(n)[:, None], torch.arange(n), device)
        for candidate in _candidates(corner, is_whole=n == T):
            if torch.equal(candidate.dense(n, n), corner) and _agrees(function, candidate, n, T, device):
                return candidate
    warnings.warn(
        f"no expression has the pattern of this function for {T} queries and {S} keys, so the mask is a dense tensor, "
        "which saves neither time nor memory; write the mask with clearhead.masks if its pattern is regular",
        stacklevel=2,
    )
    sizes = (() if batch is None else (batch, heads or 1)) if heads is None or batch is not None else (heads,)
    queries, keys = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)
    b = torch.arange(batch or 1, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads or 1, device=device).view(1, -1, 1, 1)
    dense = _as_bools(function(b, h, queries, keys)).expand(batch or 1, heads or 1, T, S)
    return allow(dense.reshape(*sizes, T, S).clone())


def _evaluate(function: MaskFunction, queries: Tensor, keys: Tensor, device: torch.device | str) -> Tensor:
    """Return the predicate (…) at positions that broadcast, on the CPU, for the first sequence and head."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    values = _as_bools(function(zero, zero, queries.to(device), keys.to(device)))
    return values.cpu().expand(torch.broadcast_shapes(queries.shape, keys.shape))


def _as_bools(values: object) -> Tensor:
    """Return the values of a predicate; raise `DtypeError` unless they are a bool tensor."""
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        kind = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise DtypeError(
            f"the function returned {kind}; expected a bool tensor, True where a query may attend to a key"
        )
    return values


def _candidates(corner: Tensor, *, is_whole: bool) -> Iterator[Mask]:
    """Yield expressions that a pattern (N, N) may have, the simplest first.

    Their parameters are read from the pattern. Documents are known only if the pattern is whole.
    """
    n = len(corner)
    yield full()
    yield causal()
    first, last = corner[0], corner[-1]
    before, after = int(last.sum()) - 1, int(first.sum()) - 1
    if before >= 0 and after >= 0:
        yield causal() & window(before, 0)
        yield window(before, after)
    if 0 < after + 1 < n:
        yield prefix(after + 1)
        yield causal() | prefix(after + 1)
        yield blocks(after + 1)
        yield causal() | blocks(after + 1)
    block = int(corner[:, 0].sum())
    if 0 < block < n:
        yield causal() & blocks(block)
    visible_keys = last.nonzero().flatten()
    for step in {int(gap) for gap in visible_keys.diff()[-2:]} - {1}:
        yield from (causal() & dilated(step), dilated(step), every(step), causal() & every(step))
    if is_whole:
        starts_document = torch.cat((torch.tensor([True]), ~corner.diagonal(-1)))
        ids = starts_document.long().cumsum(0)
        yield documents(ids)
        yield causal() & documents(ids)


def _agrees(function: MaskFunction, mask: Mask, n: int, T: int, device: torch.device | str) -> bool:
    """Return whether the mask and the function agree at the end of the grid and at random pairs."""
    if n == T:
        return True
    end = torch.arange(T - n, T)
    pairs = torch.arange(_N_RANDOM_PAIRS)
    queries, keys = (counter_rng.randint(T, _STREAM, axis, pairs) for axis in (0, 1))
    grid = PairGrid(T, 0)
    for p, j in ((end[:, None], end), (queries, keys)):
        expected = _evaluate(function, p, j, device)
        if not torch.equal(mask.test(p, j, grid).expand(expected.shape), expected):
            return False
    return True
