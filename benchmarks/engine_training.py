"""Training beside its peers: GPT-2 and the 2017 base model through the project's own loop, and what the fast
way changes.

A fourth row trains a model of transformers under a sparse mask, at a length where attention is most of the work.
Both sides train the same sizes in bfloat16 autocast with a fused AdamW and clipped gradients, compiled. Ours is a
`Trainer` with the settings that `clearhead train` has; its speed is read off its log."""

from __future__ import annotations

import argparse
import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engine import Maker, Row, Setting, by_rate, by_time, seconds_of
from benchmarks.engine_decode import transformers_gpt2
from benchmarks.sparse_flex import flex_way
from clearhead import data
from clearhead.data import FixedSize, LanguageModeling, WindowSplit
from clearhead.masks import causal, every, window
from clearhead.models import DecoderConfig, presets
from clearhead.nn import apply_mask
from clearhead.training import Constant, Progress, TrainConfig, Trainer

_WARM, _STEPS = 20, 60  # of which the first are not counted: compiling, recording, clocks
_GPT2_WANTED, _GPT2_RATE, _GPT2_MEMORY = 1.2, 530_000, 1 / 0.65
_BASE_WANTED, _UNDER_WANTED = 2.0, 4.0


# ---------------------------------------------------------------------- GPT-2


def train_gpt2(setting: Setting) -> Iterator[Row]:
    """64 rows of 1,024 random tokens, without dropout."""
    rows, context = (4, 16) if setting.trial else (64, 1024)
    config = presets.gpt2().replace(dropout=0.0, attention_dropout=0.0)
    if setting.trial:
        config = config.replace(n_layers=1, d_model=48, vocab_size=211)
    ids = torch.randint(config.vocab_size, (rows * context * 9,), generator=torch.Generator().manual_seed(0))
    train = WindowSplit(ids, context=context, windows=data.RandomWindows())
    few = WindowSplit(ids[: 2 * context + 1], context=context, windows=data.ConsecutiveWindows())
    task = LanguageModeling(train, few, data.CharTokenizer("ab"), data.Report(source="random", n_rows=1))
    ours, memory = _ours(setting, config.build(), task, batch=FixedSize(rows))
    batch = ids[: rows * context].view(rows, context).to(setting.device)
    peer, peer_memory = _peer(setting, *_transformers_gpt2(setting, config, batch))
    peer = batch.numel() / peer
    work = f"train GPT-2 124M, {rows} × {context:,}"
    yield by_rate(work, "tokens/s", ours, "transformers, compiled", peer, _GPT2_WANTED)
    yield by_rate(work, "tokens/s", ours, "the goal", _GPT2_RATE, 1.0)
    yield by_time(f"{work}, peak memory", "GiB", memory, "transformers, compiled", peer_memory, _GPT2_MEMORY)


def _transformers_gpt2(setting: Setting, config: Any, batch: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers_gpt2(config, n_positions=config.max_len, use_cache=False, **none).to(setting.device).train()
    compiled = model if setting.trial else torch.compile(model)
    return model, lambda: compiled(input_ids=batch, labels=batch).loss


# ---------------------------------------------------------------------- the 2017 base model


def train_base(setting: Setting) -> Iterator[Row]:
    """Sentence pairs as they are: ours end to end in rows of 128, the peer's side by side and padded."""
    if setting.data is None:
        return
    longest, width = 32, 128
    task = data.TranslationTask.load(setting.data, vocab_size=8000, max_tokens=longest)
    config = presets.transformer_base()
    if setting.trial:
        config = config.replace(n_encoder_layers=1, n_decoder_layers=1, d_model=48, d_ff=64, vocab_size=8000)
    rows = 4 if setting.trial else 128
    lengths = task.train.lengths()
    target_share = float(lengths[:, 1].sum() / lengths.sum())
    ours, _ = _ours(setting, config.build(), task, batch=data.SequencePacking(rows, width), label_smoothing=0.1)
    count = rows * width // longest
    batch = next(iter(data.Batches(task.train.to(setting.device), FixedSize(count, multiple=longest))))
    seconds, _ = _peer(setting, *_torch_base(setting, config, batch))
    peer = batch.n_labels / seconds
    padding = 1 - batch.n_labels / batch.labels.numel()
    work = "train the 2017 base model, English to Spanish, packed"
    name = f"nn.Transformer, compiled, {padding:.0%} padding"
    yield by_rate(work, "target tokens/s", ours * target_share, name, peer, _BASE_WANTED)


def _torch_base(setting: Setting, config: Any, batch: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = _TorchBase(config).to(setting.device).train()
    compiled = model if setting.trial else torch.compile(model)

    def loss() -> Tensor:
        logits = compiled(batch.source, batch.source_lengths, batch.target)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none", label_smoothing=0.1)
        return (losses * batch.weights.flatten()).sum() / batch.n_labels

    return model, loss


class _TorchBase(nn.Module):
    """torch's own Transformer with one embedding for both sides and the logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Parameter(torch.zeros(config.max_len, config.d_model), requires_grad=False)
        layers = config.n_encoder_layers, config.n_decoder_layers
        sizes = config.d_model, config.n_heads, *layers, config.d_ff, config.dropout
        self.transformer = nn.Transformer(*sizes, batch_first=True)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        hidden = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=source.device)
        given, wanted = (self.embedding(ids) + self.positions[: ids.shape[1]] for ids in (source, target))
        masks = {"tgt_mask": later, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        x = self.transformer(given, wanted, tgt_is_causal=True, **masks)
        return F.linear(x, self.embedding.weight)


# ---------------------------------------------------------------------- whether the fast way learns the same


def train_curve(setting: Setting) -> Iterator[Row]:
    """The losses of 200 steps by the fast way and by the plain one (no compiler, all logits at once), from one seed,
    and by the fast way from another: the ways must not be further apart than the seeds."""
    steps = 3 if setting.trial else 200
    task = LanguageModeling.load(argparse.__file__, context=64, vocab_size=600)
    config = DecoderConfig(vocab_size=task.tokenizer.vocab_size, max_len=64, d_model=128, n_layers=4, n_heads=4)

    def curve(seed: int, *, plain: bool) -> Tensor:
        torch.manual_seed(seed)
        model = config.build()
        settings = _settings(setting, steps, 1, batch=FixedSize(32), seed=seed)
        how = settings.replace(compile=settings.compile and not plain)
        return torch.tensor([row["loss"] for row in _run(_Plain(model) if plain else model, task, how).rows])

    fast, plain, other = curve(0, plain=False), curve(0, plain=True), curve(1, plain=False)
    ways, seeds = float((fast - plain).abs().mean()), float((fast - other).abs().mean())
    yield by_time(f"losses of {steps} steps, fast and plain, apart", "nats", ways, "two seeds apart", seeds, 1.0)


class _Plain(nn.Module):
    """A model that offers its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


# ---------------------------------------------------------------------- under a sparse mask


def train_under(setting: Setting) -> Iterator[Row]:
    """One row of 65,536 tokens through 16 Llama layers of width 1,024, in bfloat16, forward and backward: with its own
    dense causal attention, with FlexAttention under the same mask, and under ours. The layers are compiled, each by
    itself, in all three: otherwise most of our time goes to its norms and turns, one small operator after the other."""
    T, wide, layers = (64, 32, 2) if setting.trial else (65_536, 1024, 16)
    mask = causal() & (window(T // 64, 0) | every(max(T // 256, 4)))
    model = _llama(setting, wide, layers)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(setting.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    # One after the other: what a block compiles, it compiles once.
    seconds = seconds_of(setting, step)
    with apply_mask(model, mask):
        ours = seconds_of(setting, step)[0]
    if not setting.trial:
        _attend_by(model, flex_way(mask, T, torch.device(setting.device)))
        seconds += seconds_of(setting, step)
    work = f"train a Llama of {layers} layers at {T:,} tokens under {mask}"
    for name, taken in zip(("its own dense attention", "FlexAttention"), seconds, strict=False):
        yield by_rate(work, "tokens/s", T / ours, name, T / taken, _UNDER_WANTED)


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


def _attend_by(model: Any, way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Gives the model another function for attention, by the library's own interface."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return way(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("bench-flex", attention)
    AttentionMaskInterface.register("bench-flex", lambda **_: None)
    model.set_attn_implementation("bench-flex")


# ---------------------------------------------------------------------- the two loops


@dataclass
class _Rates(Progress):
    """Tokens a second between the end of the warm-up and the end."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)

    def on_log(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    @property
    def rate(self) -> float:
        first, last = self.rows[0], self.rows[-1]
        return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])


def _ours(setting: Setting, model: nn.Module, task: data.Task, **settings: Any) -> tuple[float, float]:
    """Tokens a second of the project's loop, and the most memory it held, in GiB."""
    _clean(setting)
    warm, steps = (2, 4) if setting.trial else (_WARM, _STEPS)
    return _run(model, task, _settings(setting, steps, warm, **settings)).rate, _peak(setting)


def _settings(setting: Setting, steps: int, log_every: int, **settings: Any) -> TrainConfig:
    times: dict[str, Any] = {"steps": steps, "log_every": log_every, "eval_every": 10 * steps}
    here: dict[str, Any] = {"compile": not setting.trial, "device": setting.device}
    return TrainConfig(**times, schedule=Constant(1e-4), precision="bf16", **here, **settings)


def _run(model: nn.Module, task: data.Task, config: TrainConfig) -> _Rates:
    rates = _Rates()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the folder, which nobody keeps, lacks a configuration
        Trainer(model, task, config, Path(folder), progress=rates).run()
    return rates


def _peer(setting: Setting, model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds a step of a plain loop over one batch, and the most memory it held, in GiB."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            total = loss()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    n = 1 if setting.trial else 10

    def some() -> None:
        for _ in range(n):
            step()

    some()
    seconds, memory = seconds_of(setting, some)[0] / n, _peak(setting)
    _clean(setting)
    return seconds, memory


def _clean(setting: Setting) -> None:
    gc.collect()
    torch._dynamo.reset()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(setting: Setting) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else 1.0


ON_GPU: dict[str, Maker] = {make.__name__: make for make in (train_gpt2, train_base, train_curve, train_under)}
