"""`clearhead bench core`: what going through `attend` and `MultiHeadAttention` costs over going without.

The peers are `scaled_dot_product_attention` called directly, and `torch.nn.MultiheadAttention` in training (it is given
`need_weights=False`, its fastest way). Two rows are about starting: a new process that imports clearhead, and one that
translates a sentence, each against one that imports torch. The last is about loading somebody's model.
"""

from __future__ import annotations

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

from clearhead import interop
from clearhead.attention import MultiHeadAttention, attend
from clearhead.bench.results import Comparison, compare
from clearhead.layers import RMSNorm, SwiGLU
from clearhead.masks import Mask, causal, padding
from clearhead.models import DecoderConfig
from clearhead.positions import Rotary

Part = Callable[[int, Callable[[], None]], Comparison]  # of the rounds, and what is called after each
SHAPE = (4, 8, 512, 64)  # (B, H, T, D)


def measure(repeats: int = 60, on_round: Callable[[int, int], None] = lambda done, total: None) -> list[Comparison]:
    """Every comparison, each `repeats` rounds."""
    parts: tuple[Part, ...] = (
        partial(_attend, "attend, fused / scaled_dot_product_attention", None, {}),
        partial(_attend, "attend, fused, causal() / the same with is_causal", causal(), {"is_causal": True}),
        _padded,
        partial(_train, "MultiHeadAttention, training / nn.MultiheadAttention", None),
        partial(_train, "MultiHeadAttention, training, causal() / nn.MultiheadAttention", causal()),
    )
    both, morning = ["-c", "import torch, clearhead"], ["-m", "clearhead.cli", "translate", "Good morning."]
    starts: tuple[Part, ...] = (
        partial(_start, "a process that imports clearhead / one that imports torch", both, 1.25),
        partial(_start, "clearhead translate 'Good morning.' / a process that imports torch", morning, 4.0),
        _load,
    )
    few = min(repeats, 5)  # a process takes a second or more to start, and varies little
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        on_round(done, repeats * len(parts) + few * len(starts))

    return [part(repeats, tick) for part in parts] + [start(few, tick) for start in starts]


def _attend(name: str, mask: Mask | None, plain: dict[str, Any], repeats: int, tick: Callable[[], None]) -> Comparison:
    q, k, v = _qkv()
    ours = partial(attend, q, k, v, mask, impl="fused")
    peer = partial(F.scaled_dot_product_attention, q, k, v, **plain)
    return compare(name, ours, peer, bound=1.03, repeats=repeats, on_round=tick)


def _padded(repeats: int, tick: Callable[[], None]) -> Comparison:
    B, _, T, _ = SHAPE
    lengths = torch.linspace(T // 2, T, B).long()
    row = (torch.arange(T) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, S)
    name = "attend, fused, padding / the same with a (B, 1, 1, S) mask"
    return _attend(name, padding(lengths), {"attn_mask": row}, repeats, tick)


def _load(repeats: int, tick: Callable[[], None]) -> Comparison:
    """Until every page of the weights has been touched, against the plain bytes of their file."""
    sizes = {"d_model": 576, "n_heads": 9, "n_kv_heads": 3, "n_layers": 30, "d_ff": 1536, "vocab_size": 49152}
    parts = {"norm": RMSNorm(), "activation": SwiGLU(), "positions": Rotary(), "bias": False, "tied": True}
    with torch.device("meta"):
        model = DecoderConfig(**sizes, **parts).build()  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as place:
        interop.export(model.to_empty(device="cpu"), Path(place, "model"))
        return compare(
            "loading a model of 135 million weights / reading its file",
            lambda: [weight.view(-1)[::512].sum() for weight in interop.load(Path(place, "model")).parameters()],
            lambda: Path(place, "model", "model.safetensors").read_bytes(),
            bound=1.3,
            repeats=repeats,
            on_round=tick,
        )


def _start(name: str, ours: list[str], bound: float, repeats: int, tick: Callable[[], None]) -> Comparison:
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    begin, plain = partial(run, [sys.executable, *ours]), partial(run, [sys.executable, "-c", "import torch"])
    return compare(name, begin, plain, bound=bound, repeats=repeats, on_round=tick)


def _train(name: str, mask: Mask | None, repeats: int, tick: Callable[[], None]) -> Comparison:
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

    def step_ours() -> None:
        _backward(ours(x, mask=mask), ours, x)

    def step_peer() -> None:
        out, _ = peer(x, x, x, attn_mask=hidden, is_causal=hidden is not None, need_weights=False)
        _backward(out, peer, x)

    return compare(name, step_ours, step_peer, bound=1.0, repeats=repeats, on_round=tick)


def _backward(out: Tensor, module: nn.Module, x: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    x.grad = None
    out.sum().backward()


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return q, k, v
