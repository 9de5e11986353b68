"""Streaming recognition: the same logits and symbols for chunks of any sizes, in constant memory."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from clearhead import hub, masks
from clearhead.data.audio import read_audio
from clearhead.errors import ConfigError
from clearhead.generation.ctc import decode
from clearhead.hub import RecognizedSymbol, StreamingRecognizer
from clearhead.models import CTCEncoder, CTCEncoderConfig
from clearhead.nn.mel import Mel
from clearhead.nn.positions import ALiBi, NoPE, RelativeBias

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(7, 0),
    "chunks": (masks.causal() | masks.blocks(3)) & masks.window(8, 2),
}
N_MODELS, N_SPLITS = (500, 20) if os.environ.get("WHOLE") else (12, 2)  # 10,000 in `make test-streaming`


def ctc_encoder(mask: masks.Mask, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> CTCEncoder:
    """Return a tiny model with parameters large enough that its symbols vary from frame to frame."""
    torch.manual_seed(seed)
    config = {
        "d_model": 10,
        "n_heads": 2,
        "d_ff": 14,
        "n_layers": 2,
        "n_symbols": 3,
        "frame_stacking": 2,
        "dropout": 0.0,
    }
    small = Mel(window=50, hop=20, n_fft=64, n_mels=11)
    model = CTCEncoderConfig(**config | {"mask": mask, "mel": small, "mean": -6.0, "std": 4.0} | options).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.2 * torch.randn_like(parameter))
    return model.eval().to(dtype)


def sound(n: int, seed: int = 0) -> torch.Tensor:
    """Return noise of varying loudness."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(n // 97 + 1, generator=generator).pow(3).repeat_interleave(97)[:n]
    return steps * (2 * torch.rand(n, generator=generator) - 1)


def recognize(
    model: CTCEncoder, samples: torch.Tensor, sizes: list[int], beam: int = 1
) -> tuple[list[RecognizedSymbol], torch.Tensor]:
    """Return the symbols and the logits of a recording in chunks of these sizes, used cyclically."""
    logits: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda *call: logits.append(call[-1][0]))
    try:
        recognizer = StreamingRecognizer(model, beam=beam)
        symbols = []
        start = 0
        for size in itertools.cycle(sizes):
            if start >= len(samples):
                break
            symbols += recognizer.push(samples[start : start + size])
            start += size
        symbols += recognizer.flush()
    finally:
        handle.remove()
    return symbols, torch.cat([model.head.weight.new_zeros(0, model.config.n_symbols + 1), *logits])


def offline_logits(model: CTCEncoder, samples: torch.Tensor) -> torch.Tensor:
    """Return the logits of one forward pass over the recording, without a cache."""
    with torch.no_grad():
        return model(model.config.mel(samples[None]).to(model.head.weight))[0]


def without_log_probs(symbols: list[RecognizedSymbol]) -> list[tuple[str, float, float, float]]:
    """Return the fields that are compared exactly."""
    return [(symbol.text, symbol.start, symbol.end, symbol.emitted_at) for symbol in symbols]


@pytest.mark.parametrize("seed", range(N_MODELS))
def test_recognizer_any_chunks_match_offline_forward(seed):
    """Logits agree up to rounding, symbols exactly."""
    rng = random.Random(seed)
    positions = rng.choice([ALiBi(), RelativeBias(), NoPE()])
    dtype, left_frames = rng.choice([torch.float32, torch.float64]), rng.choice([0, 1, 5])
    mask = rng.choice(list(MASKS.values()))
    model = ctc_encoder(mask, seed=seed, dtype=dtype, positions=positions, left_frames=left_frames)
    samples = sound(rng.randrange(0, 2_000), seed).to(dtype)
    expected = offline_logits(model, samples)
    at_once = without_log_probs(recognize(model, samples, [len(samples) or 1])[0])
    greedy = decode(expected.float().log_softmax(-1), blank=model.config.blank)
    assert [text for text, *_ in at_once] == [str(symbol.id) for symbol in greedy]
    assert [start for _, start, *_ in at_once] == pytest.approx(
        [symbol.start * model.config.frame_seconds for symbol in greedy]
    )
    for _ in range(N_SPLITS):
        sizes = [rng.choice([1, 3, 19, 20, 40, 41, 317, 4_001]) + 2 * rng.randrange(10) for _ in range(5)]
        symbols, logits = recognize(model, samples, sizes)
        assert without_log_probs(symbols) == at_once
        assert_equal_up_to_rounding(logits, expected)


def assert_equal_up_to_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to a few rounding errors relative to the largest value."""
    assert actual.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    bound = 64 * torch.finfo(expected.dtype).eps * max(largest, 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


def test_bundled_model_recognizes_digits_for_any_chunks():
    model = hub.pipeline("spoken-digits").model
    samples = read_audio(Path(__file__).parents[2] / "docs" / "sounds" / "pi.wav").samples
    symbols, logits = recognize(model, samples, [1_009, 160, 37, 4_001])
    assert "".join(symbol.text for symbol in symbols) == "314159"
    assert without_log_probs(symbols) == without_log_probs(recognize(model, samples, [len(samples)])[0])
    assert_equal_up_to_rounding(logits, offline_logits(model, samples))


@pytest.mark.parametrize("beam", [1, 4])
def test_beam_search_is_independent_of_chunks(beam):
    model = ctc_encoder(MASKS["window"])
    samples = sound(6_007)
    expected = recognize(model, samples, [len(samples)], beam)[0]
    assert len(expected) > 5
    assert without_log_probs(recognize(model, samples, [31, 400, 1], beam)[0]) == without_log_probs(expected)


def test_symbol_is_emitted_at_the_sample_that_completes_its_context():
    for name in ("window", "chunks"):
        model, samples = ctc_encoder(MASKS[name]), sound(1_201)
        recognizer, rate = StreamingRecognizer(model), model.config.mel.sample_rate
        for n, sample in enumerate(samples, 1):
            for symbol in recognizer.push(sample[None]):
                assert symbol.emitted_at == pytest.approx(n / rate)
                assert 0 <= symbol.start < symbol.end <= symbol.emitted_at
                assert symbol.log_prob < 0
        for symbol in recognizer.flush():
            assert symbol.emitted_at == pytest.approx(len(samples) / rate)


def test_unbounded_mask_emits_all_symbols_at_the_end():
    model, samples = ctc_encoder(MASKS["full"]), sound(2_003)
    recognizer = StreamingRecognizer(model)
    assert recognizer.push(samples) == []
    symbols = recognizer.flush()
    assert symbols
    assert {symbol.emitted_at for symbol in symbols} == {2_003 / model.config.mel.sample_rate}


def test_recognizer_can_be_reused_after_flush():
    model, samples = ctc_encoder(MASKS["window"]), sound(2_003)
    recognizer = StreamingRecognizer(model)
    first, second = ([*recognizer.push(samples), *recognizer.flush()] for _ in range(2))
    assert first
    assert first == second


def test_tail_silence_is_processed_but_not_part_of_the_recording():
    model, samples = ctc_encoder(MASKS["window"]), sound(2_003)
    rate = model.config.mel.sample_rate
    plain, tailed = StreamingRecognizer(model), StreamingRecognizer(model, tail_seconds=0.1)
    expected = [*plain.push(torch.cat((samples, torch.zeros(rate // 10)))), *plain.flush()]
    symbols = [*tailed.push(samples), *tailed.flush()]
    assert [symbol.text for symbol in symbols] == [symbol.text for symbol in expected]
    assert max(symbol.emitted_at for symbol in symbols) <= 2_003 / rate
    assert tailed.flush() == []


@pytest.mark.parametrize("n", [0, 1, 49, 50, 69])
def test_recording_shorter_than_a_frame_has_no_symbols(n):
    recognizer = StreamingRecognizer(ctc_encoder(MASKS["window"]))
    assert [*recognizer.push(torch.zeros(n)), *recognizer.flush()] == []


def tensor_bytes(value: object, visited: set[int]) -> int:
    """Return the bytes of all tensors that an object references, directly or indirectly."""
    if id(value) in visited or isinstance(value, (torch.nn.Module, type)):
        return 0
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(tensor_bytes(part, visited) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(part, visited) for part in value)
    return tensor_bytes(vars(value), visited) if hasattr(value, "__dict__") else 0


@pytest.mark.measured
@pytest.mark.parametrize("name", ["window", "chunks"])
def test_memory_is_constant_over_an_hour(name):
    """Bytes of the tensors of a recognizer; a coarse model keeps an hour of frames fast."""
    coarse = Mel(sample_rate=1_000, window=100, hop=100, n_fft=128, n_mels=3, low=20.0)
    model = ctc_encoder(MASKS[name], mel=coarse, frame_stacking=2, n_layers=1)
    recognizer = StreamingRecognizer(model, chunk_seconds=60.0)
    chunk = sound(9_970)  # the alignment of chunks and frames repeats after 60 chunks
    sizes = []
    for _ in range(3_600 * 1_000 // len(chunk)):
        recognizer.push(chunk)
        sizes.append(tensor_bytes(recognizer, set()))
    assert recognizer._cache.n_evicted > 17_900  # all frames of an hour except the last
    assert max(sizes[-60:]) == max(sizes[60:120])


@pytest.mark.bad_input
def test_recognizer_invalid_input_raises():
    recognizer = StreamingRecognizer(ctc_encoder(MASKS["window"]))
    with pytest.raises(ValueError, match="samples have shape"):
        recognizer.push(torch.zeros(2, 50))
    with pytest.raises(TypeError, match="from −1 to 1"):
        recognizer.push(torch.zeros(50, dtype=torch.int16))
    with pytest.raises(ConfigError, match="beam is 0"):
        StreamingRecognizer(ctc_encoder(MASKS["window"]), beam=0)


class TestBundledModel:
    @pytest.mark.parametrize("volume", [0.0, 1e-4, 1e-2, 0.1])
    def test_silence_and_noise_have_no_symbols(self, volume):
        recognizer = hub.pipeline("spoken-digits").listen()
        noise = torch.randn(3 * recognizer.sample_rate, generator=torch.Generator().manual_seed(5))
        assert [*recognizer.push(volume * noise), *recognizer.flush()] == []

    def test_card_metrics_meet_targets(self):
        """`tools/card.py` measured them on recordings that were not used for training."""
        metrics = hub.cards()["spoken-digits"]["metrics"]
        assert metrics["greedy"]["accuracy"] >= 0.985
        assert metrics["streams"]["digit_error_rate"] <= 0.03
        assert metrics["streams"]["latency_95"] <= 0.3
        size = sum(path.stat().st_size for path in (hub.BUNDLED_FOLDER / "spoken-digits").iterdir())
        assert size <= 6e6
