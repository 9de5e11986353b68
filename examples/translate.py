"""The Transformer of 2017 on one page, built of clearhead's parts: one stack reads, another writes and looks back.

    python examples/translate.py                        sums in words, English to Spanish; tried on sums it never saw
    python examples/translate.py pairs.tsv "i am here"  your pairs (a line each: source, tab, target), one token a word

The names of the parts are those of `clearhead.EncoderDecoder`, so that either loads the other's weights; a test holds
that both give the same logits. Letters: B batch, S source tokens, T target tokens, H heads, D width of a head, M = H·D
width of the model, V vocabulary.
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

PAD, START, STOP = 0, 1, 2


class Attention(nn.Module):
    """`x` asks, `memory` answers: x itself in self-attention, the encoder's output in cross-attention."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor, mask: Mask) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(memory)), self.heads(self.v_proj(memory))
        y = attend(q, k, v, mask)  # softmax(q kᵀ / √D) v under the mask: (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, M)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, M) → (B, H, T, D)


class Block(nn.Module):
    """Self-attention, cross-attention where there is something to look back at, feed-forward: each a residual line."""

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
    """Embeddings, positions, blocks, a last norm: the encoder and the decoder are one of these each."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int, n_heads: int, *, cross: bool) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, d_model, scaled=True)  # times √M, so that positions do not drown it
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
    """Source and target ids in, the logits of the token after each target token out."""

    def __init__(self, source_size: int, target_size: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.encoder = Stack(source_size, d_model, n_layers, n_heads, cross=False)
        self.decoder = Stack(target_size, d_model, n_layers, n_heads, cross=True)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        real = padding(lengths)  # the source's own tokens, not what fills up its row
        memory = self.encoder(source, real)  # (B, S, M)
        x = self.decoder(target, causal(), memory, real)  # targets are padded on the right: causal() hides that
        return self.decoder.embedding.logits(x)  # (B, T, V), tied


class Words:
    """A token a word; 0, 1 and 2 are padding, the start and the end."""

    def __init__(self, texts: list[str]) -> None:
        self.words = ["<pad>", "<start>", "<stop>", *sorted({word for text in texts for word in text.split()})]
        self.number = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        if unknown := [word for word in text.split() if word not in self.number]:
            sys.exit(f"never seen in training: {', '.join(unknown)}; use words of the pairs")
        return [self.number[word] for word in text.split()]

    def batch(self, texts: list[str], before: list[int], after: list[int]) -> tuple[Tensor, Tensor]:
        """Ids (B, T), filled up on the right, and how many are real in each row."""
        rows = [torch.tensor(before + self.encode(text) + after) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, True, PAD), torch.tensor([len(row) for row in rows])


def train(model: Translator, source: Words, target: Words, pairs: list[tuple[str, str]], steps: int) -> list[float]:
    """The loss of every step; the decoder is given the right beginning and asked for the next word."""
    optimiser, rate = adamw(model, lr=2e-3), WarmupCosine(2e-3, steps // 10, steps)
    read, lengths = source.batch([a for a, _ in pairs], [], [STOP])
    written, _ = target.batch([b for _, b in pairs], [START], [STOP])
    chance, losses = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        rows = torch.randint(len(pairs), (64,), generator=chance)
        logits = model(read[rows], written[rows, :-1], lengths[rows])
        loss = F.cross_entropy(logits.flatten(0, 1), written[rows, 1:].flatten(), ignore_index=PAD)
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate(step)
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def translate(model: Translator, source: Words, target: Words, texts: list[str], max_new_tokens: int = 16) -> list[str]:
    """The likeliest word after the other, for all texts at once, each until its stop."""
    read, lengths = source.batch(texts, [], [STOP])
    written = torch.full((len(texts), 1), START)
    for _ in range(max_new_tokens):
        following = model(read, written, lengths)[:, -1].argmax(-1, keepdim=True)
        written = torch.cat((written, following), 1)
        if (written == STOP).any(1).all():
            break
    rows = [row[1:] for row in written.tolist()]
    return [" ".join(target.words[i] for i in (row[: row.index(STOP)] if STOP in row else row)) for row in rows]


# From thirty on, numbers are regular in both languages: thirty one is treinta y uno.
ONES = "one two three four five six seven eight nine", "uno dos tres cuatro cinco seis siete ocho nueve"
TENS = "thirty forty fifty sixty seventy eighty ninety", "treinta cuarenta cincuenta sesenta setenta ochenta noventa"
SIGNS = "plus minus times", "más menos por"


def sums() -> list[tuple[str, str]]:
    """1,400 of the 14,700 sums of numbers from 30 to 99: "forty seven plus thirty", "cuarenta y siete más treinta"."""

    def number(n: int, language: int) -> str:
        ten, one = TENS[language].split()[n // 10 - 3], n % 10
        return ten + ([" ", " y "][language] + ONES[language].split()[one - 1] if one else "")

    def line(i: int, language: int) -> str:
        pair, sign = divmod(i, 3)
        first, second = divmod(pair, 70)
        return f"{number(first + 30, language)} {SIGNS[language].split()[sign]} {number(second + 30, language)}"

    drawn = torch.randperm(70 * 70 * 3, generator=torch.Generator().manual_seed(0))[:1400].tolist()
    return [(line(i, 0), line(i, 1)) for i in drawn]


def main(path: str | None = None, *texts: str, steps: int = 300) -> None:
    lines = [] if path is None else Path(path).read_text(encoding="utf-8").splitlines()
    pairs = sums() if path is None else [(a, b) for a, _, b in (line.partition("\t") for line in lines) if a and b]
    if not pairs:
        sys.exit(f"{path} has no pairs; expected lines of source, tab, target")
    kept, unseen = (pairs, []) if path else (pairs[:1000], pairs[1000:])
    source, target = Words([a for a, _ in pairs]), Words([b for _, b in pairs])
    torch.manual_seed(0)
    model = Translator(len(source.words), len(target.words), d_model=64, n_layers=2, n_heads=4)
    losses = train(model, source, target, kept, steps)
    print(f"{len(kept):,} pairs; loss {losses[0]:.2f} at first, {losses[-1]:.3f} after {steps} steps")
    if unseen:
        got = translate(model, source, target, [a for a, _ in unseen])
        right = sum(text == b for text, (_, b) in zip(got, unseen, strict=True))
        print(f"of {len(unseen)} sums never seen, {right} right, such as: {unseen[-1][0]} → {got[-1]}")
    for text in texts:
        print(f"{text} → {translate(model, source, target, [text])[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
