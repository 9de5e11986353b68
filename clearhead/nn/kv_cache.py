"""The KV cache: keys and values of earlier tokens, stored for incremental decoding.

One `KVCache` serves a whole model. It is a tree with the structure of the model: `cache[3]["self"]` is the cache of the
self-attention of block 3. Each leaf stores the keys and values of one attention layer, (B, K, S, D). Buffers are
allocated in advance and double in size when they are full, so the cost of appending a token does not depend on the
length of the sequence.

    B batch   K key/value heads   S tokens in the cache   D key width   E value width
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._core.keywords import explain_keywords
from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import find_out_of_range
from clearhead._core.validation import check_int
from clearhead.attention.observe import observe_reorder
from clearhead.errors import DtypeError, ShapeError

KeysValues: TypeAlias = tuple[Float[Tensor, "*B K S D"], Float[Tensor, "*B K S E"]]


class KVCache:
    """Keys and values of all attention layers for one batch of sequences.

    Pass the same object to every call of one model; each call appends the keys and values of its tokens. A new batch
    needs a new cache.

        cache = KVCache()
        logits = model(prompt, cache=cache)
        logits = model(next_ids, cache=cache)  # only the new tokens

    Args:
        capacity: Number of tokens for which buffers are allocated at first.

    Attributes:
        n_evicted: Number of tokens that `evict_oldest` has removed.
    """

    # Without this, `for x in cache` would call __getitem__ with 0, 1, 2, … without end.
    __iter__ = None

    @explain_keywords
    def __init__(self, capacity: int = 64) -> None:
        self.capacity = check_int(capacity, "KVCache: capacity", minimum=1)
        self._children: dict[int | str, KVCache] = {}
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._length = 0
        self._is_cross = False
        self.n_evicted = 0

    def __getitem__(self, key: int | str) -> KVCache:
        """Return the cache of one part of the model, such as block 3 or "self". It is created on first use."""
        if key not in self._children:
            self._children[key] = KVCache(self.capacity)
        return self._children[key]

    @property
    def length(self) -> int:
        """Number of tokens in the self-attention caches, without evicted ones."""
        if self._k is not None:
            return 0 if self._is_cross else self._length
        for child in self._children.values():
            if not child._is_cross:
                return child.length
        return 0

    @property
    def is_cross(self) -> bool:
        """Whether this is the cache of a cross-attention layer, set by `set_cross`."""
        return self._is_cross

    @property
    def n_bytes(self) -> int:
        """Allocated memory in bytes, including buffer space that is not used yet."""
        return sum(x.nbytes for node in self._tree() for x in (node._k, node._v) if x is not None)

    def _tree(self) -> Iterator[KVCache]:
        """Iterate over this node and all its descendants."""
        yield self
        for child in self._children.values():
            yield from child._tree()

    def append(self, k: Float[Tensor, "*B K T D"], v: Float[Tensor, "*B K T E"]) -> KeysValues:
        """Append the keys and values of T new tokens.

        Args:
            k: Keys of the new tokens, (B, K, T, D).
            v: Values of the new tokens, (B, K, T, E).

        Returns:
            Keys and values of all S = `length` tokens.

        Raises:
            ShapeError: If batch, heads or width differ from the cache, or if the cache is one of cross-attention.
            DtypeError: If dtype or device differ from the cache.
        """
        self._check(k, v)
        start = self._length
        stop = self._length + k.shape[-2]
        needs_grad = [x is not None and x.requires_grad for x in (k, v, self._k, self._v)]
        if torch.is_grad_enabled() and any(needs_grad):
            # Writing into the buffer would modify tensors that an earlier step saved for backward, so concatenate.
            self._k = self._concatenate(self._k, k)
            self._v = self._concatenate(self._v, v)
        else:
            self._k = self._reserve(self._k, k, stop)
            self._v = self._reserve(self._v, v, stop)
            self._k[..., start:stop, :] = k
            self._v[..., start:stop, :] = v
        self._length = stop
        return self._k[..., :stop, :], self._v[..., :stop, :]

    def set_cross(self, k: Float[Tensor, "*B K S D"], v: Float[Tensor, "*B K S E"]) -> KeysValues:
        """Store the keys and values of an encoder output, which cross-attention computes only once.

        Args:
            k: Keys of the encoder output, (B, K, S, D).
            v: Values of the encoder output, (B, K, S, E).

        Returns:
            `k` and `v`.

        Raises:
            ShapeError: If this cache already stores tokens of self-attention.
        """
        if self._length and not self._is_cross:
            raise ShapeError(
                f"this cache stores {self._length} tokens of self-attention; store cross-attention keys and values in "
                "another one, such as cache['cross']"
            )
        self._k = k
        self._v = v
        self._length = k.shape[-2]
        self._is_cross = True
        return k, v

    def get(self) -> KeysValues:
        """Return the stored keys and values, without unused buffer space.

        Raises:
            ShapeError: If nothing has been stored.
        """
        if self._k is None or self._v is None:
            raise ShapeError("this cache is empty; run the model with it before reading it")
        return self._k[..., : self._length, :], self._v[..., : self._length, :]

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Replace row i of the batch by row `rows[i]`, in all layers, as beam search needs.

        Args:
            rows: Row indices. Rows may repeat, and their number may differ from the batch size.

        Raises:
            DtypeError: If `rows` is not a 1-D integer tensor.
            ShapeError: If an index is out of range.
        """
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            got = f"{rows.dim()}-D {rows.dtype}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise DtypeError(f"rows must be a 1-D integer tensor, got {got}")
        for node in self._tree():
            if node._k is not None and node._v is not None:
                out_of_range = find_out_of_range(rows, node._k.shape[0])
                if out_of_range is not None:
                    raise ShapeError(f"rows contains {out_of_range}, but the cache has rows 0 … {node._k.shape[0] - 1}")
                node._k = node._k.index_select(0, rows.to(node._k.device))
                node._v = node._v.index_select(0, rows.to(node._v.device))
        observe_reorder(self, rows)

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens. Cross-attention caches are unchanged.

        Raises:
            ShapeError: If `length` is not an integer from 0 to the current length.
        """
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise ShapeError(f"cannot crop a cache of {self.length} tokens to {length!r}")
        for node in self._tree():
            if not node._is_cross and length < node._length:
                # A view, so that the next append allocates a new buffer: a trace or a backward pass may still read
                # the removed tokens.
                node._k = None if node._k is None else node._k[..., :length, :]
                node._v = None if node._v is None else node._v[..., :length, :]
                node._length = length

    def evict_oldest(self, n: int) -> None:
        """Remove the oldest `n` tokens and free their memory, for models whose mask is a window.

        Masks and biases then count positions from the oldest token that remains, so they must depend on distances
        only; under `blocks(size)`, `n` must be a multiple of the size.

        Raises:
            ShapeError: If `n` is not an integer from 0 to the current length.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= self.length:
            raise ShapeError(f"cannot evict {n!r} of the {self.length} tokens of this cache")
        for node in self._tree():
            node.n_evicted += 0 if node._is_cross else n
            if not node._is_cross and node._k is not None and node._v is not None:
                # Copied, because a view would keep the whole buffer alive.
                node._k = node._k[..., n : node._length, :].clone()
                node._v = node._v[..., n : node._length, :].clone()
                node._length -= n

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Undo all additions of the `with` block if it raises.

        A rejected mask must not leave its tokens in the cache, and blocks that ran before the error must not have more
        tokens than the others.
        """
        length = self.length
        was_cross = self._is_cross
        try:
            yield
        except BaseException:
            if length:
                self.crop(length)
            elif not was_cross:
                self._children = {}
                self._k = None
                self._v = None
                self._length = 0
                self._is_cross = False
            raise

    def _check(self, k: Tensor, v: Tensor) -> None:
        """Raise unless `k` and `v` can be appended."""
        if self._is_cross:
            raise ShapeError("this cache stores an encoder output and cannot grow; use a new KVCache")
        if k.shape[:-1] != v.shape[:-1]:
            raise ShapeError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} differ in more than width")
        for stored, new in ((self._k, k), (self._v, v)):
            if stored is None:
                continue
            if stored.shape[:-2] != new.shape[:-2] or stored.shape[-1] != new.shape[-1]:
                raise ShapeError(
                    f"the cache stores {tuple(stored.shape[:-2])} × length × {stored.shape[-1]}, got "
                    f"{tuple(new.shape)}; batch, heads and width must not change (use a new KVCache for new sequences)"
                )
            if stored.dtype != new.dtype or stored.device != new.device:
                raise DtypeError(
                    f"the cache stores {stored.dtype} on {stored.device}, got {new.dtype} on {new.device}; use a new "
                    "KVCache"
                )

    def _concatenate(self, stored: Tensor | None, new: Tensor) -> Tensor:
        """Return a new tensor with the stored tokens and the new ones."""
        return new if stored is None else torch.cat((stored[..., : self._length, :], new), -2)

    def _reserve(self, stored: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return a buffer for at least `length` tokens that starts with the stored ones."""
        capacity = 0 if stored is None else stored.shape[-2]
        if stored is not None and length <= capacity:
            if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not stored.is_inference():
                return stored
        else:
            capacity = max(2 * capacity, length, self.capacity)
        # Inference tensors cannot be written outside of inference mode, so these are copied too.
        buffer = new.new_zeros((*new.shape[:-2], capacity, new.shape[-1]))
        if stored is not None:
            buffer[..., : self._length, :] = stored[..., : self._length, :]
        return buffer

    def __repr__(self) -> str:
        if self._k is not None:
            kind = "cross-attention, " if self._is_cross else ""
            return f"KVCache({kind}{self._length} tokens, capacity {self._k.shape[-2]})"
        return f"KVCache({self.length} tokens, {len(self._children)} children)"
