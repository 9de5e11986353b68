"""A GPT on one page, built of clearhead's parts: `attend`, a mask, a few layers. Trained on a text, it writes more.

    python examples/gpt.py                        it reads its own source, learns it, and writes more of the kind
    python examples/gpt.py book.txt "Once upon"   the same with a text and a prompt of yours

The names of the parts are those of `clearhead.Decoder`, so that either loads the other's weights; a test holds that
both give the same logits. Letters: B batch, T tokens, S tokens seen so far, H heads, D width of a head, M = H·D width
of the model, V vocabulary.
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
    """Every token asks (q) all tokens up to itself (k) and takes a mean of what they hold (v), in H ways at once."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = (self.heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        offset = 0  # where the first of these tokens stands
        if cache is not None:  # what was seen before is not computed again
            offset = cache.length
            k, v = cache.append(k, v)  # (B, H, S, D)
        y = attend(q, k, v, causal(), query_offset=offset)  # softmax(q kᵀ / √D) v under the mask
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, M)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, M) → (B, H, T, D)


class Block(nn.Module):
    """Two residual lines: tokens look at each other, then each thinks by itself."""

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
    """Ids in, the logits of the token after each of them out."""

    def __init__(self, vocab_size: int, max_len: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.embedding = TokenEmbedding(vocab_size, d_model)
        self.positions = LearnedPositions(max_len=max_len).build(d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        DepthScaled(std=0.02).apply(self, n_layers)  # small, and smaller still where a branch ends in the stream

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        offset = 0 if cache is None else cache.length
        x = self.positions(self.embedding(ids), torch.arange(offset, offset + ids.shape[1]))  # (B, T, M)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i])
        return self.embedding.logits(self.norm(x))  # (B, T, V): the embedding's own matrix, tied


def train(model: GPT, ids: Tensor, *, steps: int, rows: int = 16, lr_max: float = 3e-3, seed: int = 0) -> list[float]:
    """The loss of every step: random windows of the text, each token asked for the next one."""
    optimiser, rate = adamw(model, lr=lr_max), WarmupCosine(lr_max, steps // 10, steps)
    chance = torch.Generator().manual_seed(seed)
    width = min(model.max_len, len(ids) - 1)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - width, (rows, 1), generator=chance)
        window = ids[starts + torch.arange(width + 1)]  # (B, T + 1)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate(step)
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: GPT, ids: Tensor, max_new_tokens: int, *, temperature: float = 0.8, seed: int = 0) -> Tensor:
    """`ids` (T,) and up to `max_new_tokens` more, drawn one after the other; each step computes one token."""
    chance = torch.Generator().manual_seed(seed)
    cache, new = KVCache(), ids[None, -model.max_len :]
    for _ in range(min(max_new_tokens, model.max_len - new.shape[1] + 1)):
        logits = model(new, cache)[:, -1] / temperature  # (1, V)
        new = torch.multinomial(logits.softmax(-1), 1, generator=chance)  # (1, 1)
        ids = torch.cat((ids, new[0]))
    return ids


def main(path: str = __file__, prompt: str = "def ", steps: int = 500) -> None:
    text = Path(path).read_text(encoding="utf-8")
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    if unknown := set(prompt) - set(letters):
        sys.exit(f"the prompt has {sorted(unknown)}, which the text never uses; choose another one")
    if len(text) < 2 or not prompt:
        sys.exit("nothing to learn: give a text of two characters or more, and a prompt of one or more")
    ids = torch.tensor([number[letter] for letter in text])

    torch.manual_seed(0)
    model = GPT(len(letters), max_len=64, d_model=64, n_layers=2, n_heads=4)
    losses = train(model, ids, steps=steps)
    print(f"{len(text):,} characters, {sum(p.numel() for p in model.parameters()):,} weights")
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    written = write(model, torch.tensor([number[letter] for letter in prompt]), max_new_tokens=60)
    print("".join(letters[i] for i in written.tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
