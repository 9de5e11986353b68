"""Listening to a stream: in any pieces the same logits and events as of the whole, in constant memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from clearhead import hub, masks
from clearhead.data.audio import read
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
MODELS, EACH = (500, 20) if os.environ.get("WHOLE") else (12, 2)  # `make speech`: 10,000 ways to cut a sound


def speech(mask: masks.Mask, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> CTCEncoder:
    """A tiny model with weights large enough that its answers vary from moment to moment."""
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
    made = CTCEncoderConfig(**config | {"mask": mask, "mel": small, "mean": -6.0, "std": 4.0} | options).build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0).add_(0.2 * torch.randn_like(parameter))
    return made.eval().to(dtype)


def sound(n: int, seed: int = 0) -> torch.Tensor:
    """Noise whose loudness comes and goes."""
    drawn = torch.Generator().manual_seed(seed)
    steps = torch.rand(n // 97 + 1, generator=drawn).pow(3).repeat_interleave(97)[:n]
    return steps * (2 * torch.rand(n, generator=drawn) - 1)


def heard(
    model: CTCEncoder, samples: torch.Tensor, sizes: list[int], beam: int = 1
) -> tuple[list[RecognizedSymbol], torch.Tensor]:
    """The events, and the logits that the model gave, of a sound in pieces of these sizes, which are taken in turn."""
    logits: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda *call: logits.append(call[-1][0]))
    try:
        listener, found, at, turn = StreamingRecognizer(model, beam=beam), [], 0, 0
        while at < len(samples):
            size = sizes[turn % len(sizes)]
            found += listener.push(samples[at : at + size])
            at, turn = at + size, turn + 1
        found += listener.flush()
    finally:
        handle.remove()
    return found, torch.cat([model.head.weight.new_zeros(0, model.config.n_symbols + 1), *logits])


def whole(model: CTCEncoder, samples: torch.Tensor) -> torch.Tensor:
    """The logits of one pass over everything, without a cache."""
    with torch.no_grad():
        return model(model.config.mel(samples[None]).to(model.head.weight))[0]


def told(events: list[RecognizedSymbol]) -> list[tuple[str, float, float, float]]:
    return [(one.text, one.start, one.end, one.emitted_at) for one in events]


@pytest.mark.parametrize("turn", range(MODELS))
def test_any_pieces_give_the_whole(turn):
    """What is trained in parallel is what runs on a stream: logits to the last bits of the dtype, and the events."""
    draw = random.Random(turn)
    positions = draw.choice([ALiBi(), RelativeBias(), NoPE()])
    dtype, earlier = draw.choice([torch.float32, torch.float64]), draw.choice([0, 1, 5])
    mask = draw.choice(list(MASKS.values()))
    model = speech(mask, seed=turn, dtype=dtype, positions=positions, left_frames=earlier)
    samples = sound(draw.randrange(0, 2_000), turn).to(dtype)
    wanted = whole(model, samples)
    at_once = told(heard(model, samples, [len(samples) or 1])[0])
    greedy = decode(wanted.float().log_softmax(-1), blank=model.config.blank)
    assert [text for text, *_ in at_once] == [str(one.id) for one in greedy]
    assert [start for _, start, *_ in at_once] == pytest.approx(
        [one.start * model.config.frame_seconds for one in greedy]
    )
    for _ in range(EACH):
        sizes = [draw.choice([1, 3, 19, 20, 40, 41, 317, 4_001]) + 2 * draw.randrange(10) for _ in range(5)]
        events, logits = heard(model, samples, sizes)
        assert told(events) == at_once
        same(logits, wanted)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for a few roundings of the numbers on the way, which are of the size of the largest."""
    assert found.shape == wanted.shape
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    bound = 64 * torch.finfo(wanted.dtype).eps * max(largest, 1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


def test_the_model_in_the_box_hears_the_recording_in_any_pieces():
    model = hub.pipeline("spoken-digits").model
    samples = read(Path(__file__).parents[2] / "docs" / "sounds" / "pi.wav").samples
    events, logits = heard(model, samples, [1_009, 160, 37, 4_001])
    assert "".join(event.text for event in events) == "314159"
    assert told(events) == told(heard(model, samples, [len(samples)])[0])
    same(logits, whole(model, samples))


@pytest.mark.parametrize("beam", [1, 4])
def test_pieces_do_not_matter_to_a_beam_either(beam):
    model = speech(MASKS["window"])
    samples = sound(6_007)
    wanted = heard(model, samples, [len(samples)], beam)[0]
    assert len(wanted) > 5
    assert told(heard(model, samples, [31, 400, 1], beam)[0]) == told(wanted)


def test_an_event_has_its_moments_and_is_told_when_they_are_known():
    """Every event comes with the very sample that makes it known, and neither before nor after."""
    for name in ("window", "chunks"):
        model, samples = speech(MASKS[name]), sound(1_201)
        listener, rate = StreamingRecognizer(model), model.config.mel.sample_rate
        for n, sample in enumerate(samples, 1):
            for event in listener.push(sample[None]):
                assert event.emitted_at == pytest.approx(n / rate)
                assert 0 <= event.start < event.end <= event.emitted_at
                assert event.log_prob < 0
        for event in listener.flush():
            assert event.emitted_at == pytest.approx(len(samples) / rate)


def test_under_a_mask_without_end_everything_is_told_at_the_end():
    model, samples = speech(MASKS["full"]), sound(2_003)
    listener = StreamingRecognizer(model)
    assert listener.push(samples) == []
    events = listener.flush()
    assert events
    assert {event.emitted_at for event in events} == {2_003 / model.config.mel.sample_rate}


def test_a_listener_begins_anew_after_the_end():
    model, samples = speech(MASKS["window"]), sound(2_003)
    listener = StreamingRecognizer(model)
    first, second = ([*listener.push(samples), *listener.flush()] for _ in range(2))
    assert first
    assert first == second


def test_silence_after_the_end_is_heard_and_is_no_part_of_the_sound():
    model, samples = speech(MASKS["window"]), sound(2_003)
    rate = model.config.mel.sample_rate
    plain, patient = StreamingRecognizer(model), StreamingRecognizer(model, tail_seconds=0.1)
    wanted = [*plain.push(torch.cat((samples, torch.zeros(rate // 10)))), *plain.flush()]
    found = [*patient.push(samples), *patient.flush()]
    assert [one.text for one in found] == [one.text for one in wanted]
    assert max(one.emitted_at for one in found) <= 2_003 / rate
    assert patient.flush() == []


@pytest.mark.parametrize("n", [0, 1, 49, 50, 69])
def test_what_is_too_short_for_a_moment_says_nothing(n):
    listener = StreamingRecognizer(speech(MASKS["window"]))
    assert [*listener.push(torch.zeros(n)), *listener.flush()] == []


def tensors(value: object, seen: set[int]) -> int:
    """The bytes of all tensors that an object holds, however deep."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(tensors(part, seen) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensors(part, seen) for part in value)
    return tensors(vars(value), seen) if hasattr(value, "__dict__") else 0


@pytest.mark.measured
@pytest.mark.parametrize("name", ["window", "chunks"])
def test_memory_stays_flat_for_an_hour(name, monkeypatch):
    """Of the tensors that a listener holds; the model has few moments a second here, and as many as an hour has."""
    monkeypatch.setattr("clearhead.hub.speech._PIECE", 60.0)
    coarse = Mel(sample_rate=1_000, window=100, hop=100, n_fft=128, n_mels=3, low=20.0)
    model = speech(MASKS[name], mel=coarse, frame_stacking=2, n_layers=1)
    listener, piece, held = (
        StreamingRecognizer(model),
        sound(9_970),
        [],
    )  # where pieces end repeats itself after 60 of them
    for _ in range(3_600 * 1_000 // len(piece)):
        listener.push(piece)
        held.append(tensors(listener, set()))
    assert listener._cache.n_evicted > 17_900  # moments of an hour, but for the last
    assert max(held[-60:]) == max(held[60:120])


@pytest.mark.bad_input
def test_what_cannot_be_heard_is_refused():
    listener = StreamingRecognizer(speech(MASKS["window"]))
    with pytest.raises(ValueError, match="samples have shape"):
        listener.push(torch.zeros(2, 50))
    with pytest.raises(TypeError, match="from −1 to 1"):
        listener.push(torch.zeros(50, dtype=torch.int16))
    with pytest.raises(ConfigError, match="beam is 0"):
        StreamingRecognizer(speech(MASKS["window"]), beam=0)


class TestTheShippedModel:
    @pytest.mark.parametrize("loud", [0.0, 1e-4, 1e-2, 0.1])
    def test_silence_and_noise_say_nothing(self, loud):
        listener = hub.pipeline("spoken-digits").listen()
        noise = torch.randn(3 * listener.rate, generator=torch.Generator().manual_seed(5))
        assert [*listener.push(loud * noise), *listener.flush()] == []

    def test_it_keeps_its_goals_by_its_card(self):
        """Measured on recordings that nothing was trained on, by `tools/card.py`."""
        metrics = hub.cards()["spoken-digits"]["metrics"]
        assert metrics["greedy"]["accuracy"] >= 0.985
        assert metrics["streams"]["digit_error_rate"] <= 0.03
        assert metrics["streams"]["latency_95"] <= 0.3
        size = sum(path.stat().st_size for path in (hub.BUNDLED_FOLDER / "spoken-digits").iterdir())
        assert size <= 6e6
