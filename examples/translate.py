"""An encoder-decoder Transformer on one page, built from parts of clearhead, that translates.

    python examples/translate.py                        sums in words, English to Spanish, with held-out sums
    python examples/translate.py pairs.tsv "i am here"  your pairs (lines of source, tab, target), a token per word

Modules have the same names as in `clearhead.EncoderDecoder`, so that each loads the parameters of the other; a test
checks that both return the same logits. Shapes: B batch, S source tokens, T target tokens, H heads, D head dim,
M = H·D model dim, V vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import attend
from clearhead.masks import Mask, causal, padding
from clearhead.nn import FeedForward, ReLU, TokenEmbedding, Xavier
from clearhead.nn.positions import Sinusoidal
from clearhead.training import WarmupCosine
from clearhead.training.optimizer import adamw, clip_grad_norm

PAD, START, STOP = range(3)


class Attention(nn.Module):
    """Multi-head attention: queries from `x`, keys and values from `memory` (`x` itself, or the encoder's output)."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor, mask: Mask) -> Tensor:
        k, v = (self.heads(projection(memory)) for projection in (self.k_proj, self.v_proj))
        y = attend(self.heads(self.q_proj(x)), k, v, mask)  # softmax(q kᵀ / √D) v under the mask: (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, M)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, M) → (B, H, T, D)


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each with pre-norm and a residual connection."""

    def __init__(self, d_model: int, n_heads: int, *, cross: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.norm_cross = nn.LayerNorm(d_model) if cross else None
        self.cross_attention = Attention(d_model, n_heads) if cross else None
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, 4 * d_model, ReLU())

    def forward(self, x: Tensor, mask: Mask, memory: Tensor | None = None, memory_mask: Mask | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, mask)
        if self.cross_attention is not None:
            x = x + self.cross_attention(self.norm_cross(x), memory, memory_mask)
        return x + self.feed_forward(self.norm2(x))


class Stack(nn.Module):
    """Embeddings, positions, blocks and a final norm; the encoder and the decoder are one stack each."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int, n_heads: int, *, cross: bool) -> None:
        super().__init__()
        # Times √M, to match the scale of the positions.
        self.embedding = TokenEmbedding(vocab_size, d_model, scaled=True)
        self.positions = Sinusoidal().build(d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, cross=cross) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        Xavier().apply(self, n_layers)

    def forward(self, ids: Tensor, mask: Mask, memory: Tensor | None = None, memory_mask: Mask | None = None) -> Tensor:
        x = self.positions(self.embedding(ids))
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask)
        return self.norm(x)


class Translator(nn.Module):
    """Maps source and target ids to the logits of the next target token at every position, (B, T, V)."""

    def __init__(self, source_size: int, target_size: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.encoder = Stack(source_size, d_model, n_layers, n_heads, cross=False)
        self.decoder = Stack(target_size, d_model, n_layers, n_heads, cross=True)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        source_mask = padding(lengths)  # hides the padding of the source
        memory = self.encoder(source, source_mask)  # (B, S, M)
        x = self.decoder(target, causal(), memory, source_mask)  # targets are padded on the right: causal() hides that
        return self.decoder.embedding.logits(x)  # (B, T, V), tied


class Words:
    """One token per word; ids 0, 1 and 2 are padding, start and stop."""

    def __init__(self, texts: list[str]) -> None:
        self.words = ["<pad>", "<start>", "<stop>", *sorted({word for text in texts for word in text.split()})]
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        if unknown := [word for word in text.split() if word not in self.ids]:
            sys.exit(f"not in the training pairs: {', '.join(unknown)}; use other words")
        return [self.ids[word] for word in text.split()]

    def batch(self, texts: list[str], prefix: list[int], suffix: list[int]) -> tuple[Tensor, Tensor]:
        """Return ids (B, T), padded on the right, and the length of each row."""
        rows = [torch.tensor(prefix + self.encode(text) + suffix) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, True, PAD), torch.tensor([len(row) for row in rows])


def train(model: Translator, source: Words, target: Words, pairs: list[tuple[str, str]], steps: int) -> list[float]:
    """Train with teacher forcing and return the loss of every step."""
    optimizer = adamw(model, lr=2e-3)
    rate = WarmupCosine(2e-3, steps // 10, steps)
    source_ids, lengths = source.batch([a for a, _ in pairs], [], [STOP])
    target_ids, _ = target.batch([b for _, b in pairs], [START], [STOP])
    batches = torch.randint(len(pairs), (steps, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for step, rows in enumerate(batches, 1):
        logits = model(source_ids[rows], target_ids[rows, :-1], lengths[rows])
        loss = F.cross_entropy(logits.flatten(0, 1), target_ids[rows, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def translate(model: Translator, source: Words, target: Words, texts: list[str], max_new_tokens: int = 16) -> list[str]:
    """Translate a batch of texts with greedy decoding."""
    source_ids, lengths = source.batch(texts, [], [STOP])
    target_ids = torch.full((len(texts), 1), START)
    for _ in range(max_new_tokens):
        next_ids = model(source_ids, target_ids, lengths)[:, -1].argmax(-1, keepdim=True)
        target_ids = torch.cat((target_ids, next_ids), 1)
        if (target_ids == STOP).any(1).all():
            break
    rows = target_ids[:, 1:].tolist()
    return [" ".join(target.words[i] for i in row[: [*row, STOP].index(STOP)]) for row in rows]


# From 30 to 99, numbers are regular in both languages: thirty one is treinta y uno.
ONES = "one two three four five six seven eight nine", "uno dos tres cuatro cinco seis siete ocho nueve"
TENS = "thirty forty fifty sixty seventy eighty ninety", "treinta cuarenta cincuenta sesenta setenta ochenta noventa"
OPERATORS = "plus minus times", "más menos por"


def sums() -> list[tuple[str, str]]:
    """Return 1,400 random pairs such as "forty seven plus thirty" and "cuarenta y siete más treinta"."""

    def number(n: int, language: int) -> str:
        tens = TENS[language].split()[n // 10 - 3]
        return tens + ([" ", " y "][language] + ONES[language].split()[n % 10 - 1] if n % 10 else "")

    def line(i: int, language: int) -> str:
        pair, operator = divmod(i, 3)
        first, second = divmod(pair, 70)
        return f"{number(first + 30, language)} {OPERATORS[language].split()[operator]} {number(second + 30, language)}"

    indices = torch.randperm(70 * 70 * 3, generator=torch.Generator().manual_seed(0))[:1400].tolist()
    return [(line(i, 0), line(i, 1)) for i in indices]


def main(path: str | None = None, *texts: str, steps: int = 300) -> None:
    lines = [] if path is None else Path(path).read_text(encoding="utf-8").splitlines()
    pairs = sums() if path is None else [(a, b) for a, _, b in (line.partition("\t") for line in lines) if a and b]
    if not pairs:
        sys.exit(f"{path} has no pairs; expected lines of source, tab, target")
    training, held_out = (pairs, []) if path else (pairs[:1000], pairs[1000:])
    source, target = (Words(list(column)) for column in zip(*pairs, strict=True))
    torch.manual_seed(0)
    model = Translator(len(source.words), len(target.words), d_model=64, n_layers=2, n_heads=4)
    losses = train(model, source, target, training, steps)
    print(f"{len(training):,} pairs; loss {losses[0]:.2f} at the start, {losses[-1]:.3f} after {steps} steps")
    if held_out:
        outputs = translate(model, source, target, [a for a, _ in held_out])
        n_correct = sum(output == b for output, (_, b) in zip(outputs, held_out, strict=True))
        print(f"{n_correct} of {len(held_out)} held-out sums correct, such as: {held_out[-1][0]} → {outputs[-1]}")
    for text in texts:
        print(f"{text} → {translate(model, source, target, [text])[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
