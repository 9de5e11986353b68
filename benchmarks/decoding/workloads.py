"""Workloads of `python -m benchmarks decode`: prefill, mixed prompts, sampling and beam search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding.models import ModelConfig, build, build_new, config_of
from benchmarks.decoding.options import Options
from benchmarks.decoding.steps import difference, prompts
from benchmarks.timed import ROW_LIMIT, Contender, Job, Timing, add_times, synchronize, time_contenders
from clearhead.generation import BeamSearch, Generated, Greedy, Sample, Strategy, generate
from clearhead.models import DecoderConfig

LLAMA, GPT2 = "Llama 1.1B", "GPT-2 124M"
BATCHES = (8, 64)
SAMPLE = Sample(temperature=0.8, top_k=50, top_p=0.95, seed=1)
PROMPT_LENGTHS, MAX_NEW, MEAN_NEW = (5, 1500), 300, 150
STOP_ID = 3
RAGGED_BATCHES = 20
MIXED_LIMIT = 240.0  # seconds of the row with mixed prompts


def jobs(options: Options) -> Iterator[Job]:
    """Return the jobs of all workloads."""
    for section, workloads in (
        ("prefill", _prefills),
        ("sampling", _samplings),
        ("mixed", _mixed),
        ("ragged", _ragged),
    ):
        for name in filter(options.selects, (LLAMA, GPT2)):
            for row, measure in workloads(name):
                row.section = section
                if options.name_filter in row.name:
                    yield Job(row, partial(measure, options), limit=MIXED_LIMIT if section == "mixed" else ROW_LIMIT)


Workloads = Iterator[tuple[Timing, Callable[[Options, Timing], None]]]


# ---------------------------------------------------------------------- prefill


def _prefills(name: str) -> Workloads:
    """Yield the prefill of one and of four prompts of 4,096 tokens."""
    for batch, fraction in ((1, 0.5), (4, 0.6)):
        row = Timing(section="", name=f"{name}, prefill", sizes={"batch": batch, "length": 4096})
        row.targets = {"prefill / ceiling": 1 / fraction if name == LLAMA else None}
        yield row, partial(_measure_prefill, name, batch)


def _measure_prefill(name: str, batch: int, options: Options, row: Timing) -> None:
    """Compare a prefill with the time of its FLOPs at the rate of a large matrix product."""
    length = 48 if options.smoke else 4096
    model, config = build(name, options), config_of(name, smoke=options.smoke)
    ids = prompts(options, config.vocab_size, batch, length)
    run = Contender("prefill", lambda step: generate(model, ids, max_new_tokens=1))
    time_contenders(row, [run], seconds=options.seconds, device=options.device)
    flops = batch * prefill_flops(model, config, length)
    row.facts = {"FLOPs": flops, "ceiling, FLOP/s": matrix_rate(options)}
    row.times["ceiling"] = 1e3 * flops / row.facts["ceiling, FLOP/s"]


def prefill_flops(model: Any, config: ModelConfig, length: int) -> float:
    """Return the FLOPs of products with parameters, of causal scores and values, and of one row of logits."""
    assert isinstance(config, DecoderConfig)
    blocks = sum(p.numel() for p in model.blocks.parameters())
    attention = config.n_layers * length**2 * config.n_heads * config.head_width
    return 2.0 * (length * blocks + attention + config.vocab_size * config.d_model)


@lru_cache
def matrix_rate(options: Options) -> float:
    """Return the FLOP/s of a large matrix product."""
    n = 8192 if options.is_gpu else 256
    a, b = (torch.randn(n, n, device=options.device, dtype=options.dtype) for _ in range(2))
    row = Timing(section="", name="")
    product = Contender("product", lambda step: [a @ b for _ in range(5)])
    time_contenders(row, [product], seconds=options.seconds / 2, device=options.device)
    return 5 * 2 * n**3 / (1e-3 * row.times["product"])


# ---------------------------------------------------------------------- strategies


def _samplings(name: str) -> Workloads:
    """Yield sampling compared with greedy decoding, and beam search compared with as many greedy rows."""
    for batch in BATCHES:
        row = Timing(section="", name=f"{name}, sampling", sizes={"batch": batch, "context": 128})
        row.targets = {"sampling / greedy": 1.1}
        strategies: dict[str, tuple[Strategy, int]] = {"sampling": (SAMPLE, batch), "greedy": (Greedy(), batch)}
        yield row, partial(_measure_strategies, name, strategies)
    row = Timing(section="", name=f"{name}, beam search", sizes={"batch": 8, "width": 5, "context": 128})
    row.targets = {"beam search / greedy": 1.3}
    yield row, partial(_measure_strategies, name, {"beam search": (BeamSearch(5), 8), "greedy": (Greedy(), 40)})


def _measure_strategies(name: str, strategies: dict[str, tuple[Strategy, int]], options: Options, row: Timing) -> None:
    """Measure a step of each strategy, at its number of prompts."""
    model, config = build(name, options), config_of(name, smoke=options.smoke)
    for contender, (strategy, batch) in strategies.items():
        ids = prompts(options, config.vocab_size, batch, 16 if options.smoke else row.sizes["context"])
        run = partial(_new_ids, model, ids, strategy)
        add_times(row, contender, difference(run, options))


def _new_ids(model: Any, ids: Tensor, strategy: Strategy, n: int) -> None:
    """Generate n new ids for each prompt."""
    generate(model, ids, strategy=strategy, max_new_tokens=n)


# ---------------------------------------------------------------------- prompts of mixed lengths


def _mixed(name: str) -> Workloads:
    """Yield many prompts of mixed lengths, compared with equal lengths."""
    row = Timing(section="", name=f"{name}, prompts of mixed lengths", targets={"mixed / equal": 1 / 0.6})
    yield row, partial(_measure_mixed, name)


def _ragged(name: str) -> Workloads:
    """Yield small batches of mixed lengths, compared with equal lengths."""
    row = Timing(section="", name=f"{name}, ragged batches", targets={"ragged / equal": 1 / 0.6})
    yield row, partial(_measure_ragged, name)


def _measure_mixed(name: str, options: Options, row: Timing) -> None:
    """Compare prompts of mixed lengths, which end at random steps, with equal prompts. Times are per new token.

    The first call includes everything that a new model compiles and captures.
    """
    n_prompts, limit = (6, 12) if options.smoke else (options.n_prompts, MAX_NEW)
    model, config = build_new(name, options), config_of(name, smoke=options.smoke)
    mean = MEAN_NEW if not options.smoke else 6
    end_at_random(model, mean)
    rows = mixed_prompts(config.vocab_size, n_prompts, (5, 40) if options.smoke else PROMPT_LENGTHS)
    sampling: dict[str, Any] = {"strategy": Sample(seed=5)}
    seconds, result = _timed(options, lambda: generate(model, rows, max_new_tokens=limit, stop_ids=STOP_ID, **sampling))
    n_new = int(result.lengths.sum())
    add_times(row, "mixed", [seconds / n_new])
    length = sum(len(ids) for ids in rows) // n_prompts
    equal_new = max(1, round(n_new / n_prompts))
    ids = prompts(options, config.vocab_size, n_prompts, length)
    equal_seconds, _ = _timed(options, lambda: generate(model, ids, max_new_tokens=equal_new, **sampling))
    add_times(row, "equal", [equal_seconds / (n_prompts * equal_new)])
    row.facts = {"prompts": n_prompts, "new tokens": n_new, "seconds": seconds, "tokens/s": n_new / seconds}
    row.facts |= {"tokens/s, equal": n_prompts * equal_new / equal_seconds, "new tokens, equal": equal_new}


def _measure_ragged(name: str, options: Options, row: Timing) -> None:
    """Compare small batches of mixed lengths with batches of the same sizes and equal lengths. Times are per new token.

    Each batch has a new number of prompts and new lengths. The model is new, as for a first request.
    """
    n_batches, n_new, bounds = (2, 4, (5, 40)) if options.smoke else (RAGGED_BATCHES, 64, PROMPT_LENGTHS)
    model, config = build_new(name, options), config_of(name, smoke=options.smoke)
    sizes = torch.randint(2, 25, (n_batches,), generator=torch.Generator().manual_seed(4)).tolist()
    ragged = [mixed_prompts(config.vocab_size, n, bounds, seed=i) for i, n in enumerate(sizes)]
    equal = [prompts(options, config.vocab_size, len(batch), sum(map(len, batch)) // len(batch)) for batch in ragged]
    for contender, batches in (("ragged", ragged), ("equal", equal)):
        calls = [partial(_generated, model, batch, n_new) for batch in batches]
        seconds = [_timed(options, call)[0] for call in calls]
        add_times(row, contender, [sum(seconds) / (n_new * sum(sizes))])
        row.facts[f"longest call, {contender}, s"] = max(seconds)
        row.facts[f"tokens/s, {contender}"] = n_new * sum(sizes) / sum(seconds)


def _generated(model: Any, batch: Any, n: int) -> Generated:
    """Generate n new ids for each prompt of a batch."""
    return generate(model, batch, max_new_tokens=n)


def _timed(options: Options, call: Callable[[], Generated]) -> tuple[float, Generated]:
    """Return the seconds of a call, and its result."""
    synchronize(options.device)
    start = time.perf_counter()
    result = call()
    synchronize(options.device)
    return time.perf_counter() - start, result


@torch.no_grad()
def end_at_random(model: Any, mean: int) -> None:
    """Change the output matrix so that the stop id is drawn once per `mean` ids on average.

    The other logits become constant, or stay small if the matrix is also the embedding. The logit of the stop id is
    normally distributed with standard deviation s over contexts, so its average probability is about exp(s² / 2) / V.
    """
    head = model.lm_head_weight()
    V, M = head.shape
    s = math.sqrt(2 * math.log(max(V / mean, 1.0)))
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(M, generator=generator) * s / math.sqrt(M)  # normalized states have length √M
    if model.head is not None:
        head.zero_()
    head[STOP_ID] = row.to(head)


def mixed_prompts(vocab_size: int, n_prompts: int, lengths: tuple[int, int], seed: int = 3) -> list[Tensor]:
    """Draw prompts of uniformly distributed lengths."""
    generator = torch.Generator().manual_seed(seed)
    low, high = lengths
    sizes = torch.randint(low, high + 1, (n_prompts,), generator=generator).tolist()
    return [torch.randint(vocab_size, (n,), generator=generator) for n in sizes]
