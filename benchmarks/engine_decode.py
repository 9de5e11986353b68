"""Decoding rows of `python -m benchmarks engine`: GPT-2 compared with transformers, and the bundled translator.

Models that are only timed have random parameters; no id ends a sequence early.
"""

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

from benchmarks.engine import Benchmark, Row, Setting, by_rate, by_time, seconds_of
from clearhead.errors import MissingDependencyError
from clearhead.generation import BeamSearch, Greedy, Strategy, generate
from clearhead.models.decoder import Decoder, DecoderConfig
from clearhead.models.encoder_decoder import EncoderDecoderConfig
from clearhead.models.presets import gpt2
from clearhead.nn.positions import LearnedPositions
from clearhead.ops.onednn_linear import linear

PROMPT_LENGTH, N_NEW = 64, 256


def _gpt2(setting: Setting, max_len: int = 1024) -> Decoder:
    """Build GPT-2 with random parameters."""
    config: DecoderConfig = gpt2().replace(max_len=max_len, positions=LearnedPositions(max_len=max_len))
    if setting.smoke:
        config = config.replace(n_layers=1, d_model=64, n_heads=4, vocab_size=499)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    return config.build().eval().to(setting.device, dtype)


def transformers_gpt2(config: DecoderConfig, **options: Any) -> Any:
    """Build the GPT-2 of transformers with the same sizes."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise MissingDependencyError(f"the baseline needs transformers, which cannot be imported: {error}") from error

    sizes = {"n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads}
    return GPT2LMHeadModel(GPT2Config(vocab_size=config.vocab_size, **sizes, **options))


def _ids(setting: Setting, model: Decoder, batch: int, length: int) -> Tensor:
    """Draw random prompts."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(setting.device)


def _decode(setting: Setting, *, batch: int, goal: float, target: float) -> Iterator[Row]:
    """Compare decoding with transformers, and with a goal (GPU) or the memory bandwidth (CPU, batch size 1)."""
    model = _gpt2(setting)
    baseline = transformers_gpt2(model.config).eval().to(setting.device, next(model.parameters()).dtype)
    ids = _ids(setting, model, batch, PROMPT_LENGTH)
    n_new = 8 if setting.smoke else N_NEW
    static: dict[str, Any] = {"cache_implementation": "static"} if setting.device == "cuda" else {}
    options: dict[str, Any] = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
    calls = partial(generate, model, ids, max_new_tokens=n_new), partial(baseline.generate, ids, **options, **static)
    rate, baseline_rate = (batch * n_new / seconds for seconds in seconds_of(setting, *calls))
    name = f"decode GPT-2 124M, batch {batch}, {PROMPT_LENGTH} + {n_new} tokens"
    baseline_name = "transformers" + (", static cache" if static else "")
    yield by_rate(name, "tokens/s", rate, baseline_name, baseline_rate, target)
    if setting.device == "cuda":
        yield by_rate(name, "tokens/s", rate, "goal", goal, 1.0)
    elif batch == 1:
        limit = _parameter_read_rate(setting, model)
        yield by_rate(name, "tokens/s", rate, "reading the parameters once per token", limit, goal)


def _parameter_read_rate(setting: Setting, model: Decoder) -> float:
    """Return how many times per second all matrices of a decode step can be read, by matrix-vector products."""
    weights = [p.detach() for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("positions")]
    ones = {w.shape[1]: w.new_ones(1, w.shape[1]) for w in weights}
    (seconds,) = seconds_of(setting, lambda: [linear(ones[w.shape[1]], w) for w in weights], repeats=5)
    return 1 / seconds


def prefill(setting: Setting) -> Iterator[Row]:
    """Compare the prefill of one and of four prompts of 4,096 tokens with the throughput of a large matrix product."""
    length = 128 if setting.smoke else 4096
    model = _gpt2(setting, max_len=8192)
    n_layers, d_model = model.config.n_layers, model.config.d_model
    blocks = sum(p.numel() for p in model.blocks.parameters())
    # Products with parameters, scores and values below the diagonal, and one row of logits.
    flops = 2 * (length * blocks + n_layers * length**2 * d_model + model.config.vocab_size * d_model)
    for batch, name in ((1, "one prompt"), (4, "four prompts")):
        ids = _ids(setting, model, batch, length)
        (seconds,) = seconds_of(setting, partial(generate, model, ids, max_new_tokens=1), repeats=9)
        rate, limit = batch * flops / seconds / 1e12, _matrix_rate(setting)
        yield by_rate(f"prefill {name} of {length:,} tokens", "TFLOP/s", rate, "large matrix product", limit, 0.5)


def _matrix_rate(setting: Setting) -> float:
    """Return the TFLOP/s of a large matrix product."""
    n = 256 if setting.smoke else 8192
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=setting.device, dtype=dtype) for _ in range(2))
    (seconds,) = seconds_of(setting, lambda: [a @ b for _ in range(10)], repeats=3)
    return 10 * 2 * n**3 / seconds / 1e12


def first_token(setting: Setting) -> Iterator[Row]:
    """Time the first token in a warm process."""
    model = _gpt2(setting)
    ids = _ids(setting, model, 1, PROMPT_LENGTH)
    (seconds,) = seconds_of(setting, lambda: generate(model, ids, max_new_tokens=1).ids.tolist(), repeats=9)
    yield by_time("time to first token, 64-token prompt, warm", "ms", 1e3 * seconds, "goal", 30.0, 1.0)


def _translate(setting: Setting, *, strategy: Strategy, name: str, goal: float) -> Iterator[Row]:
    """Time the translation of sentences with the bundled translator."""
    from clearhead import hub
    from clearhead.data.tasks.translation import read_pairs

    if setting.data is None:
        return
    translator = hub.pipeline("en-es", device=setting.device)
    sentences = read_pairs(setting.data / "train.tsv.xz").sources[: 32 if setting.smoke else 10_000]
    (seconds,) = seconds_of(setting, lambda: hub.translate(translator, sentences, strategy=strategy), repeats=3)
    yield by_time(f"translate {len(sentences):,} sentences, {name}", "s", seconds, "goal", goal, 1.0)


def translate_cpu(setting: Setting) -> Iterator[Row]:
    """Compare with CTranslate2 at the sizes of the bundled translator: 256 sources of 5 to 13 ids, 10 new ids each."""
    from clearhead import hub

    model: Any = hub.pipeline("en-es").model
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 14, (16 if setting.smoke else 256,), generator=generator).sort().values.tolist()
    sources = [torch.randint(5, model.config.vocab_size, (n,), generator=generator) for n in lengths]
    tokens = [_tokens(source.tolist()) for source in sources]

    def translate(strategy: Strategy) -> None:
        for first in range(0, len(sources), 64):
            generate(model, sources[first : first + 64], strategy=strategy, max_new_tokens=10, decoder_start_ids=1)

    with _ctranslate2(model.config, torch.get_num_threads()) as baseline:
        if baseline is None:
            return
        for name, strategy, width in (("greedy", Greedy(), 1), ("beam 5", BeamSearch(5), 5)):
            calls = partial(translate, strategy), partial(baseline, tokens, width)
            rates = [len(sources) / seconds for seconds in seconds_of(setting, *calls, repeats=5)]
            benchmark = f"translate {len(sources)} short sources on the CPU, {name}"
            yield by_rate(benchmark, "sentences/s", rates[0], "CTranslate2", rates[1], 1.0)


# ---------------------------------------------------------------------- CTranslate2, with random parameters

_Translate = Callable[[list[list[str]], int], object]
_TRANSLATORS: list[Any] = []  # in the process of CTranslate2


@contextmanager
def _ctranslate2(config: EncoderDecoderConfig, threads: int) -> Iterator[_Translate | None]:
    """Yield a function of token lists and beam width, or None if CTranslate2 is not installed.

    It runs in a separate process, because the idle threads of one library slow down the other in the same process.
    """
    executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with TemporaryDirectory() as folder, executor as process:
        is_installed = process.submit(_open_translator, config, folder, threads).result()
        yield (lambda tokens, width: process.submit(_translate_batch, tokens, width).result()) if is_installed else None


def _translate_batch(tokens: list[list[str]], width: int) -> None:
    """Translate into 10 tokens each, in the process of CTranslate2."""
    length = {"min_decoding_length": 10, "max_decoding_length": 10}
    _TRANSLATORS[0].translate_batch(tokens, beam_size=width, max_batch_size=64, **length)


def _open_translator(config: EncoderDecoderConfig, folder: str, threads: int) -> bool:
    """Open a float32 translator on the CPU; return False if CTranslate2 is not installed."""
    try:
        ctranslate2 = importlib.import_module("ctranslate2")
    except ImportError:
        return False
    layers, gelu = (config.n_encoder_layers, config.n_decoder_layers), ctranslate2.specs.Activation.GELU
    spec = ctranslate2.specs.TransformerSpec.from_config(layers, config.n_heads, pre_norm=True, activation=gelu)
    _fill(spec, config)
    vocabulary = _tokens(range(config.vocab_size))
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.optimize()
    spec.save(folder)
    options = {"device": "cpu", "compute_type": "float32", "inter_threads": 1, "intra_threads": threads}
    _TRANSLATORS.append(ctranslate2.Translator(folder, **options))
    return True


def _tokens(ids: Any) -> list[str]:
    """Return the tokens of ids in a vocabulary whose first three tokens have fixed names."""
    names = ("<blank>", "<s>", "</s>")
    return [names[i] if i < len(names) else f"t{i}" for i in ids]


def _fill(spec: Any, config: EncoderDecoderConfig) -> None:
    """Fill a CTranslate2 specification with random parameters."""
    M, V, F = config.d_model, config.vocab_size, config.ff_width
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return (0.05 * torch.randn(*shape, generator=generator)).numpy()

    maps, norms = [(spec.decoder.projection, V, M)], []
    for side in (spec.encoder, spec.decoder):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = random(V, M)
        norms.append(side.layer_norm)
        for layer in side.layer:
            attention, ffn = layer.self_attention, layer.ffn
            maps += [(attention.linear[0], 3 * M, M), (attention.linear[1], M, M)]
            maps += [(ffn.linear_0, F, M), (ffn.linear_1, M, F)]
            norms += [attention.layer_norm, ffn.layer_norm]
            if side is spec.decoder:
                cross = layer.attention
                maps += [(cross.linear[0], M, M), (cross.linear[1], 2 * M, M), (cross.linear[2], M, M)]
                norms.append(cross.layer_norm)
    for part, rows, columns in maps:
        part.weight, part.bias = random(rows, columns), torch.zeros(rows).numpy()
    for part in norms:
        part.gamma, part.beta = torch.ones(M).numpy(), torch.zeros(M).numpy()


ON_GPU: dict[str, Benchmark] = {
    "prefill": prefill,
    "first_token": first_token,
    # At batch size 1 the latency of a step is everything.
    "decode_batch_1": partial(_decode, batch=1, goal=3_000, target=6.0),
    "decode_batch_32": partial(_decode, batch=32, goal=65_000, target=4.0),
    "translate_greedy": partial(_translate, strategy=Greedy(), name="greedy", goal=3.0),
    "translate_beam": partial(_translate, strategy=BeamSearch(5), name="beam 5", goal=8.0),
}
ON_CPU: dict[str, Benchmark] = {
    "decode_cpu": partial(_decode, batch=1, goal=0.8, target=1.2),
    "decode_cpu_batch_8": partial(_decode, batch=8, goal=0.0, target=1.5),
    "translate_cpu": translate_cpu,
}
