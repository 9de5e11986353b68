"""Steady-state decode steps over a grid of batch sizes and contexts.

A step of clearhead is the difference of two calls of `generate` with different numbers of new ids, so prefill and
start-up cancel. The limit is the time in which the device's memory delivers the parameters and keys of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch

from benchmarks.decoding import probe
from benchmarks.decoding.models import BATCHES, MODELS, build, config_of, key_bytes, parameter_bytes
from benchmarks.decoding.options import Options
from benchmarks.engine_decode import transformers_gpt2
from benchmarks.timed import Job, Timing, add_times, describe_error, synchronize
from clearhead.errors import MissingDependencyError
from clearhead.generation import generate
from clearhead.models import EncoderDecoderConfig

H200_BANDWIDTH = 4.0e12  # bytes/s; of another device it is measured
SHORT, LONG = 16, 80  # new ids of the two calls
MAX_SLOWDOWN_OF_SMALLER = 1.02  # a step with a larger batch over one with a smaller; noise of the measurement
# transformers compiles each of its points for about half a minute.
TRANSFORMERS_POINTS = (("Llama 1.1B", 8, 128), ("GPT-2 124M", 8, 128), ("Llama 1.1B", 1, 128), ("Llama 1.1B", 8, 2000))


def jobs(options: Options) -> Iterator[Job]:
    """Return one job for each model, context and batch size, the most important first."""
    for name, batch, context in points(options):
        row = Timing(section="steps", name=name, sizes={"batch": batch, "context": context})
        yield Job(row, partial(_measure, options, name, batch, context))


def torch_jobs(options: Options) -> Iterator[Job]:
    """Return one job for each point that is compared with the probe in plain torch."""
    for name, batch, context in points(options):
        if probe.unsupported_reason(config_of(name, smoke=options.smoke)) is None:
            row = Timing(section="torch", name=name, sizes={"batch": batch, "context": context})
            ahead = (partial(probe.run_once, options, name, min(batch, 2)),)
            yield Job(row, partial(_measure_torch, options, name, batch, context), ahead)


def points(options: Options) -> list[tuple[str, int, int]]:
    """Return model, batch size and context of all points: first those with targets, and a few of every model."""
    selected = [
        (name, batch, context)
        for name, model in MODELS.items()
        if options.selects(name) and options.name_filter in name
        for context in options.contexts or ((16,) if options.smoke else model.contexts)
        for batch in options.batches or ((1, 3) if options.smoke else BATCHES)
    ]
    return sorted(selected, key=_tier)


def _tier(point: tuple[str, int, int]) -> int:
    """Return the rank of a point: 0 and 1 cover the grid coarsely."""
    name, batch, context = point
    if name in ("Llama 1.1B", "GPT-2 124M") and context <= 2000:
        return 0 if batch in BATCHES[:8] else 2
    if context > 128:
        return 1 if name == "Llama 1.1B" and batch * context <= 64_000 and batch in (1, 8) else 3
    return 1 if batch in BATCHES[:3] else 3


def is_coarse(name: str, sizes: dict[str, int]) -> bool:
    """Return whether a point belongs to the coarse grid, which is measured first."""
    return _tier((name, sizes["batch"], sizes["context"])) <= 1


def transformers_jobs(options: Options) -> Iterator[Job]:
    """Return one job for each point that is compared with transformers."""
    for name, batch, context in TRANSFORMERS_POINTS:
        if options.selects(name) and options.name_filter in name:
            context = 16 if options.smoke else context
            row = Timing(section="transformers", name=name, sizes={"batch": batch, "context": context})
            yield Job(row, partial(_measure_transformers, options, name, batch, context))


def _measure(options: Options, name: str, batch: int, context: int, row: Timing) -> None:
    """Measure one point of the grid."""
    if batch * context > options.max_prefill:
        row.notes["row"] = f"not measured: {batch * context:,} prompt tokens, more than {options.max_prefill:,}"
        return
    fraction = MODELS[name].fractions(batch)
    row.targets = {"clearhead / limit": None if fraction is None else 1 / fraction}
    add_limit(row, options, name, batch, context)
    add_times(row, "clearhead", _clearhead(options, name, batch, context))
    row.facts["fraction of the limit"] = row.times["limit"] / row.times["clearhead"]
    row.facts["tokens/s"] = 1e3 * batch / row.times["clearhead"]


def _measure_torch(options: Options, name: str, batch: int, context: int, row: Timing) -> None:
    """Compare one point with the probe in plain torch."""
    row.targets = {"clearhead / torch": 1.0}
    if batch * context > options.max_prefill:
        row.notes["row"] = f"not measured: {batch * context:,} prompt tokens, more than {options.max_prefill:,}"
        return
    sizes = (options, name, batch, context)
    _measure_contenders(row, {"clearhead": partial(_clearhead, *sizes), "torch": partial(probe.step_seconds, *sizes)})


def _measure_transformers(options: Options, name: str, batch: int, context: int, row: Timing) -> None:
    """Compare one point with transformers."""
    row.targets = {"clearhead / transformers": 0.5}
    sizes = (options, name, batch, context)
    _measure_contenders(row, {"clearhead": partial(_clearhead, *sizes), "transformers": partial(_transformers, *sizes)})


def _measure_contenders(row: Timing, measures: dict[str, Callable[[], list[float]]]) -> None:
    """Add the times of all implementations, and notes for those that fail."""
    for name, measure in measures.items():
        try:
            add_times(row, name, measure())
        except Exception as error:  # peers and compilers may raise anything; the row is kept
            row.notes[name] = describe_error(error)


def add_limit(row: Timing, options: Options, name: str, batch: int, context: int) -> None:
    """Add the bytes of a step and the time in which memory delivers them."""
    model, config = build(name, options), config_of(name, smoke=options.smoke)
    row.facts["parameter bytes"] = parameter_bytes(model, config, batch)
    row.facts["key bytes"] = key_bytes(config, options.dtype, batch, context)
    row.facts["measured bytes/s"] = measured_bandwidth(options.device)
    row.facts["bytes/s of the limit"] = limit_bandwidth(options.device)
    n_bytes = row.facts["parameter bytes"] + row.facts["key bytes"]
    row.times["limit"] = 1e3 * n_bytes / row.facts["bytes/s of the limit"]


def limit_bandwidth(device: str) -> float:
    """Return the bytes/s of the limit: 4.0 TB/s for an H200, else the measured ones."""
    is_h200 = torch.device(device).type == "cuda" and "H200" in torch.cuda.get_device_name()
    return H200_BANDWIDTH if is_h200 else measured_bandwidth(device)


@lru_cache
def measured_bandwidth(device: str) -> float:
    """Return the bytes/s of a copy, bytes read and written."""
    source = torch.ones(1 << (30 if torch.device(device).type == "cuda" else 25), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / min(times)


# ---------------------------------------------------------------------- clearhead and transformers


def prompts(options: Options, vocab_size: int, batch: int, length: int) -> torch.Tensor:
    """Draw random prompts, (B, T)."""
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(vocab_size, (batch, length), generator=generator).to(options.device)


def difference(generate_ids: Callable[[int], object], options: Options) -> list[float]:
    """Return the seconds per step of several pairs of a short and a long generation, after two warm-ups of each."""
    short, long = (2, 4) if options.smoke else (SHORT, LONG)

    def seconds(n: int) -> float:
        synchronize(options.device)
        start = time.perf_counter()
        generate_ids(n)
        synchronize(options.device)
        return time.perf_counter() - start

    start = time.perf_counter()
    for n in (short, long):
        generate_ids(n)
    if time.perf_counter() - start < 5 * options.seconds:  # else the calls are long, and later ones as long
        for n in (short, long):
            generate_ids(n)
    shorts, longs = [seconds(short)], [seconds(long)]
    while sum(shorts) + sum(longs) < (10 if len(longs) < 3 else 1) * options.seconds and len(longs) < 15:
        shorts.append(seconds(short))
        longs.append(seconds(long))
    if options.smoke:
        return [longer / long for longer in longs]  # too short for a difference
    # Interference only adds time. It would be part of the difference, so the fastest short call is subtracted.
    differences = [longer - min(shorts) for longer in sorted(longs)[: (len(longs) + 1) // 2]]
    if min(differences) <= 0:
        raise ArithmeticError(f"{long} new ids took no longer than {short}; measure for a longer time")
    return [seconds_more / (long - short) for seconds_more in differences]


@cache
def _clearhead(options: Options, name: str, batch: int, context: int) -> list[float]:
    """Return the seconds of a step of `generate`; each point is measured once in a run."""
    model, config = build(name, options), config_of(name, smoke=options.smoke)
    ids = prompts(options, config.vocab_size, batch, context)
    start: dict[str, Any] = {"decoder_start_ids": 1} if isinstance(config, EncoderDecoderConfig) else {}
    return difference(lambda n: generate(model, ids, max_new_tokens=n, **start), options)


def _transformers(options: Options, name: str, batch: int, context: int) -> list[float]:
    """Return the seconds of a step of transformers with a static cache.

    The cache has the same size in both calls; a criterion ends the short one early.
    """
    model = _transformers_model(options, name)
    ids = prompts(options, model.config.vocab_size, batch, context)
    longest = 4 if options.smoke else LONG
    fixed: dict[str, Any] = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False}
    fixed |= {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    fixed |= {"cache_implementation": "static"} if options.is_gpu else {}

    def run(n: int) -> None:
        def is_done(all_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((batch,), all_ids.shape[1] >= context + n, device=all_ids.device)

        model.generate(ids, stopping_criteria=[is_done], **fixed)

    return difference(run, options)


def _transformers_model(options: Options, name: str) -> Any:
    """Build the same model with transformers, with random parameters."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingDependencyError(f"the baseline needs transformers, which cannot be imported: {error}") from error

    config: Any = config_of(name, smoke=options.smoke)
    with torch.device(options.device):
        if name == "GPT-2 124M":
            model: Any = transformers_gpt2(config, n_positions=config.max_len)
        else:
            sizes = {"hidden_size": config.d_model, "intermediate_size": config.ff_width}
            sizes |= {"num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads}
            sizes |= {"num_key_value_heads": config.kv_heads, "max_position_embeddings": config.max_len}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=config.vocab_size, **sizes))
    return model.to(options.dtype).eval()


# ---------------------------------------------------------------------- monotonicity


def monotonic_rows(rows: Sequence[Timing]) -> Iterable[Timing]:
    """Return a row for each model and context: the batch size that is slowest relative to a larger one."""
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row.section == "steps" and "clearhead" in row.times:
            group = groups.setdefault((row.name, row.sizes["context"]), {})
            group[row.sizes["batch"]] = row.times["clearhead"]
    for (name, context), times in groups.items():
        pairs = [(small, large) for small in times for large in times if small < large]
        if not pairs:
            continue
        small, large = max(pairs, key=lambda pair: times[pair[0]] / times[pair[1]])
        result = Timing(section="monotonic", name=name, sizes={"context": context})
        result.times = {"batch": times[small], "larger batch": times[large]}
        result.targets = {"batch / larger batch": MAX_SLOWDOWN_OF_SMALLER}
        result.facts = {"batch": small, "larger batch": large}
        yield result
