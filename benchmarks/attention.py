"""Overhead of `attend` and `MultiHeadAttention`: `python -m benchmarks attention`.

The baselines are direct calls of `scaled_dot_product_attention`, and `torch.nn.MultiheadAttention` in training (with
`need_weights=False`, which is its fastest mode). Two rows compare start-up times: a new process that imports clearhead,
and one that translates a sentence, with a process that imports torch. The last row loads a third-party model.
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
Case = tuple[str, float, Call, Call]  # name, target of the ratio, call, baseline
SHAPE = (4, 8, 512, 64)  # (B, H, T, D)


def measure(repeats: int = 60, on_round: Callable[[int, int], None] = lambda done, total: None) -> list[Comparison]:
    """Return all comparisons, of `repeats` rounds each."""
    import_both, translate = ["-c", "import torch, clearhead"], ["-m", "clearhead.cli", "translate", "Good morning."]
    few = min(repeats, 5)  # starting a process takes a second or more, and varies little
    with tempfile.TemporaryDirectory() as folder:
        cases: tuple[tuple[int, Callable[[], Case]], ...] = (
            (repeats, partial(_attend, "attend, sdpa / scaled_dot_product_attention", None)),
            (repeats, partial(_attend, "attend, sdpa, causal() / the same with is_causal", causal(), is_causal=True)),
            (repeats, _padded),
            (repeats, partial(_train, "MultiHeadAttention, training / nn.MultiheadAttention", None)),
            (repeats, partial(_train, "MultiHeadAttention, training, causal() / nn.MultiheadAttention", causal())),
            (few, partial(_start, "a process that imports clearhead / one that imports torch", 1.25, import_both)),
            (few, partial(_start, "clearhead translate 'Good morning.' / importing torch", 4.0, translate)),
            (few, partial(_load, Path(folder, "model"))),
        )
        done, total = itertools.count(1), sum(rounds for rounds, _ in cases)
        comparisons = []
        for rounds, make_case in cases:
            name, target, call, baseline = make_case()
            options: dict[str, Any] = {"repeats": rounds, "on_round": lambda: on_round(next(done), total)}
            comparisons.append(compare(name, call, baseline, target=target, **options))
    return comparisons


def _attend(name: str, mask: Mask | None, **sdpa_options: Any) -> Case:
    """Compare `attend` with `scaled_dot_product_attention`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    call = partial(attend, q, k, v, mask, impl="sdpa")
    return name, 1.03, call, partial(F.scaled_dot_product_attention, q, k, v, **sdpa_options)


def _padded() -> Case:
    """Compare `attend` under a padding mask with a boolean mask."""
    B, _, T, _ = SHAPE
    lengths = torch.linspace(T // 2, T, B).long()
    row = (torch.arange(T) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, S)
    name = "attend, sdpa, padding / the same with a (B, 1, 1, S) mask"
    return _attend(name, padding(lengths), attn_mask=row)


def _train(name: str, mask: Mask | None) -> Case:
    """Compare forward and backward of one layer, with the same parameters in both modules."""
    B, H, T, D = SHAPE
    torch.manual_seed(0)
    layer = MultiHeadAttention(H * D, H)
    baseline = nn.MultiheadAttention(H * D, H, batch_first=True)
    with torch.no_grad():
        baseline.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        baseline.out_proj.weight.copy_(layer.o_proj.weight)
    x = torch.randn(B, T, H * D, requires_grad=True)
    hidden = None if mask is None else ~mask.dense(T)

    def step(module: nn.Module, forward: Callable[[], Tensor]) -> None:
        out = forward()
        module.zero_grad(set_to_none=True)
        x.grad = None
        out.sum().backward()

    options: dict[str, Any] = {"attn_mask": hidden, "is_causal": hidden is not None, "need_weights": False}
    return (
        name,
        1.0,
        lambda: step(layer, lambda: layer(x, mask=mask)),
        lambda: step(baseline, lambda: baseline(x, x, x, **options)[0]),
    )


def _start(name: str, target: float, arguments: list[str]) -> Case:
    """Compare a Python process with one that imports torch."""
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    call = partial(run, [sys.executable, *arguments])
    return name, target, call, partial(run, [sys.executable, "-c", "import torch"])


def _load(folder: Path) -> Case:
    """Compare loading a model and touching all pages of its parameters with reading the bytes of its file."""
    sizes = {"d_model": 576, "n_heads": 9, "n_kv_heads": 3, "n_layers": 30, "d_ff": 1536, "vocab_size": 49152}
    options = {"norm": RMSNorm(), "activation": SwiGLU(), "positions": Rotary(), "bias": False, "tie_embeddings": True}
    with torch.device("meta"):
        model = DecoderConfig(**sizes, **options).build()  # type: ignore[arg-type]
    convert.export_third_party(model.to_empty(device="cpu"), folder)

    def touch() -> None:
        for parameter in checkpoint.load_third_party(folder).parameters():
            parameter.view(-1)[::512].sum()

    name = "loading a model of 135 million parameters / reading its file"
    return name, 1.3, touch, (folder / "model.safetensors").read_bytes
