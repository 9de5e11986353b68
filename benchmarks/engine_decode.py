"""The decoding rows of `python -m benchmarks engine`: GPT-2's sizes beside transformers, and the shipped translator.

Weights are random where only time is measured: no id is looked at, and none ends a sequence early."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Maker, Row, Setting, by_rate, by_time, seconds_of
from clearhead.errors import MissingDependencyError
from clearhead.generation import BeamSearch, Greedy, Strategy, generate
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.models.presets import gpt2
from clearhead.nn.positions import LearnedPositions

PROMPT, NEW = 64, 256


def _gpt2(setting: Setting, max_len: int = 1024) -> Decoder:
    config: DecoderConfig = gpt2().replace(max_len=max_len, positions=LearnedPositions(max_len=max_len))
    if setting.trial:
        config = config.replace(n_layers=1, d_model=64, n_heads=4, vocab_size=499)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    return config.build().eval().to(setting.device, dtype)


def transformers_gpt2(config: DecoderConfig, **choices: Any) -> Any:
    """transformers' GPT-2 of the same sizes."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise MissingDependencyError(f"the peer is transformers' GPT-2, which cannot be imported: {error}") from error

    sizes = {"n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads}
    return GPT2LMHeadModel(GPT2Config(vocab_size=config.vocab_size, **sizes, **choices))


def _ids(setting: Setting, model: Decoder, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(setting.device)


def _decode(setting: Setting, *, batch: int, goal: float, times: float) -> Iterator[Row]:
    model = _gpt2(setting)
    peer = transformers_gpt2(model.config).eval().to(setting.device, next(model.parameters()).dtype)
    ids = _ids(setting, model, batch, PROMPT)
    new = 8 if setting.trial else NEW
    static: dict[str, Any] = {"cache_implementation": "static"} if setting.device == "cuda" else {}
    how: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    both = partial(generate, model, ids, max_new_tokens=new), partial(peer.generate, ids, **how, **static)
    ours, rate = (batch * new / taken for taken in seconds_of(setting, *both))
    work = f"decode GPT-2 124M, batch {batch}, {PROMPT} + {new} tokens"
    yield by_rate(work, "tokens/s", ours, "transformers" + (", static cache" if static else ""), rate, times)
    if setting.device == "cuda":
        yield by_rate(work, "tokens/s", ours, "goal", goal, 1.0)
    else:
        yield by_rate(work, "tokens/s", ours, "reading the weights once a token", _reading_rate(setting, model), goal)


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
    n_layers, wide = model.config.n_layers, model.config.d_model
    blocks = sum(p.numel() for p in model.blocks.parameters())
    # Products with weights, scores and values below the diagonal, and one row of logits.
    work = 2 * (length * blocks + n_layers * length**2 * wide + model.config.vocab_size * wide)
    for count, name in ((1, "a prompt"), (4, "four prompts")):
        ids = _ids(setting, model, count, length)
        (seconds,) = seconds_of(setting, partial(generate, model, ids, max_new_tokens=1), repeats=9)
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
    (seconds,) = seconds_of(setting, lambda: generate(model, ids, max_new_tokens=1).ids.tolist(), repeats=9)
    yield by_time("first token after 64, warm", "ms", 1e3 * seconds, "goal", 30.0, 1.0)


def _translate(setting: Setting, *, how: Strategy, name: str, goal: float) -> Iterator[Row]:
    from clearhead import hub
    from clearhead.data.tasks.translation import read_pairs

    if setting.data is None:
        return
    trained = hub.pipeline("en-es", device=setting.device)
    sentences = read_pairs(setting.data / "train.tsv.xz").sources[: 32 if setting.trial else 10_000]
    (seconds,) = seconds_of(setting, lambda: hub.translate(trained, sentences, strategy=how), repeats=3)
    yield by_time(f"translate {len(sentences):,} sentences, {name}", "s", seconds, "goal", goal, 1.0)


def translate_cpu(setting: Setting) -> Iterator[Row]:
    """256 sources of 5 to 13 ids, 10 ids written, in batches of 64: the shipped translator's sizes on both sides."""
    from clearhead import hub

    model: Any = hub.pipeline("en-es").model
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 14, (16 if setting.trial else 256,), generator=generator).sort().values.tolist()
    sources = [torch.randint(5, model.config.vocab_size, (n,), generator=generator) for n in lengths]
    words = [_words(source.tolist()) for source in sources]

    def ours(how: Strategy) -> None:
        for first in range(0, len(sources), 64):
            generate(model, sources[first : first + 64], strategy=how, max_new_tokens=10, decoder_start_ids=1)

    with _ctranslate2(model.config, torch.get_num_threads()) as peer:
        if peer is None:
            return
        for name, how, width in (("greedy", Greedy(), 1), ("beam 5", BeamSearch(5), 5)):
            both = partial(ours, how), partial(peer, words, width)
            rates = [len(sources) / taken for taken in seconds_of(setting, *both, repeats=5)]
            work = f"translate {len(sources)} short sources on the CPU, {name}"
            yield by_rate(work, "sentences/s", rates[0], "CTranslate2", rates[1], 0.9)


# ---------------------------------------------------------------------- CTranslate2, with random weights

_Peer = Callable[[list[list[str]], int], object]
_OPEN: list[Any] = []  # in the peer's process


@contextmanager
def _ctranslate2(config: EncoderDecoderConfig, threads: int) -> Iterator[_Peer | None]:
    """What translates words by a beam of some width into ten others, in a process of its own: where two libraries have
    their threads in one, the second slows the first down. None where CTranslate2 is not installed."""
    alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with TemporaryDirectory() as folder, alone as peer:
        there = peer.submit(_opened, config, folder, threads).result()
        yield (lambda words, width: peer.submit(_translated, words, width).result()) if there else None


def _translated(words: list[list[str]], width: int) -> None:
    length = {"min_decoding_length": 10, "max_decoding_length": 10}
    _OPEN[0].translate_batch(words, beam_size=width, max_batch_size=64, **length)


def _opened(config: EncoderDecoderConfig, folder: str, threads: int) -> bool:
    """Makes a float32 translator on the CPU, unless CTranslate2 is not installed."""
    try:
        ctranslate2 = importlib.import_module("ctranslate2")
    except ImportError:
        return False
    layers, gelu = (config.n_encoder_layers, config.n_decoder_layers), ctranslate2.specs.Activation.GELU
    spec = ctranslate2.specs.TransformerSpec.from_config(layers, config.n_heads, pre_norm=True, activation=gelu)
    _fill(spec, config)
    words = _words(range(config.vocab_size))
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.optimize()
    spec.save(folder)
    how = {"device": "cpu", "compute_type": "float32", "inter_threads": 1, "intra_threads": threads}
    _OPEN.append(ctranslate2.Translator(folder, **how))
    return True


def _words(ids: Any) -> list[str]:
    """Ids as the words of its vocabulary, whose first three have fixed names."""
    names = ("<blank>", "<s>", "</s>")
    return [names[i] if i < len(names) else f"t{i}" for i in ids]


def _fill(spec: Any, config: EncoderDecoderConfig) -> None:
    M, V, F = config.d_model, config.vocab_size, config.ff_width
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return (0.05 * torch.randn(*shape, generator=generator)).numpy()

    maps, norms = [(spec.decoder.projection, V, M)], []
    for side in (spec.encoder, spec.decoder):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = drawn(V, M)
        norms.append(side.layer_norm)
        for layer in side.layer:
            own, feed = layer.self_attention, layer.ffn
            maps += [(own.linear[0], 3 * M, M), (own.linear[1], M, M), (feed.linear_0, F, M), (feed.linear_1, M, F)]
            norms += [own.layer_norm, feed.layer_norm]
            if side is spec.decoder:
                cross = layer.attention
                maps += [(cross.linear[0], M, M), (cross.linear[1], 2 * M, M), (cross.linear[2], M, M)]
                norms.append(cross.layer_norm)
    for part, rows, columns in maps:
        part.weight, part.bias = drawn(rows, columns), torch.zeros(rows).numpy()
    for part in norms:
        part.gamma, part.beta = torch.ones(M).numpy(), torch.zeros(M).numpy()


ON_GPU: dict[str, Maker] = {
    "read_prompts": read_prompts,
    "first_token": first_token,
    # One sequence after the other: the time of a step is all there is.
    "decode_batch_1": partial(_decode, batch=1, goal=3_000, times=6.0),
    "decode_batch_32": partial(_decode, batch=32, goal=65_000, times=4.0),
    "translate_greedy": partial(_translate, how=Greedy(), name="greedy", goal=3.0),
    "translate_beam": partial(_translate, how=BeamSearch(5), name="beam 5", goal=8.0),
}
ON_CPU: dict[str, Maker] = {
    "decode_cpu": partial(_decode, batch=1, goal=0.8, times=1.2),
    "translate_cpu": translate_cpu,
}
