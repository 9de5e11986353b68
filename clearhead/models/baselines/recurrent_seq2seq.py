"""Sequence to sequence with recurrent networks and additive attention: translation before the Transformer.

An encoder reads the source (both ways by default); a decoder writes the target, and at each step looks at all encoder
states, weighted by a small network that compares them with its own state. With `FixedVector` it sees their summary
alone. Calls are those of `EncoderDecoder`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead._core.shapes import Float, Int
from clearhead._core.validation import DropoutRate, PositiveInt
from clearhead.attention import Additive, attend
from clearhead.config import Config
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.models.baselines.recurrent import GRU, LSTM, RNN, RecurrentCache, RecurrentStack, check_ids, real_tokens
from clearhead.nn.embeddings import TokenEmbedding

# B batch, S source tokens, T target tokens, M width of a state, W of the memory (M, or 2M both ways), V vocabulary.


@dataclass(frozen=True)
class AfterStep:
    """The state takes its step, then looks at the source with where it has come to (Luong's order).

    What is seen does not enter the recurrence, so in training one kernel computes all states, and all look at once."""


@dataclass(frozen=True)
class BeforeStep:
    """The state looks at the source first, and what it sees enters its step (Bahdanau's order).

    Every step then waits for the look before it: slower, and the order of the first model with attention."""


@dataclass(frozen=True)
class FixedVector:
    """No attention: one vector, the encoder's final states, is all that every step knows of the source.

    The order before attention (Cho et al., 2014): whatever the source's length, it has to fit into that vector."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSeq2SeqConfig(Config):
    """The sizes of a `RecurrentSeq2Seq`.

    `vocab_size` counts the target's tokens. `d_model` is the width of embeddings and states."""

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


class RecurrentSeq2Seq(nn.Module):
    """An encoder-decoder of recurrent networks with additive attention: the baseline for translation.

    The decoder starts from a learned map of the encoder's final states, and predicts from tanh(W [state; context]).
    Source: Deep Learning final exam, January 2025, Part 1, question 7 (which passes of an encoder-decoder RNN run in
    parallel: none); CENG 403 (Transformers and Attention), Q6b (additive attention).

        model(source, target, source_mask=padding(lengths))      # logits (B, T, V)

    The target is read from left to right, so padding at its end changes no earlier logits and needs no mask."""

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
        looks = not isinstance(config.attention, FixedVector)
        self.attention = Additive(M, W, config.d_attention or M) if looks else None
        self.mix = nn.Linear(M + W, M)
        self.head = nn.Linear(M, config.vocab_size)

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B T"], *, source_mask: Mask | None = None
    ) -> Float[Tensor, "B T V"]:
        """The logits of each next target token, given the target up to there (teacher forcing)."""
        return self.decode(target, self.encode(source, mask=source_mask), memory_mask=source_mask)

    def encode(self, source: Int[Tensor, "B S"], *, mask: Mask | None = None) -> Float[Tensor, "B S W"]:
        """The memory: the encoder's states at each source token, zero at padding."""
        check_ids("source ids", source)
        real = real_tokens(mask, source)
        return self.encoder(self.dropout(self.source_embedding(source)), real=real)

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S W"],
        *,
        memory_mask: Mask | None = None,
        cache: RecurrentCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits after each target token. With a cache, `target` is only what is new since the last call."""
        check_ids("target ids", target)
        self._check_memory(target, memory)
        cache = RecurrentCache() if cache is None else cache
        if not cache.states:
            cache.states = self._first_states(memory, memory_mask)
        x = self.dropout(self.target_embedding(target))  # (B, T, M)
        if isinstance(self.config.attention, BeforeStep):
            states, contexts = self._look_and_step(x, memory, memory_mask, cache)
        else:
            states = self.decoder(x, cache=cache)  # (B, T, M)
            contexts = self._look(states, memory, memory_mask)  # (B, T, W)
        mixed = torch.tanh(self.mix(torch.cat((states, contexts), dim=-1)))
        return self.head(self.dropout(mixed))

    def _look(self, states: Tensor, memory: Tensor, mask: Mask | None) -> Tensor:
        """What each state (B, T, M) sees of the memory (B, S, W): one head of attention, (B, T, W)."""
        if self.attention is None:
            return self._summary(memory, mask)[:, None].expand(-1, states.shape[1], -1)
        memory = memory[:, None]
        return attend(states[:, None], memory, memory, mask, scores=self.attention)[:, 0]

    def _look_and_step(
        self, x: Tensor, memory: Tensor, mask: Mask | None, cache: RecurrentCache
    ) -> tuple[Tensor, Tensor]:
        states, contexts = [], []
        for t in range(x.shape[1]):
            top = cache.states[-1][0]  # (B, M): the top layer's h so far
            contexts.append(self._look(top[:, None], memory, mask))
            states.append(self.decoder(torch.cat((x[:, t : t + 1], contexts[-1]), dim=-1), cache=cache))
        return torch.cat(states, dim=1), torch.cat(contexts, dim=1)

    def _first_states(self, memory: Tensor, mask: Mask | None) -> list[tuple[Tensor, ...]]:
        """Each decoder layer's state before its first token: tanh of a map of the encoder's final states."""
        n_states = self.config.cell.n_states
        parts = torch.tanh(self.bridge(self._summary(memory, mask))).chunk(self.config.n_layers * n_states, dim=-1)
        return [tuple(parts[i : i + n_states]) for i in range(0, len(parts), n_states)]

    def _summary(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """The encoder's final states, (B, W)."""
        return self.encoder.summary(memory, real_tokens(mask, memory[..., 0]))

    def _check_memory(self, target: Tensor, memory: Tensor) -> None:
        width = self.encoder.d_out
        if memory.dim() != 3 or memory.shape[0] != target.shape[0] or memory.shape[2] != width:
            raise ShapeError(
                f"got a memory of shape {tuple(memory.shape)} for {target.shape[0]} targets, expected "
                f"({target.shape[0]}, source tokens, {width}), as encode() gives it"
            )
