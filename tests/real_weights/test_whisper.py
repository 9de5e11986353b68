"""Whisper tiny.en: what it hears, and that its numbers, ids, words and times are those of transformers."""

from __future__ import annotations

import pytest
import torch

from clearhead import hub
from clearhead.analysis import trace
from clearhead.data.audio import read_audio
from clearhead.nn.mel import Mel

SAID = "My name is Alice and I live in London. It is nine o'clock in the morning, and the sun is shining."
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
def peer(whisper):
    transformers = pytest.importorskip("transformers")
    kind = transformers.WhisperForConditionalGeneration
    theirs, report = kind.from_pretrained(whisper, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    return theirs.eval()


def features(path):
    transformers = pytest.importorskip("transformers")
    samples = read_audio(path, 16_000).samples
    extractor = transformers.WhisperFeatureExtractor()
    how = {"sampling_rate": 16_000, "return_tensors": "pt", "return_attention_mask": True}
    if len(samples) > extractor.n_samples:
        how |= {"truncation": False, "padding": "longest"}
    return samples, extractor(samples.numpy(), **how)


def test_features_logits_and_attention_are_those_of_transformers(model, peer, speak):
    samples, given = features(speak(SAID))
    frames = Mel.whisper()(torch.nn.functional.pad(samples, (0, 480_000 - len(samples)))[None])
    apart = (frames.transpose(1, 2) - given["input_features"]).abs().max().item()
    target = torch.tensor([[50257, 50362, 2011, 1438, 318]])
    with torch.no_grad(), trace(model.model) as seen:
        got = model.model(frames, target)
        wanted = peer(given["input_features"], decoder_input_ids=target, output_attentions=True)
    worst, largest = (got - wanted.logits).abs().max().item(), wanted.logits.abs().max().item()
    cross = [seen.weights(f"decoder.blocks.{i}.cross_attention") for i in range(4)]
    heads = max((a - b).abs().max().item() for a, b in zip(cross, wanted.cross_attentions, strict=True))
    print(f"\nfeatures differ by {apart:.1e}, logits by {worst:.1e} of {largest:.1f}, cross-attention by {heads:.1e}")
    assert apart <= 1e-3
    assert worst <= 1e-3 * largest
    assert heads <= 1e-3


@pytest.mark.parametrize("voice", ["en-us", "en-gb"])
def test_it_hears_what_espeak_says(model, peer, speak, voice):
    path = speak(SAID, voice)
    transcript = model.transcribe(path)
    print(f"\nsaid:  {SAID}\nheard: {transcript.text}")
    for part in transcript.segments:
        print(f"  {part.start:5.2f} – {part.end:5.2f}  {part.text}")
    _, given = features(path)
    made = peer.generate(**given, return_timestamps=True, return_segments=True, do_sample=False)["segments"][0]
    assert [(part.start, part.end) for part in transcript.segments] == [
        (round(float(segment["start"]), 2), round(float(segment["end"]), 2)) for segment in made
    ]
    ids = [id_ for segment in made for id_ in segment["tokens"].tolist() if id_ < 50256]
    assert transcript.text == " ".join(model.tokenizer.decode(ids).split())
    heard = set(transcript.text.lower().replace(",", " ").replace(".", " ").split())
    assert {"my", "name", "is", "alice", "london", "morning", "sun"} <= heard


def test_a_recording_of_several_windows(model, peer, speak):
    path = speak(STORY)
    transcript = model.transcribe(path)
    print(f"\n{transcript.seconds:.1f} s, {len(transcript.segments)} segments: {transcript.text}")
    assert transcript.seconds > 30
    ends = [part.end for part in transcript.segments]
    assert ends == sorted(ends)
    assert transcript.seconds - 2 < ends[-1] <= transcript.seconds + 1
    words, heard = STORY.lower().split(), set(transcript.text.lower().split())
    share = sum(word in heard for word in words) / len(words)
    print(f"{share:.0%} of the words that were said are among those that were heard")
    assert share > 0.6
    _, given = features(path)
    how = {"return_timestamps": True, "return_segments": True, "do_sample": False, "condition_on_prev_tokens": False}
    made = peer.generate(**given, **how)["segments"][0]
    # The last window is filled up with a constant there, and with silence here; those before are the same.
    theirs = [round(float(segment["start"]), 2) for segment in made]
    ours = [part.start for part in transcript.segments]
    n = sum(start < 30 for start in theirs)
    print(f"transformers hears {len(made)} segments; the first {n} of both begin at {ours[:n]}")
    assert theirs[:n] == ours[:n]
    together = model.transcribe([path, path])
    assert together[0] == together[1] == transcript


@pytest.mark.parametrize("speaker", ["george", "jackson", "lucas", "nicolas", "theo", "yweweler"])
def test_it_hears_people(model, digits, speaker):
    """Digits that six people have spoken, put together with pauses."""
    said = "31415926"
    parts = []
    for number, digit in enumerate(said, start=10):
        parts += [read_audio(digits / f"{digit}_{speaker}_{number}.wav", 16_000).samples, torch.zeros(6_400)]
    heard = model.transcribe(torch.cat(parts)).text
    print(f"\n{speaker} says {' '.join(said)}; heard: {heard}")
    names = dict(
        zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
    )
    words = heard.lower().replace(",", " ").replace(".", " ").split()
    right = sum(digit in words or names[digit] in words for digit in set(said))
    assert right >= len(set(said)) - 2
