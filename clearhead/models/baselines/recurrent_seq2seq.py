"""Recurrent encoder-decoder with additive attention: translation before the Transformer.

The encoder (bidirectional by default) processes the source; the decoder generates the target and attends to all encoder
states at each step. With `FixedVector` it uses only their summary. The interface is that of `EncoderDecoder`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.typed_module import Module
from clearhead._core.validation import DropoutRate, PositiveInt
from clearhead.attention import Additive, attend
from clearhead.config import Config
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.models.baselines.recurrent import GRU, LSTM, RNN, RecurrentCache, RecurrentStack, check_ids, real_tokens
from clearhead.nn.embeddings import TokenEmbedding

# B batch, S source tokens, T target tokens, M dim of a state, W of the memory (M or 2M), V vocabulary


@dataclass(frozen=True)
class AfterStep:
    """Attend to the source with the state after its step (Luong).

    The context is not an input of the recurrence, so training computes all states in one kernel, and then attends."""


@dataclass(frozen=True)
class BeforeStep:
    """Attend to the source with the previous state; the context is an input of the step (Bahdanau).

    This is slower than `AfterStep`, because each step depends on the attention before it."""


@dataclass(frozen=True)
class FixedVector:
    """No attention: every step uses one vector, the final states of the encoder (Cho et al., 2014).

    The size of this vector does not depend on the length of the source."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSeq2SeqConfig(Config):
    """Configuration of `RecurrentSeq2Seq`.

    Args:
        vocab_size: Size of the target vocabulary.
        d_model: Width of embeddings and states.
        source_vocab_size: Size of the source vocabulary, if it is another one.
        d_attention: Width of the attention's hidden layer; d_model by default.
        n_layers: Number of layers of encoder and decoder.
        cell: The recurrent cell.
        attention: When and how the decoder attends to the source.
        bidirectional: Whether the encoder also reads from right to left.
        dropout: Dropout between layers.
    """

    vocab_size: PositiveInt
    d_model: PositiveInt
    source_vocab_size: PositiveInt | None = None  # None: vocab_size
    d_attention: PositiveInt | None = None  # width of the attention's hidden layer; None: d_model
    n_layers: PositiveInt = 1
    cell: RNN | GRU | LSTM = LSTM()
    attention: AfterStep | BeforeStep | FixedVector = AfterStep()
    bidirectional: bool = True
    dropout: DropoutRate = 0.0

    def build(self) -> RecurrentSeq2Seq:
        return RecurrentSeq2Seq(self)


class RecurrentSeq2Seq(Module):
    """Recurrent encoder-decoder with additive attention: the baseline for translation.

    The initial decoder state is a linear layer of the encoder's final states; logits use tanh(W [state; context]).
    Source: Deep Learning final exam, January 2025, Part 1, question 7 (which passes of an encoder-decoder RNN run in
    parallel: none); CENG 403 (Transformers and Attention), Q6b (additive attention).

        model(source, target, source_mask=padding(lengths))      # logits (B, T, V)

    The decoder is causal, so padding at the end of the target needs no mask.

    Args:
        config: The configuration.
    """

    def __init__(self, config: RecurrentSeq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        M = config.d_model
        self.source_embedding = TokenEmbedding(config.source_vocab_size or config.vocab_size, M)
        self.target_embedding = TokenEmbedding(config.vocab_size, M)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = RecurrentStack(
            config.cell, M, M, config.n_layers, bidirectional=config.bidirectional, dropout=config.dropout
        )
        W = self.encoder.d_out
        d_in = M + W if isinstance(config.attention, BeforeStep) else M
        self.decoder = RecurrentStack(config.cell, d_in, M, config.n_layers, dropout=config.dropout)
        self.bridge = nn.Linear(W, config.n_layers * config.cell.n_states * M)
        has_attention = not isinstance(config.attention, FixedVector)
        self.attention = Additive(M, W, config.d_attention or M) if has_attention else None
        self.mix = nn.Linear(M + W, M)
        self.head = nn.Linear(M, config.vocab_size)

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"], *, source_mask: Mask | None = None
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of the next token after each of `target` (teacher forcing)."""
        return self.decode(target, self.encode(source, mask=source_mask), memory_mask=source_mask)

    def encode(self, source: Int[Tensor, "B S"], *, mask: Mask | None = None) -> Float[Tensor, "B S W"]:
        """Return the encoder states at each source token, zero at padding."""
        check_ids("source ids", source)
        real = real_tokens(mask, source)
        states: Tensor = self.encoder(self.dropout(self.source_embedding(source)), real=real)
        return states

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S W"],
        *,
        memory_mask: Mask | None = None,
        cache: RecurrentCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits after each target token; with a `cache`, `target` is the new tokens only."""
        check_ids("target ids", target)
        self._check_memory(target, memory)
        cache = RecurrentCache() if cache is None else cache
        if not cache.states:
            cache.states = self._first_states(memory, memory_mask)
        x = self.dropout(self.target_embedding(target))  # (B, T, M)
        if isinstance(self.config.attention, BeforeStep):
            states, contexts = self._attend_and_step(x, memory, memory_mask, cache)
        else:
            states = self.decoder(x, cache=cache)  # (B, T, M)
            contexts = self._context(states, memory, memory_mask)  # (B, T, W)
        mixed = torch.tanh(self.mix(torch.cat((states, contexts), dim=-1)))
        logits: Tensor = self.head(self.dropout(mixed))
        return logits

    def _context(self, states: Tensor, memory: Tensor, mask: Mask | None) -> Tensor:
        """Return the contexts (B, T, W) of states (B, T, M): one head of attention to the memory (B, S, W)."""
        if self.attention is None:
            return self._summary(memory, mask)[:, None].expand(-1, states.shape[1], -1)
        memory = memory[:, None]
        return attend(states[:, None], memory, memory, mask, scores=self.attention)[:, 0]

    def _attend_and_step(
        self, x: Tensor, memory: Tensor, mask: Mask | None, cache: RecurrentCache
    ) -> tuple[Tensor, Tensor]:
        """Alternate attention and steps; return the states and contexts."""
        states, contexts = [], []
        for t in range(x.shape[1]):
            top = cache.states[-1][0]  # (B, M): h of the last layer
            contexts.append(self._context(top[:, None], memory, mask))
            states.append(self.decoder(torch.cat((x[:, t : t + 1], contexts[-1]), dim=-1), cache=cache))
        return torch.cat(states, dim=1), torch.cat(contexts, dim=1)

    def _first_states(self, memory: Tensor, mask: Mask | None) -> list[tuple[Tensor, ...]]:
        """Return the initial state of each decoder layer: tanh of a linear layer of the encoder's final states."""
        n_states = self.config.cell.n_states
        parts = torch.tanh(self.bridge(self._summary(memory, mask))).chunk(self.config.n_layers * n_states, dim=-1)
        return [tuple(parts[i : i + n_states]) for i in range(0, len(parts), n_states)]

    def _summary(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Return the final states of the encoder, (B, W)."""
        return self.encoder.summary(memory, real_tokens(mask, memory[..., 0]))

    def _check_memory(self, target: Tensor, memory: Tensor) -> None:
        """Raise ShapeError unless the memory matches the targets."""
        width = self.encoder.d_out
        if memory.dim() != 3 or memory.shape[0] != target.shape[0] or memory.shape[2] != width:
            raise ShapeError(
                f"got a memory of shape {tuple(memory.shape)} for {target.shape[0]} targets, expected "
                f"({target.shape[0]}, source tokens, {width}), as returned by encode()"
            )
