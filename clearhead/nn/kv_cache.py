"""Keys and values that have been computed already, kept for the next token.

One `KVCache` serves a whole model: it is a tree whose parts mirror the model's (`cache.at(3)` is block 3's), and each
part that belongs to an attention layer holds that layer's keys and values, (B, K, S, D). Room is allocated ahead and
doubles when it is full, so that appending a token costs the token, not the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead._core.shapes import Float, Int
from clearhead._core.tensor_state import stray
from clearhead._core.validation import whole
from clearhead.errors import DtypeError, ShapeError

KeysValues: TypeAlias = tuple[Float[Tensor, "*B K S D"], Float[Tensor, "*B K S E"]]


class KVCache:
    """The keys and values of every attention layer of one running sequence (or batch of them).

    Pass the same object to each call; it grows with what it sees. `length` is how many tokens that is. The cache
    belongs to one model: its parts are found by their place."""

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = whole(capacity, "KVCache: capacity", least=1)
        self._parts: dict[int | str, KVCache] = {}
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._length = 0
        self._fixed = False
        self.forgotten = 0  # tokens that were seen and are kept no more

    def at(self, part: int | str) -> KVCache:
        """The cache of one part of the model, made on first use."""
        if part not in self._parts:
            self._parts[part] = KVCache(self.capacity)
        return self._parts[part]

    @property
    def length(self) -> int:
        """How many tokens are kept: all that were seen, but for those that were forgotten (and a memory's)."""
        if self._k is not None:
            return 0 if self._fixed else self._length
        for part in self._parts.values():
            if not part._fixed:
                return part.length
        return 0

    @property
    def holds_memory(self) -> bool:
        """Whether this part keeps the keys and values of a cross-attention's memory."""
        return self._fixed

    @property
    def n_bytes(self) -> int:
        """Memory held, in bytes, room that is not yet used included."""
        return sum(x.nbytes for part in self._tree() for x in (part._k, part._v) if x is not None)

    def _tree(self) -> Iterator[KVCache]:
        """This part and all that it is made of."""
        yield self
        for part in self._parts.values():
            yield from part._tree()

    def append(self, k: Float[Tensor, "*B K T D"], v: Float[Tensor, "*B K T E"]) -> KeysValues:
        """Adds the newest T tokens; returns the keys and values of all S = length tokens."""
        self._check(k, v)
        start, stop = self._length, self._length + k.shape[-2]
        learn = [x is not None and x.requires_grad for x in (k, v, self._k, self._v)]
        if torch.is_grad_enabled() and any(learn):
            # Writing into a buffer that an earlier step's backward still needs would spoil it: join instead.
            self._k, self._v = self._joined(self._k, k), self._joined(self._v, v)
        else:
            self._k, self._v = self._roomy(self._k, k, stop), self._roomy(self._v, v, stop)
            self._k[..., start:stop, :] = k
            self._v[..., start:stop, :] = v
        self._length = stop
        return self._k[..., :stop, :], self._v[..., :stop, :]

    def remember(self, k: Float[Tensor, "*B K S D"], v: Float[Tensor, "*B K S E"]) -> KeysValues:
        """Keeps a memory's keys and values whole: cross-attention computes them once."""
        if self._length and not self._fixed:
            raise ShapeError(
                f"this part of the cache holds {self._length} tokens of self-attention; keep a memory in another part, "
                "such as cache.at('cross')"
            )
        self._k, self._v, self._length, self._fixed = k, v, k.shape[-2], True
        return k, v

    def recall(self) -> KeysValues:
        """What `remember` or `append` kept, without the spare room."""
        if self._k is None or self._v is None:
            raise ShapeError("this part of the cache is empty; run the model with it once before reading it")
        return self._k[..., : self._length, :], self._v[..., : self._length, :]

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Row i of the batch becomes what row `rows[i]` was: beams that survive take their history along.

        `rows` may repeat rows, and may be longer or shorter than the batch."""
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            got = f"{rows.dim()}-D {rows.dtype}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise DtypeError(f"rows must be a 1-D integer tensor, got {got}")
        for part in self._tree():
            if part._k is not None and part._v is not None:
                wrong = stray(rows, part._k.shape[0])
                if wrong is not None:
                    raise ShapeError(f"rows hold {wrong}, but the cache has rows 0 … {part._k.shape[0] - 1}")
                part._k, part._v = (x.index_select(0, rows.to(x.device)) for x in (part._k, part._v))

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens (a memory is kept)."""
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise ShapeError(f"cannot truncate a cache of {self.length} tokens to {length!r}")
        for part in self._tree():
            if not part._fixed and length < part._length:
                # What goes may still be read, by a trace or in a backward pass: the next tokens are written elsewhere.
                part._k, part._v = (None if x is None else x[..., :length, :] for x in (part._k, part._v))
                part._length = length

    def forget(self, n: int) -> None:
        """Lets go of the oldest `n` tokens, and of their memory: a mask that is a window sees them no more.

        Masks and biases are read from the oldest token that is kept, so this is for those that know distances only;
        under `blocks(size)` for multiples of the size."""
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= self.length:
            raise ShapeError(f"cannot forget {n!r} of the {self.length} tokens of this cache")
        for part in self._tree():
            part.forgotten += 0 if part._fixed else n
            if not part._fixed and part._k is not None and part._v is not None:
                # Copied, because a view would hold on to the memory.
                part._k, part._v = (x[..., n : part._length, :].clone() for x in (part._k, part._v))
                part._length -= n

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """What is added inside is forgotten where the rest of the call fails: a memory, and tokens of any part.

        A mask that is refused must not leave its tokens behind, nor may the blocks that had run be ahead of the others.
        """
        length, knew = self.length, self._fixed
        try:
            yield
        except BaseException:
            if length:
                self.truncate(length)
            elif not knew:
                self._parts, self._k, self._v, self._length, self._fixed = {}, None, None, 0, False
            raise

    def _check(self, k: Tensor, v: Tensor) -> None:
        if self._fixed:
            raise ShapeError("this part of the cache keeps a memory and cannot grow; use a new KVCache")
        if k.shape[:-1] != v.shape[:-1]:
            raise ShapeError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} differ in more than width")
        for kept, new in ((self._k, k), (self._v, v)):
            if kept is None:
                continue
            if kept.shape[:-2] != new.shape[:-2] or kept.shape[-1] != new.shape[-1]:
                raise ShapeError(
                    f"the cache holds {tuple(kept.shape[:-2])} × length × {kept.shape[-1]} and got {tuple(new.shape)}; "
                    "batch, heads and width must stay the same (a new sequence needs a new KVCache)"
                )
            if kept.dtype != new.dtype or kept.device != new.device:
                raise DtypeError(f"the cache holds {kept.dtype} on {kept.device} and got {new.dtype} on {new.device}")

    def _joined(self, kept: Tensor | None, new: Tensor) -> Tensor:
        return new if kept is None else torch.cat((kept[..., : self._length, :], new), -2)

    def _roomy(self, kept: Tensor | None, new: Tensor, wanted: int) -> Tensor:
        """A buffer with room for `wanted` tokens that starts with what is kept."""
        room = 0 if kept is None else kept.shape[-2]
        if kept is not None and wanted <= room:
            if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not kept.is_inference():
                return kept
        else:
            room = max(2 * room, wanted, self.capacity)
        # What inference mode made may be written in inference mode only: outside of it, go on with a copy.
        bigger = new.new_zeros((*new.shape[:-2], room, new.shape[-1]))
        if kept is not None:
            bigger[..., : self._length, :] = kept[..., : self._length, :]
        return bigger

    def __repr__(self) -> str:
        if self._k is not None:
            kind = "memory of " if self._fixed else ""
            return f"KVCache({kind}{self._length} tokens, room for {self._k.shape[-2]})"
        return f"KVCache({self.length} tokens, {len(self._parts)} parts)"
