"""A vision Transformer on one page, built from parts of clearhead: patches of an image are the tokens.

    python examples/vit.py     1,797 handwritten digits of 8×8 pixels from scikit-learn, 360 of them held out

Modules have the same names as in `clearhead.VisionTransformer`, so that each loads the parameters of the other; a test
checks that both return the same logits. Shapes: B batch, C channels, N patches, T = N + 1 tokens, H heads, D head dim,
M = H·D model dim.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead import attend
from clearhead.nn import GELU, FeedForward, Xavier
from clearhead.nn.positions import LearnedPositions
from clearhead.training import WarmupCosine
from clearhead.training.optimizer import adamw, clip_grad_norm


class Patches(nn.Module):
    """Cuts images into patches of p × p pixels, flattens them (channel, row, column) and projects them to M."""

    def __init__(self, n_channels: int, patch: int, d_model: int) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Linear(n_channels * patch**2, d_model)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, self.patch, stride=self.patch)  # (B, C·p·p, N)
        return self.projection(patches.transpose(1, 2))  # (B, N, M)


class Attention(nn.Module):
    """Multi-head self-attention without a mask."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))  # (B, T, M)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, M) → (B, H, T, D)


class Block(nn.Module):
    """Attention between patches, then a feed-forward network per patch, both with pre-norm and residual."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, 4 * d_model, GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class ViT(nn.Module):
    """Maps images to class logits, computed from a class token that attends to all patches."""

    def __init__(
        self, side: int, patch: int, n_classes: int, d_model: int, n_layers: int, n_heads: int, n_channels: int = 1
    ) -> None:
        super().__init__()
        self.embedding = Patches(n_channels, patch, d_model)
        self.cls = nn.Parameter(torch.empty(1, d_model))
        self.positions = LearnedPositions(grid=(side // patch, side // patch), n_extra=1).build(d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, n_classes)
        Xavier().apply(self, n_layers)
        nn.init.normal_(self.cls, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images)  # (B, N, M)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)  # (B, T, M): the class token is first
        x = self.positions(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])  # (B, classes)


def train(model: nn.Module, images: Tensor, labels: Tensor, *, steps: int, lr_max: float = 3e-3) -> list[float]:
    """Train on random batches and return the loss of every step."""
    optimizer = adamw(model, lr=lr_max)
    rate = WarmupCosine(lr_max, steps // 10, steps)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(images), (64,), generator=generator)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions."""
    return (model(images).argmax(-1) == labels).float().mean().item()


def digits() -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8) from −1 to 1, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits need scikit-learn; install it with: pip install scikit-learn")
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)


def main(steps: int = 300) -> None:
    """Train on handwritten digits and print the accuracy."""
    images, labels = digits()
    torch.manual_seed(0)
    model = ViT(side=8, patch=2, n_classes=10, d_model=48, n_layers=2, n_heads=4)
    losses = train(model, images[360:], labels[360:], steps=steps)
    print(f"{len(images) - 360:,} images, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"loss {losses[0]:.2f} at the start, {losses[-1]:.3f} after {steps} steps")
    print(f"accuracy on 360 held-out images: {accuracy(model, images[:360], labels[:360]):.1%}")


if __name__ == "__main__":
    main()
