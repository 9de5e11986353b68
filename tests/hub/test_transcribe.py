"""Speech to text: ids, segments and windows are those of transformers' own Whisper, on tiny random models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from clearhead import hub
from clearhead.errors import DataError
from clearhead.generation import Greedy
from clearhead.hub.speech import _RecordingState, _Speech
from tests.support.third_party_models import PEERS, Hearing

TEXT, MOMENTS, FEATURES = 19, 17, 80
END, START, LANGUAGES, TASK, NO_TIMES = TEXT, TEXT + 1, {"<|en|>": TEXT + 2, "<|fr|>": TEXT + 3}, TEXT + 4, TEXT + 5
V = NO_TIMES + 1 + MOMENTS + 1
GENERATION = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "no_timestamps_token_id": NO_TIMES,
    "max_initial_timestamp_index": 5,
    "is_multilingual": False,
    "suppress_tokens": [3, START, TASK, *LANGUAGES.values()],
    "begin_suppress_tokens": [4, END],
    "max_length": 13,
}


def folder_of(path, seed, generation=GENERATION):
    """A tiny Whisper, its maker's model and the folder, with a tokenizer of letters."""
    from tokenizers import Tokenizer, decoders, models

    sizes = PEERS["whisper"].sizes | {
        "vocab_size": V,
        "num_mel_bins": FEATURES,
        "max_source_positions": MOMENTS,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END),
        "decoder_start_token_id": START,
    }
    torch.manual_seed(seed)
    theirs = Hearing("WhisperForConditionalGeneration", "WhisperConfig", sizes).build()
    theirs.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(generation))
    names = [chr(ord("a") + i) for i in range(TEXT)] + [f"<|{i}|>" for i in range(TEXT, V)]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    inner.decoder = decoders.Fuse()
    inner.save(str(path / "tokenizer.json"))
    return theirs, path


def generated(theirs, frames, generation=GENERATION, **how):
    from transformers import GenerationConfig

    theirs.generation_config = GenerationConfig(**generation)
    given = {"input_features": frames.transpose(1, 2), "return_segments": True, **how}
    mask = torch.ones(frames.shape[:2], dtype=torch.long)
    return theirs.generate(**given, attention_mask=mask, do_sample=False, condition_on_prev_tokens=False)


@pytest.mark.parametrize("seed", [3, 6, 10])  # where windows end before they are full
def test_windows_ids_and_segments_are_those_of_transformers(tmp_path, seed):
    theirs, folder = folder_of(tmp_path, seed)
    length, frames = 75, 3 * torch.randn(2, 75, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    speech = _Speech(trained, True, Greedy())
    quiet = torch.zeros(2, speech.window, FEATURES, dtype=torch.float64)  # as transformers fills up a window
    heard = [_RecordingState(x, length, 0.0, ()) for x in torch.cat((frames, quiet), 1)]
    speech.hear(heard, None)
    moved = []
    for one, wanted in zip(heard, generated(theirs, frames, return_timestamps=True)["segments"], strict=True):
        times = [tuple(2 * round(float(segment[end]) / 0.02) for end in ("start", "end")) for segment in wanted]
        assert [part[:2] for part in one.parts] == times
        for (*_, ids), segment in zip(one.parts, wanted, strict=True):
            # Theirs has the beginning of the next segment at the end of a window's last one.
            assert segment["tokens"].tolist()[: len(ids)] == ids
        moved.append(one.at)
    assert any((at - length) % speech.window for at in moved), "every window was full, so the test would say little"


def test_without_times(tmp_path):
    theirs, folder = folder_of(tmp_path, 3)
    frames = torch.randn(1, 34, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    speech = _Speech(trained, False, Greedy())
    (ids,) = speech._written(frames, None)
    wanted = generated(theirs, frames, return_timestamps=False)["sequences"][0].tolist()
    assert wanted[: len(ids)] == ids
    assert set(wanted[len(ids) :]) <= {END}
    assert len(ids) > 3


def test_a_model_of_many_languages_hears_which(tmp_path):
    several = GENERATION | {
        "is_multilingual": True,
        "lang_to_id": LANGUAGES,
        "task_to_id": {"transcribe": TASK, "translate": TASK},
    }
    theirs, folder = folder_of(tmp_path, 3, several)
    frames = torch.randn(3, 34, FEATURES, dtype=torch.float64)
    trained = hub.pipeline(folder, dtype=torch.float64)
    speech = _Speech(trained, True, Greedy())
    heard = [_RecordingState(torch.cat((x, torch.zeros(34, FEATURES))), 34, 0.0, ()) for x in frames]
    speech.hear(heard, None)
    from transformers import GenerationConfig

    found = theirs.detect_language(frames.transpose(1, 2), generation_config=GenerationConfig(**several)).tolist()
    assert [LANGUAGES[one.language] for one in heard] == found
    with pytest.raises(DataError, match="'de' is not known; expected one of: en, fr"):
        trained.transcribe(torch.zeros(100), language="de")


def test_a_file_is_heard(tmp_path):
    _, folder = folder_of(tmp_path / "model", 1)
    trained = hub.pipeline(folder)
    sound = np.random.default_rng(5).uniform(-0.5, 0.5, 16_000).astype(np.float32)
    import soundfile

    soundfile.write(tmp_path / "sound.wav", sound, 16_000, subtype="FLOAT")
    got = trained.transcribe([tmp_path / "sound.wav", torch.tensor(sound[:3000])])
    assert got[0] == trained.transcribe(str(tmp_path / "sound.wav"))
    assert got[0] == trained.transcribe(torch.tensor(sound))
    assert got[0].seconds == 1.0
    assert got[0].text == str(got[0])
    # The samples' own features, by the recipe of Whisper's maker, lead to the same words.
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=FEATURES)
    frames = torch.tensor(extractor(sound, sampling_rate=16_000, return_tensors="np")["input_features"][0].T)
    speech = _Speech(trained, True, Greedy())
    heard = _RecordingState(frames, 100, 1.0, ())
    speech.hear([heard], None)
    assert speech.transcript(heard).segments == got[0].segments
    assert got[0].segments


@pytest.mark.bad_input
def test_what_cannot_be_heard_is_refused(tmp_path):
    _, folder = folder_of(tmp_path / "model", 1)
    trained = hub.pipeline(folder)
    with pytest.raises(DataError, match="not empty"):
        trained.transcribe(torch.zeros(0))
    with pytest.raises(DataError, match="knows English alone"):
        trained.transcribe(torch.zeros(100), language="fr")
    with pytest.raises(DataError, match="was trained for transcription"):
        trained.generate("hello")
    with pytest.raises(DataError, match="this needs a model for transcription"):
        hub.pipeline("shakespeare").transcribe(torch.zeros(100))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    with pytest.raises(DataError, match="no_timestamps_token_id"):
        hub.pipeline(folder).transcribe(torch.zeros(100))
