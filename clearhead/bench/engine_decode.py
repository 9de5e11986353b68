"""The decoding rows of `clearhead bench engine`: GPT-2's sizes beside transformers, and the shipped translator.

Weights are random where only time is measured: no id is looked at, and none ends a sequence early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.bench.engine import Maker, Row, Setting, by_rate, by_time, seconds_of
from clearhead.errors import MissingDependencyError
from clearhead.generation import Beam, Greedy, How, generate
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.presets import gpt2
from clearhead.positions import Learned

PROMPT, NEW = 64, 256


def _gpt2(setting: Setting, max_len: int = 1024) -> Decoder:
    config: DecoderConfig = gpt2().replace(max_len=max_len, positions=Learned(max_len=max_len))
    if setting.trial:
        config = config.replace(n_layers=1, d_model=64, n_heads=4, vocab_size=499)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    return config.build().eval().to(setting.device, dtype)


def _peer(setting: Setting, model: Decoder) -> Any:
    """transformers' GPT-2 of the same sizes."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise MissingDependencyError(f"the peer is transformers' GPT-2, which cannot be imported: {error}") from error

    config = model.config
    sizes = GPT2Config(
        vocab_size=config.vocab_size, n_embd=config.d_model, n_layer=config.n_layers, n_head=config.n_heads
    )
    return GPT2LMHeadModel(sizes).eval().to(setting.device, next(model.parameters()).dtype)


def _ids(setting: Setting, model: Decoder, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(setting.device)


def _decode(setting: Setting, batch: int, goal: float, times: float) -> Iterator[Row]:
    model = _gpt2(setting)
    peer, ids = _peer(setting, model), _ids(setting, model, batch, PROMPT)
    new = 8 if setting.trial else NEW
    static: dict[str, Any] = {"cache_implementation": "static"} if setting.device == "cuda" else {}

    def theirs() -> None:
        peer.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **static)

    ours_s, theirs_s = seconds_of(setting, lambda: generate(model, ids, max_new=new), theirs)
    ours, rate = batch * new / ours_s, batch * new / theirs_s
    work = f"decode GPT-2 124M, batch {batch}, {PROMPT} + {new} tokens"
    yield by_rate(work, "tokens/s", ours, "transformers" + (", static cache" if static else ""), rate, times)
    if setting.device == "cuda":
        yield by_rate(work, "tokens/s", ours, "goal", goal, 1.0)
    else:
        yield by_rate(work, "tokens/s", ours, "reading the weights once a token", _reading_rate(setting, model), goal)


def decode_batch_1(setting: Setting) -> Iterator[Row]:
    """One sequence after the other: the time of a step is all there is."""
    yield from _decode(setting, 1, 3_000, 6.0)


def decode_batch_32(setting: Setting) -> Iterator[Row]:
    yield from _decode(setting, 32, 65_000, 4.0)


def decode_cpu(setting: Setting) -> Iterator[Row]:
    yield from _decode(setting, 1, 0.8, 1.2)


def _reading_rate(setting: Setting, model: Decoder) -> float:
    """How many times a second memory gives all the weights that a step multiplies by: here nothing reads them faster
    than a product with a vector."""
    weights = [p.detach() for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("positions")]
    ones = {w.shape[1]: w.new_ones(w.shape[1]) for w in weights}
    (seconds,) = seconds_of(setting, lambda: [w @ ones[w.shape[1]] for w in weights], repeats=5)
    return 1 / seconds


def read_prompts(setting: Setting) -> Iterator[Row]:
    """4,096 tokens up to the first new one, of one prompt and of four together, as a share of what the largest
    products reach."""
    length = 128 if setting.trial else 4096
    model = _gpt2(setting, max_len=8192)
    config = model.config
    blocks = sum(p.numel() for p in model.blocks.parameters())
    # Products with weights, scores and values below the diagonal, and one row of logits.
    work = (
        2 * length * blocks + 2 * config.n_layers * length**2 * config.d_model + 2 * config.vocab_size * config.d_model
    )
    for count, name in ((1, "a prompt"), (4, "four prompts")):
        ids = _ids(setting, model, count, length)
        (seconds,) = seconds_of(setting, partial(generate, model, ids, max_new=1), repeats=9)
        rate, ceiling = count * work / seconds / 1e12, _matrix_rate(setting)
        yield by_rate(f"read {name} of {length:,} tokens", "TFLOP/s", rate, "matrix ceiling", ceiling, 0.5)


def _matrix_rate(setting: Setting) -> float:
    n = 256 if setting.trial else 8192
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=setting.device, dtype=dtype) for _ in range(2))
    (seconds,) = seconds_of(setting, lambda: [a @ b for _ in range(10)], repeats=3)
    return 10 * 2 * n**3 / seconds / 1e12


def first_token(setting: Setting) -> Iterator[Row]:
    """From the call to the first id, once the process is warm."""
    model = _gpt2(setting)
    ids = _ids(setting, model, 1, PROMPT)
    (seconds,) = seconds_of(setting, lambda: generate(model, ids, max_new=1).ids.tolist(), repeats=9)
    yield by_time("first token after 64, warm", "ms", 1e3 * seconds, "goal", 30.0, 1.0)


def _translate(setting: Setting, how: How, name: str, goal: float) -> Iterator[Row]:
    from clearhead import pretrained
    from clearhead.data.translation import read_pairs

    if setting.data is None:
        return
    trained = pretrained.load("en-es", device=setting.device)
    sentences = read_pairs(setting.data / "train.tsv.xz").sources[: 32 if setting.trial else 10_000]
    (seconds,) = seconds_of(setting, lambda: pretrained.translate(trained, sentences, how=how), repeats=3)
    yield by_time(f"translate {len(sentences):,} sentences, {name}", "s", seconds, "goal", goal, 1.0)


def translate_greedy(setting: Setting) -> Iterator[Row]:
    yield from _translate(setting, Greedy(), "greedy", 3.0)


def translate_beam(setting: Setting) -> Iterator[Row]:
    yield from _translate(setting, Beam(5), "beam 5", 8.0)


def translate_cpu(setting: Setting) -> Iterator[Row]:
    """256 sources of 5 to 13 ids, 10 ids written, in batches of 64: the shipped translator's sizes on both sides."""
    from clearhead import pretrained
    from clearhead.bench import engine_ct2

    model: Any = pretrained.load("en-es").model
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 14, (16 if setting.trial else 256,), generator=generator).sort().values.tolist()
    sources = [torch.randint(5, model.config.vocab_size, (n,), generator=generator) for n in lengths]
    words = [engine_ct2.tokens(source.tolist()) for source in sources]

    def ours(how: How) -> None:
        for first in range(0, len(sources), 64):
            generate(model, sources[first : first + 64], how=how, max_new=10, start=1)

    with engine_ct2.translator(model.config, torch.get_num_threads()) as peer:
        if peer is None:
            return
        for name, how, width in (("greedy", Greedy(), 1), ("beam 5", Beam(5), 5)):
            both = partial(ours, how), partial(peer, words, width)
            rates = [len(sources) / taken for taken in seconds_of(setting, *both, repeats=5)]
            work = f"translate {len(sources)} short sources on the CPU, {name}"
            yield by_rate(work, "sentences/s", rates[0], "CTranslate2", rates[1], 0.9)


ON_GPU: tuple[Maker, ...] = (
    read_prompts,
    first_token,
    decode_batch_1,
    decode_batch_32,
    translate_greedy,
    translate_beam,
)
ON_CPU: tuple[Maker, ...] = (decode_cpu, translate_cpu)
