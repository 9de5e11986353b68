"""`clearhead listen`: files and pipes, what is printed and when, what a page shows, and what is refused."""

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
    """A model whose weights are drawn: it says digits without meaning any."""
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


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def wanted(folder: Path, samples: torch.Tensor) -> list[str]:
    listener = hub.pipeline(folder).listen()
    return [event.text for event in (*listener.push(samples), *listener.flush())]


def test_a_file_prints_its_digits_and_how_long_it_took(cli, tiny):
    said = wanted(tiny, read_audio(PI).samples)
    assert len(said) > 3
    ran = cli("listen", PI, "--model", tiny)
    assert ran.code == 0, ran.err
    *digits, last = ran.out.splitlines()
    assert [line[0] for line in digits] == said
    assert all(" ended at " in line and " latency " in line and line.endswith("%") for line in digits)
    assert last.startswith("5.05 s of audio took ")
    assert "real-time factor" in last


def test_json_is_a_line_a_digit_and_one_for_the_end(cli, tiny):
    ran = cli("listen", PI, "--model", tiny, "--json", "--beam", 3)
    *digits, last = lines(ran.out)
    assert all(set(one) == {"text", "start", "end", "emitted_at", "log_prob", "latency"} for one in digits)
    assert [one["start"] for one in digits] == sorted(one["start"] for one in digits)
    assert set(last) == {"seconds", "computing", "real_time_factor", "notes"}
    assert last["seconds"] == pytest.approx(read_audio(PI).seconds)


def piped(cli, monkeypatch, data: bytes, *arguments: object):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return cli("listen", "-", *arguments)


def test_bare_samples_and_a_header_of_unknown_size_are_heard_as_the_file_is(cli, tiny, monkeypatch):
    data, said = PI.read_bytes(), wanted(tiny, read_audio(PI).samples)
    bare = piped(cli, monkeypatch, data[44:], "--model", tiny, "--json")
    assert [one["text"] for one in lines(bare.out)[:-1]] == said
    endless = data[:40] + struct.pack("<I", 0xFFFFFFFF) + data[44:]
    assert [one["text"] for one in lines(piped(cli, monkeypatch, endless, "--model", tiny, "--json").out)[:-1]] == said


def test_what_was_done_to_the_sound_is_said(cli, tiny, monkeypatch):
    loud = (
        (torch.ones(2, 16_000).cumsum(1).remainder(2) * 65_535 - 32_768)
        .to(torch.int16)
        .T.contiguous()
        .numpy()
        .tobytes()
    )
    ran = piped(cli, monkeypatch, loud + b"!", "--model", tiny, "--sample-rate", 16_000, "--channels", 2)
    assert ran.code == 0, ran.err
    notes = [line for line in ran.out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: averaged 2 channels",
        "note: resampled from 16,000 to 8,000 Hz",
        "note: truncated within a sample: dropped the last 1 of 4 bytes",
        "note: clipped: 100.0% of the samples are at full scale; record with a lower level",
    ]


def test_look_draws_the_sound_and_where_each_digit_looked(cli, tiny, tmp_path):
    page = tmp_path / "pages" / "pi.html"
    ran = cli("listen", PI, "--model", tiny, "--attention", "--html", page)
    assert ran.code == 0, ran.err
    said = wanted(tiny, read_audio(PI).samples)
    _, drawn, foot = ran.out.split("\n\n")
    assert len(drawn.splitlines()) == 12 + len(said)
    assert [line.strip()[0] for line in drawn.splitlines()[12:]] == said
    assert foot.startswith("Self-attention, layer 1, mean of 2 heads")
    text = page.read_text(encoding="utf-8")
    assert f"pi.wav → {' '.join(said)}" in text
    assert '"grid":[1,' in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_look_takes_a_sound_too(cli, tiny):
    ran = cli("inspect", tiny, PI, "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["title"].startswith("pi.wav → ")
    assert {layer["kind"] for layer in found["layers"]} == {"image"}
    assert "same row" not in found["layers"][0]["heads"][0]["scores"]  # moments stand in one line


@pytest.mark.bad_input
def test_what_cannot_be_heard_is_refused_in_a_line(cli, tiny, tmp_path, monkeypatch):
    words = tmp_path / "words.wav"
    words.write_text("no sound at all")
    for arguments, why in [
        ((words,), "cannot be read as audio"),
        ((tmp_path / "nothing.wav",), "cannot be read: No such file"),
        ((PI, "--beam", 0), "beam is 0"),
        ((PI, "--model", "sort-dedup"), "sort-dedup was trained for sort-dedup, and this needs a model for speech"),
    ]:
        ran = cli("listen", "--model", tiny, *arguments)
        assert ran.code == 1
        assert why in ran.err
        assert len(ran.err.splitlines()) == 1
    for data, arguments, why in [
        (b"", (), "standard input contains no samples"),
        (b"fLaC" + bytes(99), (), "standard input is fLaC, which cannot be read from a stream"),
        (bytes(99), ("--sample-format", "s17"), "did you mean 's16'"),
        (bytes(99), ("--sample-rate", 7), "the sample rate is 7"),
    ]:
        ran = piped(cli, monkeypatch, data, "--model", tiny, *arguments)
        assert ran.code == 1
        assert why in ran.err
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is a terminal" in cli("listen", "-", "--model", tiny).err


def test_a_sound_too_short_for_a_moment_says_nothing(cli, tiny, monkeypatch):
    ran = piped(cli, monkeypatch, bytes(100), "--model", tiny, "--json")
    assert ran.code == 0
    assert lines(ran.out)[0]["notes"] == [
        "silent: the peak is below −80 dB",
        "too short to recognize anything: one frame takes 0.045 s",
    ]


def test_digits_are_printed_while_the_sound_still_comes_and_ctrl_c_ends_it_cleanly(tiny):
    command = [sys.executable, "-m", "clearhead.cli", "listen", "-", "--model", str(tiny), "--json"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(PI.read_bytes())
    process.stdin.flush()  # and not closed: somebody is still speaking
    first = json.loads(process.stdout.readline())
    assert first["text"] == wanted(tiny, read_audio(PI).samples)[0]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert b"Traceback" not in err
    assert json.loads(out.splitlines()[-1])["seconds"] > 0


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not here to speak")
def test_a_voice_can_be_piped_in(cli, tiny, monkeypatch):
    spoken = subprocess.run(["espeak-ng", "three one four", "--stdout"], capture_output=True, check=True).stdout
    *digits, last = lines(piped(cli, monkeypatch, spoken, "--model", tiny, "--json").out)
    assert digits
    assert all(one["text"] in "0123456789" for one in digits)
    assert 0.5 < last["seconds"] < 3
    assert last["notes"] == ["resampled from 22,050 to 8,000 Hz"]
