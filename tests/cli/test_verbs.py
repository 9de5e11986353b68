"""`embed`, `transcribe` and `generate --chat` on tiny models of other people."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clearhead import hub
from tests.hub.test_chat_template import TEMPLATES
from tests.hub.test_chat_template import folder as talker  # noqa: F401 (a fixture)
from tests.hub.test_text_generation import reader  # noqa: F401 (a fixture)
from tests.hub.test_transcribe import save_whisper


def test_embed(cli, reader, tmp_path):  # noqa: F811
    texts = ["the quick brown fox", "dog", "the quick brown fox the", "the lazy dog"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    made = hub.pipeline(reader).embed(texts)
    unit = torch.nn.functional.normalize(made, dim=1)
    pairs = sorted(((unit[i] @ unit[j]).item(), texts[i], texts[j]) for i in range(4) for j in range(i + 1, 4))[::-1]
    out, other = tmp_path / "sub" / "v.npz", tmp_path / "v.safetensors"
    given = ("embed", tmp_path / "texts.txt", "--model", reader)
    found = cli(*given, "--json", "--out", out).json
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [pair[1:] for pair in pairs]
    assert found["pairs"][0]["similarity"] == pytest.approx(pairs[0][0])
    stored = np.load(out)
    assert stored["texts"].tolist() == texts
    torch.testing.assert_close(torch.tensor(stored["vectors"]), made)
    printed = cli(*given, "--pairs", 1, "--out", other).out
    assert f"{pairs[0][0]:.3f}" in printed
    assert f"4 vectors of dimension {made.shape[1]}" in printed
    torch.testing.assert_close(load_file(other)["vectors"], made)
    assert "end it in .npz, .safetensors" in cli(*given, "--out", tmp_path / "v.txt").err
    assert "expected an Encoder" in cli("embed", tmp_path / "texts.txt", "--model", "shakespeare").err


def test_transcribe(cli, tmp_path):
    import soundfile

    _, folder = save_whisper(tmp_path / "model", 1)
    sound = np.random.default_rng(5).uniform(-0.5, 0.5, 9_000).astype(np.float32)
    soundfile.write(tmp_path / "talk.flac", sound, 8_000)
    wanted = hub.pipeline(folder).transcribe(tmp_path / "talk.flac")
    given = ("transcribe", tmp_path / "talk.flac", "--model", folder)
    (found,) = cli(*given, "--json").json
    assert (found["text"], found["seconds"]) == (wanted.text, wanted.seconds)
    assert [part["text"] for part in found["segments"]] == [part.text for part in wanted.segments]
    ran = cli(*given)
    assert ran.out.splitlines()[0].startswith(f"0:{wanted.segments[0].start:05.2f} – 0:")
    assert "resampled from 8,000 to 16,000 Hz" in ran.err
    assert "–" not in cli(*given, "--no-timestamps").out
    assert "cannot be read" in cli("transcribe", tmp_path / "none.wav", "--model", folder).err


def test_chat(cli, talker):  # noqa: F811
    (talker / "chat_template.jinja").write_text(TEMPLATES["im_start"])
    wanted = hub.pipeline(talker).chat([{"role": "user", "content": "dog"}], max_new_tokens=5)
    given = ("generate", "dog", "--chat", "--model", talker, "--max-new-tokens", 5)
    assert cli(*given, "--json").json["text"] == wanted
    assert cli(*given).out == wanted + "\n"
    assert "has no chat template" in cli("generate", "dog", "--chat").err
