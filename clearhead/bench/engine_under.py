"""A model of transformers under a sparse mask, trained at a length where attention is most of the work: with its own
dense causal attention, with FlexAttention under the same mask, and under ours. Its layers are compiled, each by itself,
in all three: otherwise most of our time goes to its own norms and turns, one small operator after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention import under
from clearhead.bench.engine import Maker, Row, Setting, by_rate, seconds_of
from clearhead.bench.sparse_flex import flex_way
from clearhead.masks import causal, every, window

__all__ = ["ON_GPU"]

_WANTED = 4.0


def train_under(setting: Setting) -> Iterator[Row]:
    """One row of 65,536 tokens through 16 Llama layers of width 1,024, in bfloat16, forward and backward."""
    T, wide, layers = (64, 32, 2) if setting.trial else (65_536, 1024, 16)
    mask = causal() & (window(T // 64, 0) | every(max(T // 256, 4)))
    model = _llama(setting, wide, layers)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(setting.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    # One after the other: what a block compiles, it compiles once.
    seconds = seconds_of(setting, step)
    with under(model, mask):
        ours = seconds_of(setting, step)[0]
    if not setting.trial:
        flex = flex_way(mask, T, torch.device(setting.device))
        seconds += seconds_of(setting, _in_place(model, flex, step))
    work = f"train a Llama of {layers} layers at {T:,} tokens under {mask}"
    for name, taken in zip(("its own dense attention", "FlexAttention"), seconds, strict=False):
        yield by_rate(work, "tokens/s", T / ours, name, T / taken, _WANTED)


def _llama(setting: Setting, wide: int, layers: int) -> Any:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": wide, "intermediate_size": 11 * wide // 4, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": wide // 64 or 2, "vocab_size": 211 if setting.trial else 32_000}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=1 << 17, use_cache=False)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: Any = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    for layer in [] if setting.trial else model.model.layers:
        layer.forward = torch.compile(layer.forward)
    return model.to(torch.bfloat16).train()


def _in_place(
    model: Any, way: Callable[[Tensor, Tensor, Tensor], Tensor], step: Callable[[], None]
) -> Callable[[], None]:
    """The step with another function for attention, by the library's own interface."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return way(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("bench-flex", attention)
    AttentionMaskInterface.register("bench-flex", lambda **_: None)

    def run() -> None:
        model.set_attn_implementation("bench-flex")
        try:
            step()
        finally:
            model.set_attn_implementation("sdpa")

    return run


ON_GPU: tuple[Maker, ...] = (train_under,)
