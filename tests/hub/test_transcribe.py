"""Transcription: ids, segments and windows equal those of transformers' Whisper, with tiny random models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from clearhead import hub
from clearhead.errors import DataError
from clearhead.generation import Greedy
from clearhead.hub.speech import _RecordingState, _WindowedTranscriber
from tests.support.whisper import (
    END,
    FEATURES,
    GENERATION,
    LANGUAGE_IDS,
    TASK,
    save_whisper,
)


def reference_generate(reference, frames, generation=GENERATION, **options):
    """Generate with transformers."""
    from transformers import GenerationConfig

    reference.generation_config = GenerationConfig(**generation)
    inputs = {"input_features": frames.transpose(1, 2), "return_segments": True, **options}
    mask = torch.ones(frames.shape[:2], dtype=torch.long)
    return reference.generate(**inputs, attention_mask=mask, do_sample=False, condition_on_prev_tokens=False)


@pytest.mark.parametrize("seed", [3, 6, 10])  # windows that end before they are full
def test_transcribe_windows_and_ids_match_transformers(tmp_path, seed):
    reference, folder = save_whisper(tmp_path, seed)
    length, frames = 75, 3 * torch.randn(2, 75, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    transcriber = _WindowedTranscriber(trained, True, Greedy())
    silence = torch.zeros(2, transcriber.window, FEATURES, dtype=torch.float64)  # transformers pads windows with it
    states = [_RecordingState(x, length, 0.0, ()) for x in torch.cat((frames, silence), 1)]
    transcriber.run(states, None)
    positions = []
    for state, expected in zip(
        states, reference_generate(reference, frames, return_timestamps=True)["segments"], strict=True
    ):
        times = [tuple(2 * round(float(segment[end]) / 0.02) for end in ("start", "end")) for segment in expected]
        assert [segment[:2] for segment in state.segments] == times
        for (*_, ids), segment in zip(state.segments, expected, strict=True):
            # In transformers the last segment of a window ends with the start of the next one.
            assert segment["tokens"].tolist()[: len(ids)] == ids
        positions.append(state.position)
    assert any((position - length) % transcriber.window for position in positions), "every window was full"


def test_transcribe_without_timestamps_matches_transformers(tmp_path):
    reference, folder = save_whisper(tmp_path, 3)
    frames = torch.randn(1, 34, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    transcriber = _WindowedTranscriber(trained, False, Greedy())
    (ids,) = transcriber._generate(frames, None)
    expected = reference_generate(reference, frames, return_timestamps=False)["sequences"][0].tolist()
    assert expected[: len(ids)] == ids
    assert set(expected[len(ids) :]) <= {END}
    assert len(ids) > 3


def test_multilingual_model_detects_language_like_transformers(tmp_path):
    multilingual = GENERATION | {
        "is_multilingual": True,
        "lang_to_id": LANGUAGE_IDS,
        "task_to_id": {"transcribe": TASK, "translate": TASK},
    }
    reference, folder = save_whisper(tmp_path, 3, multilingual)
    frames = torch.randn(3, 34, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    transcriber = _WindowedTranscriber(trained, True, Greedy())
    states = [_RecordingState(torch.cat((x, torch.zeros(34, FEATURES))), 34, 0.0, ()) for x in frames]
    transcriber.run(states, None)
    from transformers import GenerationConfig

    expected = reference.detect_language(
        frames.transpose(1, 2), generation_config=GenerationConfig(**multilingual)
    ).tolist()
    assert [LANGUAGE_IDS[state.language] for state in states] == expected
    with pytest.raises(DataError, match="'de' is not known; expected one of: en, fr"):
        trained.transcribe(torch.zeros(100), language="de")


def test_transcribe_file_equals_its_samples(tmp_path):
    _, folder = save_whisper(tmp_path / "model", 1)
    trained = hub.pipeline(folder)
    sound = np.random.default_rng(5).uniform(-0.5, 0.5, 16_000).astype(np.float32)
    import soundfile

    soundfile.write(tmp_path / "sound.wav", sound, 16_000, subtype="FLOAT")
    got = trained.transcribe([tmp_path / "sound.wav", torch.tensor(sound[:3000])])
    assert got[0] == trained.transcribe(str(tmp_path / "sound.wav"))
    assert got[0] == trained.transcribe(torch.tensor(sound))
    assert got[0].seconds == 1.0
    assert got[0].text == str(got[0])
    # Features computed by transformers give the same transcript.
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=FEATURES)
    frames = torch.tensor(extractor(sound, sampling_rate=16_000, return_tensors="np")["input_features"][0].T)
    transcriber = _WindowedTranscriber(trained, True, Greedy())
    state = _RecordingState(frames, 100, 1.0, ())
    transcriber.run([state], None)
    assert transcriber.transcript(state).segments == got[0].segments
    assert got[0].segments


@pytest.mark.bad_input
def test_transcribe_invalid_input_raises_data_error(tmp_path):
    _, folder = save_whisper(tmp_path / "model", 1)
    trained = hub.pipeline(folder)
    with pytest.raises(DataError, match="not empty"):
        trained.transcribe(torch.zeros(0))
    with pytest.raises(DataError, match="supports English only"):
        trained.transcribe(torch.zeros(100), language="fr")
    with pytest.raises(DataError, match="was trained for transcription"):
        trained.generate("hello")
    with pytest.raises(DataError, match="this needs a model for transcription"):
        hub.pipeline("shakespeare").transcribe(torch.zeros(100))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    with pytest.raises(DataError, match="no_timestamps_token_id"):
        hub.pipeline(folder).transcribe(torch.zeros(100))
