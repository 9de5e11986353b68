"""`clearhead listen`: files and pipes, printed events, attention pages, and rejected input."""

from __future__ import annotations

import io
import json
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead import hub
from clearhead.data.audio import read_audio
from clearhead.masks import causal, window
from clearhead.models import save_checkpoint
from clearhead.training.presets import speech_small

PI = Path(__file__).parents[2] / "docs" / "sounds" / "pi.wav"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Return the folder of an untrained model, which emits random digits."""
    torch.manual_seed(3)
    small = {"d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 12, "frame_stacking": 3, "mean": -4.0, "std": 3.0}
    recipe = speech_small().with_overrides({f"model.{name}": value for name, value in small.items()})
    model, folder = recipe.model.build(), tmp_path_factory.mktemp("tiny")
    assert model.config.mask == causal() & window(64, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    save_checkpoint(model, folder)
    (folder / "train.toml").write_text(recipe.to_toml())
    return folder


def parse_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def recognize(folder: Path, samples: torch.Tensor) -> list[str]:
    listener = hub.pipeline(folder).listen()
    return [event.text for event in (*listener.push(samples), *listener.flush())]


def test_listen_prints_digits_and_real_time_factor(cli, tiny):
    expected = recognize(tiny, read_audio(PI).samples)
    assert len(expected) > 3
    ran = cli("listen", PI, "--model", tiny)
    assert ran.code == 0, ran.err
    *digits, last = ran.out.splitlines()
    assert [line[0] for line in digits] == expected
    assert all(" ended at " in line and " latency " in line and line.endswith("%") for line in digits)
    assert last.startswith("5.05 s of audio took ")
    assert "real-time factor" in last


def test_listen_json_prints_one_line_per_digit_and_a_summary(cli, tiny):
    ran = cli("listen", PI, "--model", tiny, "--json", "--beam", 3)
    *digits, last = parse_lines(ran.out)
    assert all(set(digit) == {"text", "start", "end", "emitted_at", "log_prob", "latency"} for digit in digits)
    assert [digit["start"] for digit in digits] == sorted(digit["start"] for digit in digits)
    assert set(last) == {"seconds", "computing", "real_time_factor", "notes"}
    assert last["seconds"] == pytest.approx(read_audio(PI).seconds)


def listen_to_pipe(cli, monkeypatch, data: bytes, *arguments: object):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return cli("listen", "-", *arguments)


def test_raw_samples_and_headers_of_unknown_size_equal_the_file(cli, tiny, monkeypatch):
    data, expected = PI.read_bytes(), recognize(tiny, read_audio(PI).samples)
    bare = listen_to_pipe(cli, monkeypatch, data[44:], "--model", tiny, "--json")
    assert [event["text"] for event in parse_lines(bare.out)[:-1]] == expected
    endless = data[:40] + struct.pack("<I", 0xFFFFFFFF) + data[44:]
    assert [
        event["text"]
        for event in parse_lines(listen_to_pipe(cli, monkeypatch, endless, "--model", tiny, "--json").out)[:-1]
    ] == expected


def test_listen_reports_channels_resampling_and_clipping(cli, tiny, monkeypatch):
    loud = (
        (torch.ones(2, 16_000).cumsum(1).remainder(2) * 65_535 - 32_768)
        .to(torch.int16)
        .T.contiguous()
        .numpy()
        .tobytes()
    )
    ran = listen_to_pipe(cli, monkeypatch, loud + b"!", "--model", tiny, "--sample-rate", 16_000, "--channels", 2)
    assert ran.code == 0, ran.err
    notes = [line for line in ran.out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: averaged 2 channels",
        "note: resampled from 16,000 to 8,000 Hz",
        "note: truncated within a sample: dropped the last 1 of 4 bytes",
        "note: clipped: 100.0% of the samples are at full scale; record with a lower level",
    ]


def test_listen_attention_draws_the_sound_and_the_map(cli, tiny, tmp_path):
    page = tmp_path / "pages" / "pi.html"
    ran = cli("listen", PI, "--model", tiny, "--attention", "--html", page)
    assert ran.code == 0, ran.err
    expected = recognize(tiny, read_audio(PI).samples)
    digits, drawing, footer = ran.out.split("\n\n")
    assert digits.splitlines()[-1] == f"written to {page}"
    assert len(drawing.splitlines()) == 12 + len(expected)
    assert [line.strip()[0] for line in drawing.splitlines()[12:]] == expected
    assert footer.startswith("Self-attention, layer 1, mean of 2 heads")
    text = page.read_text(encoding="utf-8")
    assert f"pi.wav → {' '.join(expected)}" in text
    assert '"grid":[1,' in text
    assert '"footer":"Made by clearhead. ' in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_inspect_accepts_audio_files(cli, tiny):
    ran = cli("inspect", tiny, PI, "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert result["title"].startswith("pi.wav → ")
    assert {layer["kind"] for layer in result["layers"]} == {"image"}
    assert "same row" not in result["layers"][0]["heads"][0]["scores"]  # the frames form a single row


@pytest.mark.bad_input
def test_invalid_audio_is_a_one_line_error(cli, tiny, tmp_path, monkeypatch):
    words = tmp_path / "words.wav"
    words.write_text("no sound at all")
    for arguments, message in [
        ((words,), "cannot be read as audio"),
        ((tmp_path / "nothing.wav",), "cannot be read: No such file"),
        ((PI, "--beam", 0), "--beam is 0; expected 1 to 1000"),
        ((PI, "--beam", 1_000_000), "--beam is 1000000; expected 1 to 1000"),
        ((PI, "--model", "sort-dedup"), "sort-dedup was trained for sort-dedup, and this needs a model for speech"),
    ]:
        ran = cli("listen", "--model", tiny, *arguments)
        assert ran.code == 1
        assert message in ran.err
        assert len(ran.err.splitlines()) == 1
    for data, arguments, message in [
        (b"", (), "standard input contains no samples"),
        (b"fLaC" + bytes(99), (), "standard input is fLaC, which cannot be read from a stream"),
        (bytes(99), ("--sample-format", "s17"), "did you mean 's16'"),
        (bytes(99), ("--sample-rate", 7), "the sample rate is 7"),
    ]:
        ran = listen_to_pipe(cli, monkeypatch, data, "--model", tiny, *arguments)
        assert ran.code == 1
        assert message in ran.err
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is a terminal" in cli("listen", "-", "--model", tiny).err


def test_audio_shorter_than_a_frame_returns_no_digits(cli, tiny, monkeypatch):
    ran = listen_to_pipe(cli, monkeypatch, bytes(100), "--model", tiny, "--json")
    assert ran.code == 0
    assert parse_lines(ran.out)[0]["notes"] == [
        "silent: the peak is below −80 dB",
        "too short to recognize anything: one frame takes 0.045 s",
    ]


def test_listen_streams_digits_and_ends_cleanly_on_ctrl_c(tiny):
    command = [sys.executable, "-m", "clearhead.cli", "listen", "-", "--model", str(tiny), "--json"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(PI.read_bytes())
    process.stdin.flush()  # and not closed, so the stream continues
    first = json.loads(process.stdout.readline())
    assert first["text"] == recognize(tiny, read_audio(PI).samples)[0]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert b"Traceback" not in err
    assert json.loads(out.splitlines()[-1])["seconds"] > 0


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_listen_recognizes_piped_speech(cli, tiny, monkeypatch):
    spoken = subprocess.run(["espeak-ng", "three one four", "--stdout"], capture_output=True, check=True).stdout
    *digits, last = parse_lines(listen_to_pipe(cli, monkeypatch, spoken, "--model", tiny, "--json").out)
    assert digits
    assert all(digit["text"] in "0123456789" for digit in digits)
    assert 0.5 < last["seconds"] < 3
    assert last["notes"] == ["resampled from 22,050 to 8,000 Hz"]
