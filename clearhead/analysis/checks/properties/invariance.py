"""Invariances: other rows of a batch, token order without positions, repeated calls, caching, and training mode.

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

from clearhead._core.call_types import Args, Kwargs, TorchFunction
from clearhead.analysis.checks.harness import Harness, by_position
from clearhead.analysis.checks.numerics_recorder import CAUSES
from clearhead.analysis.checks.properties import Comparison, Property, compared
from clearhead.analysis.checks.properties.causality import time_first
from clearhead.analysis.checks.rounding import difference
from clearhead.analysis.inputs.module_errors import error_summary
from clearhead.analysis.inputs.module_spec import CallInputs


def _batch_norms(harness: Harness) -> list[str]:
    return [name for name, part in harness.parts.items() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


class BatchInvariance(Property):
    """The output of a row does not depend on the rest of the batch."""

    name = "batch invariance"
    method = "ran each row alone and all rows in another order, and compared with the batch"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        expected = harness.plain(inputs)
        B = inputs.x.shape[0]
        if B < 2:
            return
        for row in range(B):
            index = slice(row, row + 1)
            alone = harness.first_row(inputs)[1] if row == 0 else harness.out(inputs.rows(index))
            yield compared(harness, alone, expected[index], f"row {row} alone and in the batch", "alone")
        order = torch.arange(B).roll(1)
        yield compared(harness, harness.out(inputs.rows(order)), expected[order], "rows in another order", "order")

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        if _batch_norms(harness):
            return "batch-norm uses batch statistics, in eval mode too (track_running_stats=False?)"
        mixed = "rows are mixed: a reshape or softmax runs over the batch axis, or a norm runs over the batch"
        return time_first(harness) or mixed


class PermutationEquivariance(Property):
    """Without positions and mask, permuted tokens give permuted outputs."""

    name = "permutation equivariance"
    method = "permuted the tokens and compared the outputs in that order"

    def why_not(self, harness: Harness) -> str | None:
        if not harness.spec.is_sequence:
            return "the module does not take a sequence"
        if harness.spec.source is not None:
            return "the module has two inputs, and its target has an order"
        if harness.spec.positions is None:
            return "it is unknown whether the module encodes positions: pass positions=False if it does not"
        if harness.spec.positions:
            return "the module encodes positions, so order matters"
        if harness.spec.mask is not None and not bool(harness.spec.mask.dense(harness.length).all()):
            return "its mask depends on the order"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        order = torch.randperm(inputs.length, generator=harness.generator)
        if inputs.length > 1 and bool((order == torch.arange(inputs.length)).all()):
            order = order.roll(1)
        base = harness.plain(inputs)
        out = harness.out(replace(inputs, x=inputs.x[:, order]))
        yield compared(harness, out, base[:, order] if harness.per_token else base, f"order {order.tolist()}")

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        usual = "the module depends on the order: positions are added, or a reshape mixes positions"
        return next(
            (CAUSES[fact] for fact in ("split_by_view", "wrong_axis") if getattr(harness.observations, fact)), usual
        )


class Determinism(Property):
    """In evaluation mode the same input gives the same output."""

    name = "determinism"
    method = "ran the same input three times in evaluation mode"

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        # The noise of a random module would be measured as rounding, so the tolerance is not measured.
        tolerance = 64 * torch.finfo(harness.dtype).eps * max(1.0, harness.largest)
        for repeat in (2, 3):
            yield compared(harness, harness.out(inputs), harness.plain(inputs), f"run {repeat}", tolerance=tolerance)

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        if harness.observations.random:
            random_op = harness.observations.random[0]
            return (
                f"dropout (or another random op: {random_op}) is active in eval mode: F.dropout(x, p) needs "
                "training=self.training; use nn.Dropout"
            )
        return "the module has state that changes between calls"


# ---------------------------------------------------------------------- cache


class CacheConsistency(Property):
    """Outputs with a cache equal those without."""

    name = "cache = no cache"
    method = "fed all at once, one by one and in chunks, after reordering rows and after truncating, against no cache"

    def why_not(self, harness: Harness) -> str | None:
        mask = harness.spec.mask
        if harness.spec.caching is None:
            if not harness.spec.is_sequence:
                return "the module does not take a sequence"
            if mask is not None and bool(mask.dense(harness.length).triu(1).any()):
                return "outputs depend on later tokens, so they cannot be cached"
            return "it is unknown whether the module has a cache: pass caching=Caching(new=…)"
        if not harness.per_token:
            return "there is no output per token"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        caching = harness.spec.caching
        assert caching is not None
        T = inputs.length
        expected = harness.plain(inputs)
        half = T // 2
        first = replace(inputs, x=inputs.x[:, :half])
        second = replace(inputs, x=inputs.x[:, half:])
        one_by_one = [1] * (T - half)
        reorder: Any = caching.reorder
        truncate: Any = caching.truncate

        def reordered(cache: object) -> Tensor:
            _feed(harness, first, cache, [half])
            reorder(cache, rows)
            return _feed(harness, second.rows(rows), cache, one_by_one, half)

        def truncated(cache: object) -> Tensor:
            junk = replace(inputs, x=torch.cat((first.x, harness.other_tokens(second.x)), 1))
            _feed(harness, junk, cache, [half, T - half])
            truncate(cache, half)
            return _feed(harness, second, cache, one_by_one, half)

        for kind, sizes in (("prefill", [T]), ("one by one", [1] * T), ("in chunks", _chunks(T))):

            def fed(cache: object, sizes: list[int] = sizes) -> Tensor:
                return _feed(harness, inputs, cache, sizes)

            yield self._compare(harness, kind, fed, expected)
        B = inputs.x.shape[0]
        if T >= 2 and B > 1 and reorder is not None:
            rows = (torch.arange(B).roll(1) // 2 * 2) % B if B > 2 else torch.tensor([1, 0])
            yield self._compare(harness, "after reorder", reordered, expected[rows][:, half:], half)
        if T >= 2 and truncate is not None:
            yield self._compare(harness, "after truncate", truncated, expected[:, half:], half)

    def _compare(
        self, harness: Harness, kind: str, run: Callable[[object], Tensor], expected: Tensor, start: int = 0
    ) -> Comparison:
        """Compare a run with a new cache with the expected outputs from `start` on."""
        assert harness.spec.caching is not None
        try:
            out = run(harness.spec.caching.new())
        except Exception as error:
            location = f"{kind}: {error_summary(error)}, at output 0"
            return Comparison(difference=float("inf"), tolerance=harness.tolerance, location=location, kind=kind)
        location = f"{kind}: got {tuple(out.shape)} for {tuple(expected.shape)}, from output 0"
        if out.shape == expected.shape:
            gap = (out.double() - expected.double()).abs().nan_to_num(float("inf"))
            over = (by_position(gap).amax((0, 2)) > harness.tolerance).nonzero()  # (T,)
            location = f"{kind}: differs from output {start + (int(over[0]) if len(over) else 0)}"
        return Comparison(
            difference=difference(out, expected), tolerance=harness.tolerance, location=location, kind=kind
        )

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        kinds = {x.kind for x in failed}
        if "prefill" in kinds and "Error: " in failed[0].location:
            return "the module raises an error at the first call with a cache"
        if "prefill" in kinds:
            return "the first call with an empty cache already differs: the cache changes the mask or the positions"
        if "one by one" not in kinds:
            if "in chunks" in kinds:
                return (
                    "a chunk of several tokens is masked as if it had no predecessors: the causal mask of a chunk "
                    "needs the number of cached tokens as its offset"
                )
            if "after reorder" in kinds:
                return "the cache is not reordered for beams (in all parts): rows use the history of another row"
            return "truncation is incomplete: keys, or the token count that determines positions, remain"
        first = min(int(x.location.rsplit(" ", 1)[1]) for x in failed if x.kind == "one by one")
        if first <= 1:
            return (
                "positions restart at 0 with every cached call (or the cached keys are not used): positions must start "
                "at the number of tokens in the cache"
            )
        return (
            f"a window is ignored when decoding: the first {first} tokens agree, then the cache contains keys that the "
            "mask hides without a cache"
        )


def _chunks(T: int) -> list[int]:
    """Return the chunk sizes 3, 1, 4, 2 and the remainder, up to T tokens."""
    ends = [min(end, T) for end in (0, 3, 4, 8, 10, T)]
    return [b - a for a, b in itertools.pairwise(ends) if b > a]


def _feed(harness: Harness, inputs: CallInputs, cache: object, sizes: Sequence[int], start: int = 0) -> Tensor:
    """Return the outputs of tokens that are passed in chunks after `start` cached tokens."""
    outs = []
    offset = 0
    for size in sizes:
        outs.append(
            harness.out(replace(inputs, x=inputs.x[:, offset : offset + size], cache=cache, start=start + offset))
        )
        offset += size
    return torch.cat(outs, dim=1)


# ---------------------------------------------------------------------- training mode


class TrainEvalConsistency(Property):
    """Without dropout, training and evaluation mode give equal outputs."""

    name = "train/eval consistency"
    method = "set every dropout to 0 and compared training mode with evaluation mode"

    def why_not(self, harness: Harness) -> str | None:
        if not isinstance(harness.module, nn.Module):
            return "a function has no training mode"
        if not harness.spec.is_sequence and _batch_norms(harness):
            return "batch-norm of inputs without a sequence uses other statistics in training by design"
        return None

    def evaluate(self, harness: Harness, inputs: CallInputs) -> Iterator[Comparison]:
        module = copy.deepcopy(harness.module)
        without_dropout(module)
        expected = harness.out(inputs, module)
        with NoDropout():
            trained = harness.out(inputs, module.train())
        yield compared(harness, trained, expected, "training mode")

    def cause(self, harness: Harness, inputs: CallInputs, failed: Sequence[Comparison]) -> str:
        for name in _batch_norms(harness):
            return (
                f"batch-norm ({name}) uses batch statistics in training: of other sequences and, "
                "in a decoder, over later positions; use layer-norm"
            )
        return "training mode has an effect other than dropout with a rate that can be set to 0 (noise, layer drop)"


class NoDropout(TorchFunctionMode):
    """Disables functional dropout, independent of its rate."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return x if kwargs.get("inplace") or func is torch.dropout_ else x.clone()
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *[0.0 for _ in args[4:5]], *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
)


def without_dropout(module: nn.Module) -> None:
    """Set the rate of dropout modules, and every float attribute with "drop" in its name, to 0."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(part, name, 0.0)
