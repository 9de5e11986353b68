"""Recurrent networks: sequence models without attention.

`Recurrent` returns the logits of the next token at each position, or of one class per sequence. The cells are torch's,
and torch's kernels run them over a sequence at a time. With padding, tokens are reordered so that real tokens come
first, and reordered back afterwards, so states never depend on padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Bool, Float, Int
from clearhead._core.typed_module import Module
from clearhead._core.validation import DropoutRate, PositiveInt, Range, require
from clearhead.config import Config, Validated
from clearhead.errors import ConfigError, MaskError, ShapeError
from clearhead.masks import Mask, as_mask
from clearhead.nn.embeddings import TokenEmbedding

# B batch, T tokens, M dim of a state, I input dim, W output dim of a stack (M, or 2M if bidirectional)

State: TypeAlias = tuple[Tensor, ...]  # of one layer: (h,), or (h, c) for an LSTM; each (B, M)


@dataclass(frozen=True)
class RNN(Validated):
    """h' = g(W x + U h + b), with g = tanh, or ReLU if `relu`."""

    n_states: ClassVar[int] = 1
    relu: bool = False

    def build(self, d_in: int, d_state: int) -> nn.RNNCellBase:
        return nn.RNNCell(d_in, d_state, nonlinearity="relu" if self.relu else "tanh")


@dataclass(frozen=True)
class GRU:
    """Gated recurrent unit: h' = z ⊙ h + (1 − z) ⊙ n."""

    n_states: ClassVar[int] = 1

    def build(self, d_in: int, d_state: int) -> nn.RNNCellBase:
        return nn.GRUCell(d_in, d_state)


@dataclass(frozen=True)
class LSTM:
    """Long short-term memory: c' = f ⊙ c + i ⊙ g, h' = o ⊙ tanh(c')."""

    n_states: ClassVar[int] = 2

    def build(self, d_in: int, d_state: int) -> nn.RNNCellBase:
        return nn.LSTMCell(d_in, d_state)


Cell: TypeAlias = RNN | GRU | LSTM


def _run(cell: nn.Module, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Return h after each token of x (B, T, I), and the final state, with torch's kernels (nn.GRU does not trace)."""
    kernel: Callable[..., Any] = torch.gru
    if isinstance(cell, nn.LSTMCell):
        if torch.compiler.is_compiling() and x.device.type == "cpu":
            # The backward of the fused LSTM on the CPU cannot be traced, so unroll it.
            return _step_through(cell, x, state)
        kernel = torch.lstm
    elif isinstance(cell, nn.RNNCell):
        kernel = torch.rnn_relu if cell.nonlinearity == "relu" else torch.rnn_tanh
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    start = [x[None] for x in state]
    # has_biases, num_layers, dropout, train (keep what backward needs), bidirectional, batch_first
    options = (True, 1, 0.0, torch.is_grad_enabled(), False, True)
    out, *end = kernel(x, start if len(start) > 1 else start[0], weights, *options)
    return out, tuple([x[0] for x in end])


def _step_through(cell: nn.Module, x: Tensor, state: State, real: Tensor | None = None) -> tuple[Tensor, State]:
    """Run a cell one token at a time; padding does not change the state."""
    out = []
    for t in range(x.shape[1]):
        new = tuple(cell(x[:, t], state)) if isinstance(cell, nn.LSTMCell) else (cell(x[:, t], state[0]),)
        if real is not None:
            new = tuple(torch.where(real[:, t, None], a, b) for a, b in zip(new, state, strict=True))
        state = new
        out.append(state[0])
    return torch.stack(out, dim=1), state


class RecurrentCache:
    """States of a recurrent model after its previous tokens, the counterpart of `KVCache`.

    Pass the same object to each call, which updates it. Its size does not depend on the number of tokens. It cannot be
    cropped, because earlier states are not stored; `copy` it before a branch instead."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.length = 0

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Replace row i of the batch by row `rows[i]`, as beam search requires."""
        self.states = [tuple(x.index_select(0, rows.to(x.device)) for x in state) for state in self.states]

    def detach(self) -> None:
        """Detach the states from the autograd graph (truncated backpropagation through time)."""
        self.states = [tuple(x.detach() for x in state) for state in self.states]

    def copy(self) -> RecurrentCache:
        """Return an independent copy."""
        twin = RecurrentCache()
        twin.states, twin.length = list(self.states), self.length
        return twin

    def __repr__(self) -> str:
        return f"RecurrentCache({self.length} tokens, {len(self.states)} layers)"


class RecurrentStack(Module):
    """Layers of one cell type, optionally bidirectional, with dropout between layers.

    The output is the h of the last layer, (B, T, M), or the concatenated forward and backward h, (B, T, 2M). It is zero
    at padding."""

    def __init__(
        self, cell: Cell, d_in: int, d_state: int, n_layers: int, *, bidirectional: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.cell = cell
        self.d_state = d_state
        self.d_out = 2 * d_state if bidirectional else d_state
        widths = [d_in] + [self.d_out] * (n_layers - 1)
        self.layers = nn.ModuleList(cell.build(width, d_state) for width in widths)
        self.reverse_layers = nn.ModuleList(cell.build(width, d_state) for width in widths) if bidirectional else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T I"], *, real: Bool[Tensor, "B T"] | None = None, cache: RecurrentCache | None = None
    ) -> Float[Tensor, "B T W"]:
        """Run all layers; `real` is False at padding, and `cache` contains the initial and then the final states."""
        if real is None:
            return self._forward(x, None, cache)
        x = x.masked_fill(~real[..., None], 0.0)
        if cache is not None:
            return self._forward(x, real, cache).masked_fill(~real[..., None], 0.0)
        order = torch.argsort(~real, dim=1, stable=True)  # real tokens first, in order
        inverse = torch.argsort(order, dim=1)
        lengths = real.sum(dim=1, keepdim=True)
        position = torch.arange(x.shape[1], device=x.device)
        reverse = torch.where(position < lengths, lengths - 1 - position, position)  # (B, T); it is its own inverse
        out = _rows(self._forward(_rows(x, order), None, None, reverse), inverse)
        return out.masked_fill(~real[..., None], 0.0)

    def _forward(
        self, x: Tensor, real: Tensor | None, cache: RecurrentCache | None, reverse: Tensor | None = None
    ) -> Tensor:
        """Run all layers; `reverse` is the order of tokens for the backward direction."""
        zeros: State = (x.new_zeros(x.shape[0], self.d_state),) * self.cell.n_states
        states = cache.states if cache is not None and cache.states else [zeros] * len(self.layers)
        if states[0][0].shape != zeros[0].shape or len(states) != len(self.layers):
            raise ShapeError(
                f"the cache contains {len(states)} layers of {tuple(states[0][0].shape)}, expected "
                f"{len(self.layers)} of {tuple(zeros[0].shape)}; a new batch or model needs a new RecurrentCache"
            )
        ends = []
        for i, layer in enumerate(self.layers):
            x = x if i == 0 else self.dropout(x)
            ahead, end = _run(layer, x, states[i]) if real is None else _step_through(layer, x, states[i], real)
            ends.append(end)
            if self.reverse_layers is None:
                x = ahead
            else:
                behind, _ = _run(self.reverse_layers[i], _reversed(x, reverse), zeros)
                x = torch.cat((ahead, _reversed(behind, reverse)), dim=-1)
        if cache is not None:
            cache.states = ends
            cache.length += x.shape[1]
        return x

    def summary(self, x: Float[Tensor, "B T W"], real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B W"]:
        """Return the final states of both directions: forward at the last real token, backward at the first."""
        ahead, behind = x[..., : self.d_state], x[..., self.d_state :]
        if real is None:
            return torch.cat((ahead[:, -1], behind[:, 0]), dim=-1)
        position = torch.arange(x.shape[1], device=x.device)
        last = (position * real).amax(dim=1, keepdim=True)
        first = real.long().argmax(dim=1, keepdim=True)
        return torch.cat((_rows(ahead, last), _rows(behind, first)), dim=-1)[:, 0]


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """Return x (B, T, W) reordered by `order` (B, N): row n of sequence b is token order[b, n]."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _reversed(x: Tensor, reverse: Tensor | None) -> Tensor:
    """Reverse the tokens of each sequence, without its padding."""
    return x.flip(1) if reverse is None else _rows(x, reverse)


def real_tokens(mask: Mask | None, ids: Tensor, start: int = 0) -> Tensor | None:
    """Return which of the tokens (B, T) are not padding, from a mask that does not depend on the query.

    The mask is over positions of the sequence, and `start` is the position of the first token."""
    if mask is None:
        return None
    mask = as_mask(mask)
    if mask.uses_query_position:
        raise MaskError(
            f"got the mask {mask}, which differs from query to query; expected one that says which tokens are real, "
            "such as padding(lengths): a recurrent network has no queries, it reads every real token in turn"
        )
    B, T = ids.shape
    if mask.batch_shape not in ((), (1,), (1, 1), (B, 1)):  # the last axis is the heads
        raise ShapeError(f"the mask was made for a batch of {tuple(mask.batch_shape)} and the ids have a batch of {B}")
    is_visible = mask.dense(1, start + T, device=ids.device)  # (1, S), or (B, 1, 1, S) if the mask has a batch
    return is_visible.flatten(0, -2)[:, start:].expand(B, T)


def check_ids(name: str, ids: Tensor) -> None:
    """Raise ShapeError unless ids are (B, T) with at least one token."""
    if ids.dim() != 2:
        raise ShapeError(f"{name} have shape {tuple(ids.shape)}; expected (batch, tokens): add an axis with ids[None]")
    if ids.shape[1] == 0:
        raise ShapeError(f"{name} have shape {tuple(ids.shape)}; expected at least one token a sequence")


@dataclass(frozen=True)
class NextToken(Validated):
    """Logits of the next token at each position, (B, T, vocab_size); `tie_embeddings` uses the embedding matrix."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"tied": "tie_embeddings"}
    tie_embeddings: bool = False


@dataclass(frozen=True)
class Classify(Validated):
    """Logits of one class per sequence, (B, n_classes), from the final states."""

    n_classes: Annotated[int, Range(ge=2)]


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Config):
    """Configuration of `Recurrent`.

    Args:
        vocab_size: Size of the vocabulary.
        d_model: Width of embeddings and states.
        n_layers: Number of layers.
        cell: The recurrent cell.
        task: Next-token prediction or classification.
        bidirectional: Whether each layer also reads from right to left.
        dropout: Dropout between layers.
    """

    vocab_size: PositiveInt
    d_model: PositiveInt
    n_layers: PositiveInt = 1
    cell: RNN | GRU | LSTM = LSTM()
    task: NextToken | Classify = NextToken()
    bidirectional: bool = False
    dropout: DropoutRate = 0.0

    def validate(self) -> None:
        require(
            not (self.bidirectional and isinstance(self.task, NextToken)),
            "RecurrentConfig: got bidirectional=True with NextToken(), expected one direction: reading backwards would "
            "show the very token that is to be predicted; use Classify(…), or bidirectional=False",
        )

    def build(self) -> Recurrent:
        return Recurrent(self)


class Recurrent(Module):
    """Language model or classifier without attention.

    State h_t depends on h_{t−1}, so a sequence of T tokens takes T sequential steps, O(T·M²) operations, and a path of
    T steps between its ends. Source: Deep Learning final exam, January 2025, Part 1, questions 6 and 7; CENG 403
    (Self-Attention and Transformers), Q1c (its cost compared with self-attention).

        model(ids)                                    # (B, T) -> (B, T, vocab_size), or (B, n_classes)
        model(ids, mask=padding(lengths))             # padding on either side has no effect
        model(next_ids, cache=cache)                  # continues from a RecurrentCache, and updates it

    Args:
        config: The configuration.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model)
        M, both_ways = config.d_model, config.bidirectional
        self.stack = RecurrentStack(config.cell, M, M, config.n_layers, bidirectional=both_ways, dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        n_out = config.task.n_classes if isinstance(config.task, Classify) else config.vocab_size
        tie_embeddings = isinstance(config.task, NextToken) and config.task.tie_embeddings
        self.head = None if tie_embeddings else nn.Linear(self.stack.d_out, n_out)

    def forward(
        self, ids: Int[Tensor, "B T"], *, mask: Mask | None = None, cache: RecurrentCache | None = None
    ) -> Float[Tensor, "B *T out"]:
        """Return logits of ids (B, T): (B, T, V) of the next token, or (B, classes) of the sequence."""
        check_ids("ids", ids)
        if cache is not None and self.config.bidirectional:
            raise ConfigError(
                "got a cache for a bidirectional model, expected none: its backward states begin at the end, so a "
                "sequence cannot be given in pieces; pass all of it at once"
            )
        real = real_tokens(mask, ids, 0 if cache is None else cache.length)
        x = self.dropout(self.embedding(ids))
        x = self.stack(x, real=real, cache=cache)  # (B, T, W)
        if isinstance(self.config.task, Classify):
            x = self.stack.summary(x, real) if cache is None else cache.states[-1][0]  # (B, W)
        x = self.dropout(x)
        return self.embedding.logits(x) if self.head is None else self.head(x)
