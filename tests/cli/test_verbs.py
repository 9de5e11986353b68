"""`embed`, `transcribe` and `generate --chat` with tiny third-party models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clearhead import hub
from tests.support.tokenizers import save_chat_model, save_text_encoder
from tests.support.whisper import save_whisper

CHAT_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"


def test_embed_writes_vectors_and_lists_similar_pairs(cli, tmp_path):
    reader = save_text_encoder(tmp_path / "reader")
    texts = ["the quick brown fox", "dog", "the quick brown fox the", "the lazy dog"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    vectors = hub.pipeline(reader).embed(texts)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    pairs = sorted(((unit[i] @ unit[j]).item(), texts[i], texts[j]) for i in range(4) for j in range(i + 1, 4))[::-1]
    npz_path, safetensors_path = tmp_path / "sub" / "v.npz", tmp_path / "v.safetensors"
    arguments = ("embed", tmp_path / "texts.txt", "--model", reader)
    result = cli(*arguments, "--json", "--out", npz_path).json
    assert [(pair["a"], pair["b"]) for pair in result["pairs"]] == [pair[1:] for pair in pairs]
    assert result["pairs"][0]["similarity"] == pytest.approx(pairs[0][0])
    stored = np.load(npz_path)
    assert stored["texts"].tolist() == texts
    torch.testing.assert_close(torch.tensor(stored["vectors"]), vectors)
    printed = cli(*arguments, "--pairs", 1, "--out", safetensors_path).out
    assert f"{pairs[0][0]:.3f}" in printed
    assert f"4 vectors of dimension {vectors.shape[1]}" in printed
    torch.testing.assert_close(load_file(safetensors_path)["vectors"], vectors)
    assert cli(*arguments, "--out", tmp_path / "V.NPZ").code == 0
    assert np.load(tmp_path / "V.NPZ")["texts"].tolist() == texts
    missing = cli("embed", tmp_path / "texts.txt", "--model", "nowhere", "--out", npz_path)
    assert missing.err.startswith("clearhead: 'nowhere' is not a bundled model")
    assert "end it in .npz, .safetensors" in cli(*arguments, "--out", tmp_path / "v.txt").err
    assert "expected an Encoder" in cli("embed", tmp_path / "texts.txt", "--model", "shakespeare").err


def test_transcribe_prints_segments_and_text(cli, tmp_path):
    import soundfile

    _, folder = save_whisper(tmp_path / "model", 1)
    sound = np.random.default_rng(5).uniform(-0.5, 0.5, 9_000).astype(np.float32)
    soundfile.write(tmp_path / "talk.flac", sound, 8_000)
    expected = hub.pipeline(folder).transcribe(tmp_path / "talk.flac")
    arguments = ("transcribe", tmp_path / "talk.flac", "--model", folder)
    (result,) = cli(*arguments, "--json").json
    assert (result["text"], result["seconds"]) == (expected.text, expected.seconds)
    assert [part["text"] for part in result["segments"]] == [part.text for part in expected.segments]
    ran = cli(*arguments)
    assert ran.out.splitlines()[0].startswith(f"0:{expected.segments[0].start:05.2f} – 0:")
    assert "resampled from 8,000 to 16,000 Hz" in ran.err
    assert "–" not in cli(*arguments, "--no-timestamps").out
    assert "cannot be read" in cli("transcribe", tmp_path / "none.wav", "--model", folder).err


def test_generate_chat_uses_the_chat_template(cli, tmp_path):
    chat_folder = save_chat_model(tmp_path / "model")
    (chat_folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    expected = hub.pipeline(chat_folder).chat([{"role": "user", "content": "dog"}], max_new_tokens=5)
    arguments = ("generate", "dog", "--chat", "--model", chat_folder, "--max-new-tokens", 5)
    assert cli(*arguments, "--json").json["text"] == expected
    assert cli(*arguments).out == expected + "\n"
    assert "has no chat template" in cli("generate", "dog", "--chat").err
