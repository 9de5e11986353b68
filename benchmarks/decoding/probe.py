"""A decode step in plain torch, as a peer: compiled layers, a static cache and one CUDA graph.

Attention is either scaled_dot_product_attention or two matrix products; the faster one counts.

    B batch   M model width   H heads   K key/value heads   G = H / K   S size of the cache   D head dim
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decoding.models import config_of
from benchmarks.decoding.options import Options
from benchmarks.timed import synchronize
from clearhead.models import DecoderConfig
from clearhead.nn import LayerNorm, PreNorm, SwiGLU
from clearhead.nn.positions import Rotary

Parameters = dict[str, Tensor]
STEPS = 32  # replayed after one another


def unsupported_reason(config: Any) -> str | None:
    """Return why the probe has no such model, or None."""
    if not isinstance(config, DecoderConfig):
        return "the probe is a decoder"
    if config.experts is not None or config.residual != PreNorm() or config.layer_masks:
        return "the probe has pre-norm blocks with one feed-forward and full attention"
    return None


class Probe:
    """A decoder with random parameters that makes one step per call.

    Args:
        config: Sizes; pre-norm blocks with LayerNorm or RMSNorm, an MLP or SwiGLU, rotary or learned positions.
        options: Device and dtype.
        batch: Batch size.
        context: Number of tokens in the cache before the first step.
        attention: "sdpa" or "matmul".
    """

    def __init__(self, config: DecoderConfig, options: Options, batch: int, context: int, attention: str) -> None:
        self.config = config
        self.attention = attention
        self.gated = isinstance(config.activation, SwiGLU)
        place: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        M, K, D = config.d_model, config.kv_heads, config.head_width
        V, F_, S = config.vocab_size, config.ff_width, -(-(context + STEPS + 1) // 64) * 64
        shapes = {"qkv": ((config.n_heads + 2 * K) * D, M), "o": (M, config.n_heads * D), "norm1": (M,), "norm2": (M,)}
        shapes |= {"up": ((1 + self.gated) * F_, M), "down": (M, F_), "q_norm": (D,), "k_norm": (D,)}

        def layer() -> Parameters:
            return {name: 0.02 * torch.randn(shape, **place) for name, shape in shapes.items()}

        self.layers = [layer() for _ in range(config.n_layers)]
        self.embedding, self.head = (0.02 * torch.randn(V, M, **place) for _ in range(2))
        self.final_norm = torch.ones(M, **place)
        self.table = torch.randn(S, M if config.positions.kind == "added" else 2 * D, **place)  # positions, or cos, sin
        self.caches = [torch.randn(2, batch, K, S, D, **place) for _ in range(config.n_layers)]
        self.start = context
        self.index = torch.full((1,), context, device=options.device)
        self.ids = torch.zeros(batch, dtype=torch.int64, device=options.device)
        self.columns = torch.arange(S, device=options.device)
        self.layer_step: Any = self._layer
        if options.is_gpu:
            self.layer_step = torch.compile(self._layer, dynamic=True, fullgraph=True)

    def reset(self) -> None:
        """Return to the first step."""
        self.index.fill_(self.start)

    @torch.no_grad()
    def step(self) -> None:
        """Append one token per sequence."""
        row = self.table.index_select(0, self.index)  # (1, M) or (1, 2 D)
        visible = self.columns <= self.index
        x = self.embedding[self.ids]  # (B, M)
        if self.config.positions.kind == "added":
            x = x + row
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = self.layer_step(x, layer, cache, row, visible, self.index)
        self.ids.copy_((self._norm(x, self.final_norm) @ self.head.T).argmax(-1))
        self.index += 1

    def _layer(
        self, x: Tensor, layer: Parameters, cache: Tensor, row: Tensor, visible: Tensor, index: Tensor
    ) -> Tensor:
        """Run one block on x (B, M) and write its keys and values to the cache (2, B, K, S, D)."""
        B, K, D = len(x), self.config.kv_heads, self.config.head_width
        qkv = (self._norm(x, layer["norm1"]) @ layer["qkv"].T).view(B, -1, D)
        q, k, v = qkv.split((self.config.n_heads, K, K), 1)  # (B, H, D), (B, K, D), (B, K, D)
        if self.config.qk_norm is not None:
            q, k = F.rms_norm(q, (D,), layer["q_norm"]), F.rms_norm(k, (D,), layer["k_norm"])
        if isinstance(self.config.positions, Rotary):
            q, k = rotate(q, row), rotate(k, row)
        cache[0].index_copy_(2, index, k[:, :, None])
        cache[1].index_copy_(2, index, v[:, :, None])
        heads = self._attend(q.reshape(B, K, -1, D), cache[0], cache[1], visible)
        x = x + heads.reshape(B, -1) @ layer["o"].T
        hidden = self._norm(x, layer["norm2"]) @ layer["up"].T
        if self.gated:
            gate, up = hidden.chunk(2, -1)
            return x + (F.silu(gate) * up) @ layer["down"].T
        return x + F.gelu(hidden, approximate="tanh") @ layer["down"].T

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Return the attention of q (B, K, G, D) to the visible keys of the cache, (B, K, G, D)."""
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible.expand(*q.shape[:3], len(visible)))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        return scores.masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype) @ v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.config.norm, LayerNorm):
            return F.layer_norm(x, x.shape[-1:], weight)
        return F.rms_norm(x, x.shape[-1:], weight)


def rotate(x: Tensor, row: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, H, D), given cos and sin of the position, (1, 2 D)."""
    cos, sin = row[0].chunk(2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def step_seconds(options: Options, name: str, batch: int, context: int) -> list[float]:
    """Return the seconds of a decode step of the faster variant, several times."""
    config = config_of(name, smoke=options.smoke)
    assert isinstance(config, DecoderConfig)
    with torch._dynamo.config.patch(recompile_limit=64):  # sizes are dynamic, models and batch size 1 are not
        variants = [_seconds(Probe(config, options, batch, context, kind), options) for kind in ("sdpa", "matmul")]
    return min(variants, key=min)


def run_once(options: Options, name: str, batch: int) -> None:
    """Compile the layers of a model, in a worker."""
    step_seconds(options, name, batch, 128)


def _seconds(probe: Probe, options: Options) -> list[float]:
    """Return the seconds of a step, several times."""
    step = _captured(probe) if options.is_gpu else probe.step
    times: list[float] = []
    n_steps = 2 if options.smoke else STEPS
    while len(times) < 3 or (sum(times) * n_steps < options.seconds / 4 and len(times) < 20):
        probe.reset()
        synchronize(options.device)
        start = time.perf_counter()
        for _ in range(n_steps):
            step()
        synchronize(options.device)
        times.append((time.perf_counter() - start) / n_steps)
    return times[1:]


def _captured(probe: Probe) -> Callable[[], None]:
    """Return a step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            probe.step()
            probe.reset()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probe.step()
    return graph.replay
