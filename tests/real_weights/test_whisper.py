"""Whisper tiny.en: known transcripts; features, logits, ids, words and times match transformers."""

from __future__ import annotations

import pytest
import torch

from clearhead import hub
from clearhead.analysis import trace
from clearhead.data.audio import read_audio
from clearhead.nn.mel import Mel

SENTENCE = "My name is Alice and I live in London. It is nine o'clock in the morning, and the sun is shining."
STORY = (
    "The north wind and the sun were arguing about which of them was the stronger, when a traveller came along the "
    "road, wrapped in a warm coat. They agreed that the one who first made the traveller take off his coat should be "
    "called the stronger. Then the north wind blew as hard as he could, but the more he blew, the more closely did the "
    "traveller fold his coat around him; and at last the north wind gave up. Then the sun shone out warmly, and at "
    "once the traveller took off his coat. And so the north wind had to admit that the sun was the stronger of the two."
)


@pytest.fixture(scope="module")
def model(whisper):
    return hub.pipeline(whisper)


@pytest.fixture(scope="module")
def reference(whisper):
    transformers = pytest.importorskip("transformers")
    model_class = transformers.WhisperForConditionalGeneration
    reference, report = model_class.from_pretrained(whisper, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    return reference.eval()


def compute_reference_features(path):
    """Return the samples of a file, and the features that transformers computes."""
    samples = read_audio(path, 16_000).samples
    return samples, compute_features_of_samples(samples)


def compute_features_of_samples(samples):
    """Return the features that transformers computes."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor()
    options = {"sampling_rate": 16_000, "return_tensors": "pt", "return_attention_mask": True}
    if len(samples) > extractor.n_samples:
        options |= {"truncation": False, "padding": "longest"}
    return extractor(samples.numpy(), **options)


def test_features_logits_and_attention_match_transformers(model, reference, synthesize_speech):
    samples, inputs = compute_reference_features(synthesize_speech(SENTENCE))
    frames = Mel.whisper()(torch.nn.functional.pad(samples, (0, 480_000 - len(samples)))[None])
    features_error = (frames.transpose(1, 2) - inputs["input_features"]).abs().max().item()
    target = torch.tensor([[50257, 50362, 2011, 1438, 318]])
    with torch.no_grad(), trace(model.model) as t:
        actual = model.model(frames, target)
        expected = reference(inputs["input_features"], decoder_input_ids=target, output_attentions=True)
    error, largest = (actual - expected.logits).abs().max().item(), expected.logits.abs().max().item()
    cross = [t.weights(f"decoder.blocks.{i}.cross_attention") for i in range(4)]
    weights_error = max((a - b).abs().max().item() for a, b in zip(cross, expected.cross_attentions, strict=True))
    print(
        f"\nfeatures differ by {features_error:.1e}, logits by {error:.1e} of {largest:.1f}, "
        f"weights by {weights_error:.1e}"
    )
    assert features_error <= 1e-3
    assert error <= 1e-3 * largest
    assert weights_error <= 1e-3


@pytest.mark.parametrize("voice", ["en-us", "en-gb"])
def test_transcribe_synthesized_speech_matches_transformers(model, reference, synthesize_speech, voice):
    path = synthesize_speech(SENTENCE, voice)
    transcript = model.transcribe(path)
    print(f"\nspoken:     {SENTENCE}\ntranscript: {transcript.text}")
    for segment in transcript.segments:
        print(f"  {segment.start:5.2f} – {segment.end:5.2f}  {segment.text}")
    _, inputs = compute_reference_features(path)
    reference_segments = reference.generate(**inputs, return_timestamps=True, return_segments=True, do_sample=False)[
        "segments"
    ][0]
    assert [(segment.start, segment.end) for segment in transcript.segments] == [
        (round(float(segment["start"]), 2), round(float(segment["end"]), 2)) for segment in reference_segments
    ]
    ids = [id_ for segment in reference_segments for id_ in segment["tokens"].tolist() if id_ < 50256]
    assert transcript.text == " ".join(model.tokenizer.decode(ids).split())
    words = set(transcript.text.lower().replace(",", " ").replace(".", " ").split())
    assert {"my", "name", "is", "alice", "london", "morning", "sun"} <= words


def test_transcribe_several_windows_matches_transformers(model, reference, synthesize_speech):
    path = synthesize_speech(STORY)
    transcript = model.transcribe(path)
    print(f"\n{transcript.seconds:.1f} s, {len(transcript.segments)} segments: {transcript.text}")
    assert transcript.seconds > 30
    ends = [segment.end for segment in transcript.segments]
    assert ends == sorted(ends)
    assert transcript.seconds - 2 < ends[-1] <= transcript.seconds + 1
    spoken, recognized = STORY.lower().split(), set(transcript.text.lower().split())
    share = sum(word in recognized for word in spoken) / len(spoken)
    print(f"{share:.0%} of the spoken words were recognized")
    assert share > 0.6
    _, inputs = compute_reference_features(path)
    options = {
        "return_timestamps": True,
        "return_segments": True,
        "do_sample": False,
        "condition_on_prev_tokens": False,
    }
    reference_segments = reference.generate(**inputs, **options)["segments"][0]
    # transformers pads the last window with a constant, clearhead with silence; earlier windows are equal.
    expected_starts = [round(float(segment["start"]), 2) for segment in reference_segments]
    starts = [segment.start for segment in transcript.segments]
    n = sum(start < 30 for start in expected_starts)
    print(f"transformers finds {len(reference_segments)} segments; the first {n} of both start at {starts[:n]}")
    assert expected_starts[:n] == starts[:n]
    batch = model.transcribe([path, path])
    assert batch[0] == batch[1] == transcript


@pytest.mark.parametrize("speaker", ["george", "jackson", "lucas", "nicolas", "theo", "yweweler"])
def test_transcribe_recorded_digits_matches_transformers(model, reference, digits, speaker):
    """Digits of six speakers, concatenated with pauses; the text and the times are those of transformers."""
    digits_spoken = "31415926"
    parts = []
    for number, digit in enumerate(digits_spoken, start=10):
        parts += [read_audio(digits / f"{digit}_{speaker}_{number}.wav", 16_000).samples, torch.zeros(6_400)]
    samples = torch.cat(parts)
    transcript = model.transcribe(samples)
    text = transcript.text
    inputs = compute_features_of_samples(samples)
    options = {"return_timestamps": True, "return_segments": True, "do_sample": False}
    segments = reference.generate(**inputs, **options)["segments"][0]
    ids = [id_ for segment in segments for id_ in segment["tokens"].tolist() if id_ < 50256]
    assert text == " ".join(model.tokenizer.decode(ids).split())
    assert [segment.start for segment in transcript.segments] == [
        round(float(segment["start"]), 2) for segment in segments
    ]
    print(f"\n{speaker}: spoken {' '.join(digits_spoken)}; transcript: {text}")
    names = dict(
        zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
    )
    words = text.lower().replace(",", " ").replace(".", " ").split()
    n_correct = sum(digit in words or names[digit] in words for digit in set(digits_spoken))
    assert n_correct >= len(set(digits_spoken)) - 2
