"""What must not matter: the neighbours in a batch, the order of tokens without positions, the luck of the draw, a
cache, and training mode.

B batch   T tokens
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clearhead.checks.lab import Lab, by_position, reason
from clearhead.checks.noise import difference
from clearhead.checks.properties import Property, Seen, compared
from clearhead.checks.properties.causality import time_first
from clearhead.checks.subject import Batch
from clearhead.checks.witness import SEEN


def _batch_norms(lab: Lab) -> list[str]:
    return [name for name, part in lab.parts.items() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


class BatchInvariance(Property):
    """A row alone gives what it gives in a batch, at any place of it."""

    name = "batch invariance"
    done = "ran each row alone and all rows in another order, and compared with the batch"

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        whole = lab.plain(case)
        B = case.x.shape[0]
        if B < 2:
            return
        for row in range(B):
            one = slice(row, row + 1)
            alone = lab.first_row(case)[1] if row == 0 else lab.out(case.rows(one))
            yield compared(lab, alone, whole[one], f"row {row} alone against in the batch", "alone")
        order = torch.arange(B).roll(1)
        yield compared(lab, lab.out(case.rows(order)), whole[order], "rows in another order", "order")

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        if _batch_norms(lab):
            return "batch-norm takes its statistics from the batch, in evaluation too (track_running_stats=False?)"
        mixed = (
            "rows are mixed: a reshape or softmax runs over the batch axis, or something is normalised over the batch"
        )
        return time_first(lab) or mixed


class PermutationEquivariance(Property):
    """Without positions and without a mask, tokens in another order give the same outputs in that order."""

    name = "permutation equivariance"
    done = "put the tokens into another order and compared the outputs in that order"

    def why_not(self, lab: Lab) -> str | None:
        if not lab.subject.is_sequence:
            return "the module reads no sequence"
        if lab.subject.source is not None:
            return "the module has two inputs, and its target has an order"
        if lab.subject.positions is None:
            return "it is not said whether the module knows positions: give positions=False if it knows none"
        if lab.subject.positions:
            return "the module knows positions, so that order counts"
        if lab.subject.sees is not None and not bool(lab.subject.sees.dense(lab.length).all()):
            return "its mask gives the tokens an order"
        return None

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        order = torch.randperm(case.length, generator=lab.generator)
        if case.length > 1 and bool((order == torch.arange(case.length)).all()):
            order = order.roll(1)
        base, out = lab.plain(case), lab.out(replace(case, x=case.x[:, order]))
        yield compared(lab, out, base[:, order] if lab.per_token else base, f"order {order.tolist()}")

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        usual = "something knows the order: positions are added somewhere, or a reshape mixes the positions"
        return next((SEEN[fact] for fact in ("split_by_view", "wrong_axis") if getattr(lab.facts, fact)), usual)


class Determinism(Property):
    """In evaluation mode, the same input gives the same output."""

    name = "determinism"
    done = "ran the same input three times in evaluation mode"

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        # Where the module itself is random, its noise cannot be told from rounding by trying: no measured tolerance.
        tolerance = 64 * torch.finfo(lab.dtype).eps * max(1.0, lab.largest)
        for again in (2, 3):
            yield compared(lab, lab.out(case), lab.plain(case), f"run {again}", tolerance=tolerance)

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        if lab.facts.random:
            return (
                f"dropout (or other noise: {lab.facts.random[0]}) acts in evaluation: F.dropout(x, p) is on unless it "
                "is told training=self.training; use nn.Dropout"
            )
        return "the module keeps a state from one call to the next"


# ---------------------------------------------------------------------- with a cache or without


class CacheConsistency(Property):
    """What comes out piece by piece is what comes out at once."""

    name = "cache = no cache"
    done = "fed all at once, one by one and in chunks, after reordering rows and after truncating, against no cache"

    def why_not(self, lab: Lab) -> str | None:
        sees = lab.subject.sees
        if lab.subject.caching is None:
            if not lab.subject.is_sequence:
                return "the module reads no sequence"
            if sees is not None and bool(sees.dense(lab.length).triu(1).any()):
                return "outputs see later tokens, so that nothing of them can be kept"
            return "it is not said that the module has a cache: give caching=Caching(new=…)"
        if not lab.per_token:
            return "there is no output for each token"
        return None

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        caching = lab.subject.caching
        assert caching is not None
        T = case.length
        whole, half = lab.plain(case), T // 2
        first, rest = replace(case, x=case.x[:, :half]), replace(case, x=case.x[:, half:])
        one_by_one = [1] * (T - half)
        reorder: Any = caching.reorder
        truncate: Any = caching.truncate

        def reordered(cache: Any) -> Tensor:
            _feed(lab, first, cache, [half])
            reorder(cache, rows)
            return _feed(lab, rest.rows(rows), cache, one_by_one, half)

        def truncated(cache: Any) -> Tensor:
            junk = replace(case, x=torch.cat((first.x, lab.another(rest.x)), 1))
            _feed(lab, junk, cache, [half, T - half])
            truncate(cache, half)
            return _feed(lab, rest, cache, one_by_one, half)

        for kind, sizes in (("prefill", [T]), ("one by one", [1] * T), ("in chunks", _chunks(T))):
            yield self._seen(lab, kind, lambda cache, sizes=sizes: _feed(lab, case, cache, sizes), whole)  # type: ignore[misc]
        B = case.x.shape[0]
        if T >= 2 and B > 1 and reorder is not None:
            rows = (torch.arange(B).roll(1) // 2 * 2) % B if B > 2 else torch.tensor([1, 0])
            yield self._seen(lab, "after reorder", reordered, whole[rows][:, half:], half)
        if T >= 2 and truncate is not None:
            yield self._seen(lab, "after truncate", truncated, whole[:, half:], half)

    def _seen(self, lab: Lab, kind: str, run: Callable[[Any], Tensor], wanted: Tensor, start: int = 0) -> Seen:
        """What a run with a new cache gives, against what is wanted of the outputs from `start` on."""
        assert lab.subject.caching is not None
        try:
            out = run(lab.subject.caching.new())
        except Exception as error:
            where = f"{kind}: {reason(error)}, at output 0"
            return Seen(difference=float("inf"), tolerance=lab.tolerance, where=where, kind=kind)
        where = f"{kind}: got {tuple(out.shape)} for {tuple(wanted.shape)}, from output 0"
        if out.shape == wanted.shape:
            gap = (out.double() - wanted.double()).abs().nan_to_num(float("inf"))
            over = (by_position(gap).amax((0, 2)) > lab.tolerance).nonzero()  # (T,)
            where = f"{kind}: differs from output {start + (int(over[0]) if len(over) else 0)}"
        return Seen(difference=difference(out, wanted), tolerance=lab.tolerance, where=where, kind=kind)

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        kinds = {seen.kind for seen in failed}
        if "prefill" in kinds and "Error: " in failed[0].where:
            return "the module cannot be called with a cache in this way: it raises an error at the first call"
        if "prefill" in kinds:
            return "the first call with an empty cache already differs: the cache changes the mask or the positions"
        if "one by one" not in kinds:
            if "in chunks" in kinds:
                return (
                    "a chunk of several tokens is masked as if nothing came before it: the causal mask of a chunk "
                    "needs the number of cached tokens as its offset"
                )
            if "after reorder" in kinds:
                return (
                    "the cache is not reordered for beams (in all of its parts): rows go on with another row's history"
                )
            return "truncating leaves something behind: keys, or the count of tokens that positions are made from"
        first = min(int(seen.where.rsplit(" ", 1)[1]) for seen in failed if seen.kind == "one by one")
        if first <= 1:
            return (
                "positions restart at 0 with every cached call (or the cached keys are not used): positions must start "
                "at the number of tokens in the cache"
            )
        return (
            f"a window is ignored when decoding: the first {first} tokens agree, then the cache shows keys that the "
            "mask hides without a cache"
        )


def _chunks(T: int) -> list[int]:
    """3, 1, 4, 2 and the rest, as far as there are tokens."""
    ends = [min(end, T) for end in (0, 3, 4, 8, 10, T)]
    return [b - a for a, b in itertools.pairwise(ends) if b > a]


def _feed(lab: Lab, case: Batch, cache: Any, sizes: Sequence[int], start: int = 0) -> Tensor:
    """The outputs of the case's tokens, given in pieces that follow `start` cached ones."""
    outs, at = [], 0
    for size in sizes:
        outs.append(lab.out(replace(case, x=case.x[:, at : at + size], cache=cache, start=start + at)))
        at += size
    return torch.cat(outs, dim=1)


# ---------------------------------------------------------------------- training mode


class TrainIsEval(Property):
    """With dropout at 0, training mode computes what evaluation mode does."""

    name = "train = eval without dropout"
    done = "set every dropout to 0 and compared training mode with evaluation mode"

    def why_not(self, lab: Lab) -> str | None:
        if not isinstance(lab.module, nn.Module):
            return "a function has no training mode"
        if not lab.subject.is_sequence and _batch_norms(lab):
            return "batch-norm over blocks of numbers takes other statistics in training, by design"
        return None

    def look(self, lab: Lab, case: Batch) -> Iterator[Seen]:
        module = copy.deepcopy(lab.module)
        without_dropout(module)
        wanted = lab.out(case, module)
        with NoDropout():
            trained = lab.out(case, module.train())
        yield compared(lab, trained, wanted, "training mode")

    def cause(self, lab: Lab, case: Batch, failed: Sequence[Seen]) -> str:
        for name in _batch_norms(lab):
            return (
                f"batch-norm ({name}) takes its statistics from the batch in training: over other sequences and, "
                "in a decoder, over later positions; use layer-norm"
            )
        return (
            "something acts in training that is not dropout with a rate that can be set to 0 (noise, a drop of layers)"
        )


class NoDropout(TorchFunctionMode):
    """Inside of it, dropout that is called as a function drops nothing, wherever its rate comes from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return x if kwargs.get("inplace") or func is torch.dropout_ else x.clone()
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *[0.0 for _ in args[4:5]], *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_,
)  # fmt: skip


def without_dropout(module: nn.Module) -> None:
    """Sets every dropout rate below `module` to 0: of dropout modules, and numbers under a name with "drop" in it."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(part, name, 0.0)
