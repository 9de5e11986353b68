"""CTranslate2 as a peer: a Transformer of the shipped translator's sizes, with random weights, in its own format."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.models.encoder_decoder import EncoderDecoderConfig

__all__ = ["tokens", "translator"]

_OPEN: list[Any] = []  # in the peer's process


@contextmanager
def translator(config: EncoderDecoderConfig, threads: int) -> Iterator[Callable[[list[list[str]], int], object] | None]:
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
    spec = ctranslate2.specs.TransformerSpec.from_config(
        (config.n_encoder_layers, config.n_decoder_layers),
        config.n_heads,
        pre_norm=True,
        activation=ctranslate2.specs.Activation.GELU,
    )
    _fill(spec, config)
    words = tokens(range(config.vocab_size))
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.optimize()
    spec.save(folder)
    how = {"device": "cpu", "compute_type": "float32", "inter_threads": 1, "intra_threads": threads}
    _OPEN.append(ctranslate2.Translator(folder, **how))
    return True


def tokens(ids: Any) -> list[str]:
    """Ids as the words of its vocabulary, whose first three have fixed names."""
    names = ("<blank>", "<s>", "</s>")
    return [names[i] if i < len(names) else f"t{i}" for i in ids]


def _fill(spec: Any, config: EncoderDecoderConfig) -> None:
    M, V = config.d_model, config.vocab_size
    F = 4 * M if config.d_ff is None else config.d_ff
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        weights: Tensor = 0.05 * torch.randn(*shape, generator=generator)
        return weights.numpy()

    def norm(part: Any) -> None:
        part.gamma, part.beta = torch.ones(M).numpy(), torch.zeros(M).numpy()

    def linear(part: Any, rows: int, columns: int) -> None:
        part.weight, part.bias = drawn(rows, columns), torch.zeros(rows).numpy()

    for side, writes in ((spec.encoder, False), (spec.decoder, True)):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = drawn(V, M)
        norm(side.layer_norm)
        for layer in side.layer:
            own, feed = layer.self_attention, layer.ffn
            maps = [(own.linear[0], 3 * M, M), (own.linear[1], M, M), (feed.linear_0, F, M), (feed.linear_1, M, F)]
            norms = [own.layer_norm, feed.layer_norm]
            if writes:
                cross = layer.attention
                maps += [(cross.linear[0], M, M), (cross.linear[1], 2 * M, M), (cross.linear[2], M, M)]
                norms.append(cross.layer_norm)
            for part, rows, columns in maps:
                linear(part, rows, columns)
            for part in norms:
                norm(part)
    linear(spec.decoder.projection, V, M)
