"""Training rows of `python -m benchmarks engine`: GPT-2 and the original base Transformer, compared with baselines.

Other rows compare the losses with and without compilation, and train a transformers model under a sparse mask at a
length where attention is most of the work. Both sides train the same sizes in bfloat16 autocast with a fused AdamW and
clipped gradients, compiled. clearhead uses a `Trainer` with the settings of `clearhead train`; its speed is read from
the log.
"""

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

from benchmarks.engine import Benchmark, Row, Setting, by_rate, by_time, seconds_of
from benchmarks.engine_decode import transformers_gpt2
from benchmarks.sparse_flex import flex_attention_under
from clearhead import data
from clearhead.data import FixedSize, LanguageModeling, WindowSplit
from clearhead.masks import causal, every, window
from clearhead.models import DecoderConfig, presets
from clearhead.nn import apply_mask
from clearhead.training import Constant, Progress, TrainConfig, Trainer

_WARMUP_STEPS, _STEPS = 20, 60  # warm-up steps (compilation, graph capture, clocks) are not timed
_GPT2_TARGET, _GPT2_RATE, _GPT2_MEMORY = 1.2, 530_000, 1 / 0.65
_BASE_TARGET, _SPARSE_TARGET = 2.0, 4.0


# ---------------------------------------------------------------------- GPT-2


Baseline = tuple[nn.Module, Callable[[], Tensor]]  # a module, and a function that returns its loss


def gpt2_baseline(setting: Setting, config: Any, batch: Tensor) -> Baseline:
    """Return transformers' GPT-2 without dropout, and a function that returns its loss."""
    dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers_gpt2(config, n_positions=config.max_len, use_cache=False, **dropout)
    model = model.to(setting.device).train()
    compiled = model if setting.smoke else torch.compile(model)
    return model, lambda: compiled(input_ids=batch, labels=batch).loss


def train_gpt2(setting: Setting, baseline: Callable[[Setting, Any, Tensor], Baseline] = gpt2_baseline) -> Iterator[Row]:
    """Train GPT-2 on 64 rows of 1,024 random tokens, without dropout."""
    rows, context = (4, 16) if setting.smoke else (64, 1024)
    config = presets.gpt2().replace(dropout=0.0, attention_dropout=0.0)
    if setting.smoke:
        config = config.replace(n_layers=1, d_model=48, vocab_size=211)
    ids = torch.randint(config.vocab_size, (rows * context * 9,), generator=torch.Generator().manual_seed(0))
    train = WindowSplit(ids, context=context, windows=data.RandomWindows())
    validation = WindowSplit(ids[: 2 * context + 1], context=context, windows=data.ConsecutiveWindows())
    task = LanguageModeling(train, validation, data.CharTokenizer("ab"), data.RowReport(source="random", n_rows=1))
    rate, memory = _train(setting, config.build(), task, batch=FixedSize(rows))
    batch = ids[: rows * context].view(rows, context).to(setting.device)
    seconds, baseline_memory = _train_baseline(setting, *baseline(setting, config, batch))
    name = f"train GPT-2 124M, {rows} × {context:,}"
    yield by_rate(name, "tokens/s", rate, "transformers, compiled", batch.numel() / seconds, _GPT2_TARGET)
    yield by_rate(name, "tokens/s", rate, "goal", _GPT2_RATE, 1.0)
    yield by_time(f"{name}, peak memory", "GiB", memory, "transformers, compiled", baseline_memory, _GPT2_MEMORY)


# ---------------------------------------------------------------------- the original base Transformer


def train_base(setting: Setting) -> Iterator[Row]:
    """Train on sentence pairs: clearhead packs them into rows of 128, the baseline pads them."""
    if setting.data is None:
        return
    longest, width = 32, 128
    task = data.TranslationTask.load(setting.data, vocab_size=8000, max_tokens=longest)
    config = presets.transformer_base()
    if setting.smoke:
        config = config.replace(n_encoder_layers=1, n_decoder_layers=1, d_model=48, d_ff=64, vocab_size=8000)
    rows = 4 if setting.smoke else 128
    lengths = task.train.lengths()
    target_share = float(lengths[:, 1].sum() / lengths.sum())
    rate, _ = _train(setting, config.build(), task, batch=data.SequencePacking(rows, width), label_smoothing=0.1)
    n_pairs = rows * width // longest
    batch = next(iter(data.Batches(task.train.to(setting.device), FixedSize(n_pairs, multiple=longest))))
    seconds, _ = _train_baseline(setting, *_torch_base(setting, config, batch))
    baseline_rate = batch.n_labels / seconds
    padding = 1 - batch.n_labels / batch.labels.numel()
    name = "train the original base Transformer, English to Spanish, packed"
    baseline = f"nn.Transformer, compiled, {padding:.0%} padding"
    yield by_rate(name, "target tokens/s", rate * target_share, baseline, baseline_rate, _BASE_TARGET)


def _torch_base(setting: Setting, config: Any, batch: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return torch's Transformer, and a function that returns its loss."""
    model = _TorchBase(config).to(setting.device).train()
    compiled = model if setting.smoke else torch.compile(model)

    def loss() -> Tensor:
        logits = compiled(batch.source, batch.source_lengths, batch.target)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none", label_smoothing=0.1)
        return (losses * batch.weights.flatten()).sum() / batch.n_labels

    return model, loss


class _TorchBase(nn.Module):
    """`nn.Transformer` with one embedding for source, target and logits."""

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
        source_x, target_x = (self.embedding(ids) + self.positions[: ids.shape[1]] for ids in (source, target))
        masks = {"tgt_mask": later, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        x = self.transformer(source_x, target_x, tgt_is_causal=True, **masks)
        return F.linear(x, self.embedding.weight)


# ---------------------------------------------------------------------- losses with and without compilation


def train_losses(setting: Setting) -> Iterator[Row]:
    """Compare the losses of 200 steps with and without compilation and chunked loss, and with another seed.

    The implementations must differ less than the seeds.
    """
    steps = 3 if setting.smoke else 200
    task = LanguageModeling.load(argparse.__file__, context=64, vocab_size=600)
    config = DecoderConfig(vocab_size=task.tokenizer.vocab_size, max_len=64, d_model=128, n_layers=4, n_heads=4)

    def losses(seed: int, *, eager: bool) -> Tensor:
        torch.manual_seed(seed)
        model = config.build()
        settings = _settings(setting, steps, 1, batch=FixedSize(32), seed=seed)
        config_of_run = settings.replace(compile=settings.compile and not eager)
        trained = _LogitsOnly(model) if eager else model
        return torch.tensor([row["loss"] for row in _run(trained, task, config_of_run).rows])

    compiled, eager, other_seed = losses(0, eager=False), losses(0, eager=True), losses(1, eager=False)
    difference = float((compiled - eager).abs().mean())
    seed_difference = float((compiled - other_seed).abs().mean())
    name = f"loss difference over {steps} steps, compiled and eager"
    yield by_time(name, "nats", difference, "difference of two seeds", seed_difference, 1.0)


class _LogitsOnly(nn.Module):
    """Wraps a model so that it only returns logits, without a chunked loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


# ---------------------------------------------------------------------- under a sparse mask


def train_sparse(setting: Setting) -> Iterator[Row]:
    """Run forward and backward of 16 Llama layers of width 1,024 on one row of 65,536 tokens, in bfloat16.

    Attention is dense and causal, FlexAttention under a sparse mask, and clearhead's under the same mask. Each layer is
    compiled in all three cases: otherwise small kernels of norms and rotary embeddings would take most of the time.
    """
    T, d_model, n_layers = (64, 32, 2) if setting.smoke else (65_536, 1024, 16)
    mask = causal() & (window(T // 64, 0) | every(max(T // 256, 4)))
    model = _llama(setting, d_model, n_layers)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(setting.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    # Not alternately, because the layers are compiled again after every change of the attention function.
    seconds = seconds_of(setting, step)
    with apply_mask(model, mask):
        sparse_seconds = seconds_of(setting, step)[0]
    if not setting.smoke:
        _set_attention(model, flex_attention_under(mask, T, torch.device(setting.device)))
        seconds += seconds_of(setting, step)
    name = f"train a Llama of {n_layers} layers at {T:,} tokens under {mask}"
    for baseline, baseline_seconds in zip(("dense attention", "FlexAttention"), seconds, strict=False):
        yield by_rate(name, "tokens/s", T / sparse_seconds, baseline, T / baseline_seconds, _SPARSE_TARGET)


def _llama(setting: Setting, d_model: int, n_layers: int) -> Any:
    """Build a Llama of transformers whose layers are compiled."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": d_model,
        "intermediate_size": 11 * d_model // 4,
        "num_hidden_layers": n_layers,
    }
    sizes |= {"num_attention_heads": d_model // 64 or 2, "vocab_size": 211 if setting.smoke else 32_000}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=1 << 17, use_cache=False)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: Any = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    for layer in [] if setting.smoke else model.model.layers:
        layer.forward = torch.compile(layer.forward)
    return model.to(torch.bfloat16).train()


def _set_attention(model: Any, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Replace the attention function of a transformers model through `AttentionInterface`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return attend(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("bench-flex", attention)
    AttentionMaskInterface.register("bench-flex", lambda **_: None)
    model.set_attn_implementation("bench-flex")


# ---------------------------------------------------------------------- training loops


@dataclass
class _Rates(Progress):
    """Collects log rows; `rate` is the tokens per second after the warm-up."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)

    def on_log(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    @property
    def rate(self) -> float:
        """Tokens per second between the first and the last log row."""
        first, last = self.rows[0], self.rows[-1]
        return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])


def _train(setting: Setting, model: nn.Module, task: data.Task, **settings: Any) -> tuple[float, float]:
    """Train with `Trainer`; return tokens per second and peak memory in GiB."""
    _clean(setting)
    warmup, steps = (2, 4) if setting.smoke else (_WARMUP_STEPS, _STEPS)
    return _run(model, task, _settings(setting, steps, warmup, **settings)).rate, _peak(setting)


def _settings(setting: Setting, steps: int, log_every: int, **settings: Any) -> TrainConfig:
    """Return the training configuration."""
    intervals: dict[str, Any] = {"steps": steps, "log_every": log_every, "eval_every": 10 * steps}
    device_options: dict[str, Any] = {"compile": not setting.smoke, "device": setting.device}
    return TrainConfig(**intervals, schedule=Constant(1e-4), precision="bf16", **device_options, **settings)


def _run(model: nn.Module, task: data.Task, config: TrainConfig) -> _Rates:
    """Train in a temporary folder and return the logged rates."""
    rates = _Rates()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the temporary folder lacks a configuration
        Trainer(model, task, config, Path(folder), progress=rates).run()
    return rates


def _train_baseline(setting: Setting, model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, float]:
    """Train on one batch in a minimal loop; return seconds per step and peak memory in GiB."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            total = loss()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    n = 1 if setting.smoke else 10

    def several_steps() -> None:
        for _ in range(n):
            step()

    several_steps()
    seconds, memory = seconds_of(setting, several_steps)[0] / n, _peak(setting)
    _clean(setting)
    return seconds, memory


def _clean(setting: Setting) -> None:
    """Free memory and compiled graphs, and reset the peak."""
    gc.collect()
    torch._dynamo.reset()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(setting: Setting) -> float:
    """Return the peak GPU memory in GiB, or 1 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else 1.0


ON_GPU: dict[str, Benchmark] = {run.__name__: run for run in (train_gpt2, train_base, train_losses, train_sparse)}
