"""`python -m benchmarks attention`: what going through `attend` and `MultiHeadAttention` costs over going without.

The peers are `scaled_dot_product_attention` called directly, and `torch.nn.MultiheadAttention` in training (it is given
`need_weights=False`, its fastest way). Two rows are about starting: a new process that imports clearhead, and one that
translates a sentence, each against one that imports torch. The last is about loading somebody's model.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.results import Comparison, compare
from clearhead.attention import attend
from clearhead.hub import checkpoint, convert
from clearhead.masks import Mask, causal, padding
from clearhead.models import DecoderConfig
from clearhead.nn import MultiHeadAttention, RMSNorm, SwiGLU
from clearhead.nn.positions import Rotary

Call = Callable[[], object]
Sides = tuple[str, float, Call, Call]  # what is compared, the bound of the ratio, ours, the peer
SHAPE = (4, 8, 512, 64)  # (B, H, T, D)


def measure(repeats: int = 60, on_round: Callable[[int, int], None] = lambda done, total: None) -> list[Comparison]:
    """Every comparison, each `repeats` rounds."""
    both, morning = ["-c", "import torch, clearhead"], ["-m", "clearhead.cli", "translate", "Good morning."]
    few = min(repeats, 5)  # a process takes a second or more to start, and varies little
    with tempfile.TemporaryDirectory() as place:
        parts: tuple[tuple[int, Callable[[], Sides]], ...] = (
            (repeats, partial(_attend, "attend, sdpa / scaled_dot_product_attention", None)),
            (repeats, partial(_attend, "attend, sdpa, causal() / the same with is_causal", causal(), is_causal=True)),
            (repeats, _padded),
            (repeats, partial(_train, "MultiHeadAttention, training / nn.MultiheadAttention", None)),
            (repeats, partial(_train, "MultiHeadAttention, training, causal() / nn.MultiheadAttention", causal())),
            (few, partial(_start, "a process that imports clearhead / one that imports torch", 1.25, both)),
            (few, partial(_start, "clearhead translate 'Good morning.' / a process that imports torch", 4.0, morning)),
            (few, partial(_load, Path(place, "model"))),
        )
        done, total = itertools.count(1), sum(rounds for rounds, _ in parts)
        found = []
        for rounds, make in parts:
            name, bound, ours, peer = make()
            how: dict[str, Any] = {"repeats": rounds, "on_round": lambda: on_round(next(done), total)}
            found.append(compare(name, ours, peer, bound=bound, **how))
    return found


def _attend(name: str, mask: Mask | None, **plain: Any) -> Sides:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    ours = partial(attend, q, k, v, mask, impl="sdpa")
    return name, 1.03, ours, partial(F.scaled_dot_product_attention, q, k, v, **plain)


def _padded() -> Sides:
    B, _, T, _ = SHAPE
    lengths = torch.linspace(T // 2, T, B).long()
    row = (torch.arange(T) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, S)
    name = "attend, sdpa, padding / the same with a (B, 1, 1, S) mask"
    return _attend(name, padding(lengths), attn_mask=row)


def _train(name: str, mask: Mask | None) -> Sides:
    """Forward and backward of one layer, with the same weights on both sides."""
    B, H, T, D = SHAPE
    torch.manual_seed(0)
    ours = MultiHeadAttention(H * D, H)
    peer = nn.MultiheadAttention(H * D, H, batch_first=True)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        peer.out_proj.weight.copy_(ours.o_proj.weight)
    x = torch.randn(B, T, H * D, requires_grad=True)
    hidden = None if mask is None else ~mask.dense(T)

    def step(module: nn.Module, forward: Callable[[], Tensor]) -> None:
        out = forward()
        module.zero_grad(set_to_none=True)
        x.grad = None
        out.sum().backward()

    how: dict[str, Any] = {"attn_mask": hidden, "is_causal": hidden is not None, "need_weights": False}
    return (
        name,
        1.0,
        lambda: step(ours, lambda: ours(x, mask=mask)),
        lambda: step(peer, lambda: peer(x, x, x, **how)[0]),
    )


def _start(name: str, bound: float, ours: list[str]) -> Sides:
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    return name, bound, partial(run, [sys.executable, *ours]), partial(run, [sys.executable, "-c", "import torch"])


def _load(place: Path) -> Sides:
    """Until every page of the weights has been touched, against the plain bytes of their file."""
    sizes = {"d_model": 576, "n_heads": 9, "n_kv_heads": 3, "n_layers": 30, "d_ff": 1536, "vocab_size": 49152}
    parts = {"norm": RMSNorm(), "activation": SwiGLU(), "positions": Rotary(), "bias": False, "tie_embeddings": True}
    with torch.device("meta"):
        model = DecoderConfig(**sizes, **parts).build()  # type: ignore[arg-type]
    convert.export_third_party(model.to_empty(device="cpu"), place)

    def touch() -> None:
        for weight in checkpoint.load_third_party(place).parameters():
            weight.view(-1)[::512].sum()

    name = "loading a model of 135 million weights / reading its file"
    return name, 1.3, touch, (place / "model.safetensors").read_bytes
