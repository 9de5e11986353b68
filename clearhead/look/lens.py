"""The logit lens: what a model would say if it stopped after each of its blocks.

The model's own last norm and head read the residual stream as each block left it. They run where they always run: the
model is called again, its blocks return at once what they returned before, and the last one returns another layer's
stream. After the last block the lens is therefore the model's output, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError
from clearhead.look.chart import Chart, HasCharts
from clearhead.look.question import ModelArgs, run_logits
from clearhead.look.recompute import Indices, resolve_indices, select_indices
from clearhead.look.stream import record_residual_stream
from clearhead.look.watch import first_tensor, replace_first_tensor

TokenNames = Callable[[int], str]
"""How a token is called."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitLens(HasCharts):
    """`logits` after each of `layers`, the first of which is what enters the blocks: (L + 1, B, T, V) of text."""

    layers: tuple[str, ...]
    logits: Tensor
    positions: tuple[int, ...]  # those that were asked for; of a classifier only 0

    def top(self, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens and their probabilities, likeliest first: each (L + 1, B, T, k)."""
        best = self.logits.float().softmax(-1).topk(min(k, self.logits.shape[-1]), -1)
        return best.indices, best.values

    def ranks(self) -> Tensor:
        """(L + 1, B, T): the place that each layer gives to what the last one says, 0 for the first."""
        said = self.logits[-1].argmax(-1)[None, ..., None].expand(*self.logits.shape[:-1], 1)
        return (self.logits > self.logits.gather(-1, said)).sum(-1)

    def charts(self, tokens: Sequence[str] | None = None, name: TokenNames = str) -> list[Chart]:
        """What each layer would say after each of `tokens`, the last layer, which is the model itself, on top."""
        tokens_said, sure = (x[:, 0].reshape(len(self.layers), -1) for x in self.top())
        words = [[name(token) for token in row] for row in tokens_said.tolist()]
        columns = [str(i) if tokens is None else tokens[i] for i in self.positions]
        rows = [*(f"layer {i}" for i in reversed(range(len(self.layers) - 1))), "in"]
        columns = columns if self.logits.dim() > 3 else ["says"]
        note = "Darker for the surer. The top row is what the model says; “in” is what enters its first block."
        title, texts = "What each layer would say", words[::-1]
        return [Chart(title=title, rows=rows, columns=columns, values=sure.flip(0), texts=texts, note=note)]

    def to_dict(self, name: TokenNames = str, *, k: int = 5) -> dict[str, Any]:
        """Of the first sequence: for each layer and position the k likeliest tokens."""
        tokens, sure = (x[:, 0].reshape(len(self.layers), len(self.positions), -1).tolist() for x in self.top(k))

        def best(ids: list[int], chances: list[float]) -> list[dict[str, Any]]:
            return [{"id": i, "token": name(i), "probability": p} for i, p in zip(ids, chances, strict=True)]

        says = [list(map(best, *pair)) for pair in zip(tokens, sure, strict=True)]
        rows = [{"layer": layer, "says": one} for layer, one in zip(self.layers, says, strict=True)]
        return {"positions": list(self.positions), "layers": rows}


def logit_lens(model: nn.Module, given: ModelArgs, *, positions: Indices = None) -> LogitLens:
    """What each block of a model would say, read by the model's own last norm and head.

        found = look.logit_lens(model, ids, positions=-1)
        found.top()                            # the first choice after each block, and its probability
        found.logits[-1]                       # what the model says

    `positions` are those whose logits are kept: a long text and a large vocabulary make many."""
    stream = record_residual_stream(model, given)
    if not stream.blocks:
        raise ConfigError(
            "no block was found on the way to the logits: expected layers in an nn.ModuleList or nn.Sequential, each "
            "of which adds to what the one before returned"
        )
    is_text = stream.logits.dim() > 2
    kept = resolve_indices(positions, stream.logits.shape[-2], "position") if is_text else [0]
    blocks, ran = stream.blocks, stream.ran
    last, states = blocks[-1], [first_tensor(ran[block].output) for block in blocks]
    end, own = ran[last].number, ran[last].output
    before = {path: one.output for path, one in ran.items() if one.number < end and not path.startswith(last)}
    read = []
    for state in (ran[blocks[0]].entered, *states):
        with _returning(model, before | {last: own if state is None else replace_first_tensor(own, state)}):
            logits = run_logits(model, given)
        read.append((select_indices(logits, -2, kept) if is_text else logits).clone())
    return LogitLens(layers=(f"into {blocks[0]}", *blocks), logits=torch.stack(read), positions=tuple(kept))


_LOCK = threading.Lock()


@contextmanager
def _returning(model: nn.Module, outputs: Mapping[str, Any]) -> Iterator[None]:
    """Modules return at once what is said here, in this thread; other threads run what is really there."""
    modules, here = {path: model.get_submodule(path) for path in outputs}, threading.get_ident()

    def standing_in(real: Callable[..., Any], output: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: output if threading.get_ident() == here else real(*args, **kwargs)

    with _LOCK, ExitStack() as stack:  # two at once would take each other's place
        for path, module in modules.items():
            real, own = module.forward, vars(module)
            put_back = partial(own.__setitem__, "forward", real) if "forward" in own else partial(own.pop, "forward")
            stack.callback(put_back)
            own["forward"] = standing_in(real, outputs[path])
        yield
