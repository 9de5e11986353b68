"""A GPT on one page, built from parts of clearhead. It trains on a text and continues it.

    python examples/gpt.py                        trains on this file and generates similar text
    python examples/gpt.py book.txt "Once upon"   uses your text and your prompt

Modules have the same names as in `clearhead.Decoder`, so that each loads the parameters of the other; a test checks
that both return the same logits. Shapes: B batch, T tokens, S tokens including the cache, H heads, D head dim,
M = H·D model dim, V vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import KVCache, attend
from clearhead.masks import causal
from clearhead.nn import GELU, DepthScaled, FeedForward, TokenEmbedding
from clearhead.nn.positions import LearnedPositions
from clearhead.training import WarmupCosine
from clearhead.training.optimizer import adamw, clip_grad_norm


class Attention(nn.Module):
    """Causal multi-head self-attention with an optional KV cache."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = (self.heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        offset = 0  # position of the first token
        if cache is not None:  # keys and values of earlier tokens are not recomputed
            offset = cache.length
            k, v = cache.append(k, v)  # (B, H, S, D)
        y = attend(q, k, v, causal(), query_offset=offset)  # softmax(q kᵀ / √D) v under the mask
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, M)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, M) → (B, H, T, D)


class Block(nn.Module):
    """Attention between tokens, then a feed-forward network per token, both with pre-norm and residual."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, 4 * d_model, GELU(tanh=True))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache)
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Maps ids (B, T) to the logits of the next token at every position, (B, T, V)."""

    def __init__(self, vocab_size: int, max_len: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.embedding = TokenEmbedding(vocab_size, d_model)
        self.positions = LearnedPositions(max_len=max_len).build(d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        DepthScaled(std=0.02).apply(self, n_layers)  # std 0.02, scaled down with depth for output projections

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        offset = 0 if cache is None else cache.length
        x = self.positions(self.embedding(ids), torch.arange(offset, offset + ids.shape[1]))  # (B, T, M)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        return self.embedding.logits(self.norm(x))  # (B, T, V), tied to the embedding


def train(model: GPT, ids: Tensor, *, steps: int, rows: int = 16, lr_max: float = 3e-3, seed: int = 0) -> list[float]:
    """Train on random windows of a text and return the loss of every step."""
    optimizer = adamw(model, lr=lr_max)
    rate = WarmupCosine(lr_max, steps // 10, steps)
    generator = torch.Generator().manual_seed(seed)
    width = min(model.max_len, len(ids) - 1)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - width, (rows, 1), generator=generator)
        window = ids[starts + torch.arange(width + 1)]  # (B, T + 1)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def generate(model: GPT, ids: Tensor, max_new_tokens: int, *, temperature: float = 0.8, seed: int = 0) -> Tensor:
    """Return `ids` (T,) and up to `max_new_tokens` sampled tokens; each step computes one token."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache()
    new_ids = ids[None, -model.max_len :]
    for _ in range(min(max_new_tokens, model.max_len - new_ids.shape[1] + 1)):
        logits = model(new_ids, cache)[:, -1] / temperature  # (1, V)
        new_ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (1, 1)
        ids = torch.cat((ids, new_ids[0]))
    return ids


def main(path: str = __file__, prompt: str = "def ", steps: int = 500) -> None:
    """Train on a file and continue the prompt."""
    text = Path(path).read_text(encoding="utf-8")
    characters = sorted(set(text))
    id_of = {character: i for i, character in enumerate(characters)}
    if unknown := set(prompt) - set(characters):
        sys.exit(f"the prompt contains {sorted(unknown)}, which the text never uses; choose another prompt")
    if len(text) < 2 or not prompt:
        sys.exit("the text or the prompt is too short; expected at least two characters of text and one of prompt")
    ids = torch.tensor([id_of[character] for character in text])

    torch.manual_seed(0)
    model = GPT(len(characters), max_len=64, d_model=64, n_layers=2, n_heads=4)
    losses = train(model, ids, steps=steps)
    print(f"{len(text):,} characters, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"loss {losses[0]:.2f} at the start, {losses[-1]:.2f} after {steps} steps")
    output = generate(model, torch.tensor([id_of[character] for character in prompt]), max_new_tokens=60)
    print("".join(characters[i] for i in output.tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
