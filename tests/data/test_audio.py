"""Samples from files and streams: equal to what soundfile reads, whole or as they come, and bad ones refused."""

from __future__ import annotations

import io
import re
import struct
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead.data.audio import Stream, read, resample
from clearhead.errors import ConfigError, DataError, MissingDependencyError, StorageError

soundfile = pytest.importorskip("soundfile", reason="writes the files that are read")

RATE = 8_000


def noise(n: int = 1_009, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.9, 0.9, (n, channels)).astype(np.float32)


def heard(data: bytes, **options) -> tuple[torch.Tensor, list[str]]:
    stream = Stream(io.BytesIO(data), **{"rate": RATE} | options)
    return torch.cat(list(stream)), stream.notes


def wav(samples: np.ndarray, rate: int = RATE, subtype: str = "PCM_16", form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format=form)
    return file.getvalue()


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
@pytest.mark.parametrize("form", ["WAV", "WAVEX", "RF64"])
def test_a_wav_file_is_read_as_soundfile_reads_it(subtype, form, tmp_path):
    path = tmp_path / "sound.wav"
    path.write_bytes(wav(noise(), subtype=subtype, form=form))
    wanted, rate = soundfile.read(path, dtype="float32")
    found = read(path)
    assert (found.rate, found.notes) == (rate, ())
    assert torch.equal(found.samples, torch.from_numpy(wanted))
    assert found.seconds == len(wanted) / RATE


@pytest.mark.parametrize("form", ["FLAC", "OGG"])
def test_other_forms_are_read_by_soundfile(form, tmp_path):
    path = tmp_path / "sound.bin"
    subtype = {"FLAC": "PCM_16", "OGG": "VORBIS"}[form]
    path.write_bytes(wav(noise(5_003, 2) / 4, rate=16_000, subtype=subtype, form=form))
    found = read(path, rate=RATE)
    assert len(found.samples) == 2_502
    assert found.notes == ("2 channels, of which the mean is heard", "resampled from 16,000 to 8,000 Hz")
    assert torch.equal(read(path).samples, torch.from_numpy(soundfile.read(path, dtype="float32")[0].mean(1)))


def test_without_soundfile_plain_wav_is_read_and_the_rest_is_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.wav").write_bytes(wav(noise()))
    (tmp_path / "a.flac").write_bytes(wav(noise(), form="FLAC"))
    wanted = soundfile.read(tmp_path / "a.wav", dtype="float32")[0]
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert torch.equal(read(tmp_path / "a.wav").samples, torch.from_numpy(wanted))
    with pytest.raises(MissingDependencyError, match=r"clearhead\[audio\]"):
        read(tmp_path / "a.flac")


def test_a_file_and_a_stream_of_it_are_the_same_samples(tmp_path):
    data = wav(noise(4_001, 2), rate=44_100)
    (tmp_path / "a.wav").write_bytes(data)
    whole = read(tmp_path / "a.wav", rate=RATE)
    found, notes = heard(data, seconds=0.013)
    assert torch.equal(found, whole.samples)
    assert (
        tuple(notes) == whole.notes == ("2 channels, of which the mean is heard", "resampled from 44,100 to 8,000 Hz")
    )


@pytest.mark.parametrize(("kind", "dtype"), [("s16", "<i2"), ("f32", "<f4"), ("u8", "u1"), ("s32", "<i4")])
def test_bare_samples_are_read_by_their_kind(kind, dtype):
    values = np.array([0, 1, 100, 127], dtype)
    scale = {"s16": 32_768, "f32": 1, "u8": 128, "s32": 1 << 31}[kind]
    wanted = (values.astype(np.float64) - (128 if kind == "u8" else 0)) / scale
    found, _ = heard(values.tobytes(), kind=kind)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-7)


class Trickle(io.RawIOBase):
    """A pipe that gives a few bytes at a time, and remembers how often it was asked."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.asked = data, sizes, 0

    def read(self, size: int = -1) -> bytes:
        size = min(size, self.sizes[self.asked % len(self.sizes)])
        self.asked += 1
        part, self.data = self.data[:size], self.data[size:]
        return part


@pytest.mark.parametrize("sizes", [[1], [3, 2], [5, 1, 4_096]])
def test_a_pipe_may_give_bytes_in_any_portions(sizes):
    data = wav(noise(331, 2), rate=RATE)
    pieces = Stream(Trickle(data, sizes), rate=RATE)
    assert torch.equal(torch.cat(list(pieces)), heard(data)[0])


def test_what_has_come_is_given_at_once():
    """A piece is handed on before the next bytes are asked for."""
    pipe = Trickle(bytes(12) + bytes(800), [12, 80])
    pieces = iter(Stream(pipe, rate=RATE))
    assert len(next(pieces)) == 46
    assert pipe.asked == 2


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF - 36])
def test_sizes_that_pipes_write_mean_until_the_end(size):
    data = wav(noise())
    at = data.index(b"data") + 4
    found, notes = heard(data[:at] + struct.pack("<I", size) + data[at + 4 :])
    assert torch.equal(found, heard(data)[0])
    assert notes == []


def test_what_stands_after_the_samples_is_not_heard():
    data = wav(noise())
    assert torch.equal(heard(data + b"LIST\x04\0\0\0abcd")[0], heard(data)[0])


def test_what_stands_before_the_samples_is_not_heard_however_long(tmp_path):
    data = wav(noise())
    for size in (4, 3_000_000):
        long = data[:12] + b"JUNK" + struct.pack("<I", size) + bytes(size) + data[12:]
        (tmp_path / "a.wav").write_bytes(long[:4] + struct.pack("<I", len(long) - 8) + long[8:])
        assert torch.equal(read(tmp_path / "a.wav").samples, heard(data)[0])


def test_the_header_counts_and_a_rate_that_contradicts_it_is_told():
    assert heard(wav(noise()), raw_rate=16_000)[1] == ["its header says 8,000 Hz, which counts, not 16,000 Hz"]


def test_a_stream_cut_short_and_in_the_middle_of_a_sample_is_heard_and_told():
    data = wav(noise(400))
    found, notes = heard(data[:-401])
    assert torch.equal(found, heard(data)[0][:199])
    assert notes == [
        "cut short: its header promises 0.03 s more",
        "cut in the middle of a sample: the last 1 of 2 bytes are left out",
    ]


def test_silence_and_clipping_are_told():
    assert heard(bytes(1_000))[1] == ["silence: nothing in it is louder than −80 dB"]
    loud = np.clip(noise()[:, 0] * 1.2, -1, 32_767 / 32_768)
    (said,) = heard(wav(loud))[1]
    assert said.startswith("clipped: ")
    assert said.endswith("of the samples are at full scale; record more quietly")
    assert heard(wav(noise()))[1] == []


def test_standard_library_writes_what_we_read(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 3, 11_025, 0, "NONE", ""))
        file.writeframes(b"\x01\x02\x03\xff\xff\xff")
    assert read(tmp_path / "a.wav").samples.tolist() == [0x030201 / (1 << 23), -1 / (1 << 23)]


BAD = {
    "empty": (b"", "holds no samples"),
    "one byte": (b"a", "holds no samples"),
    "a header alone": (b"RIFF\0\0\0\0WAVE", "its header ends early"),
    "no samples": (wav(noise(0)), "holds no samples"),
    "a long way to no samples": (b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff" + bytes(99), "is WAV that is not plain"),
    "flac": (wav(noise(), form="FLAC"), "is fLaC, which cannot be read as it comes; give it as a file"),
    "mp3": (b"ID3\x04" + bytes(99), "is ID3., which cannot"),
    "compressed": (wav(noise(), subtype="ULAW"), "is WAV that is not plain, which cannot"),
    "of three bytes": (wav(noise(), subtype="PCM_24"), "is WAV that is not plain, which cannot"),
    "not a number": (wav(np.array([0, 0.5, np.nan]), subtype="FLOAT"), "no number, at 0.000 s"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("what", BAD)
def test_a_stream_that_is_none_is_refused_in_a_sentence(what):
    data, why = BAD[what]
    with pytest.raises(DataError, match=why) as error:
        heard(data)
    assert "standard input" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.bad_input
def test_a_file_that_is_no_sound_is_refused_in_a_sentence(tmp_path):
    for name, data, why in [
        ("words.wav", b"these are words, and no sound at all", "is not a sound that can be read"),
        ("empty.wav", b"", "is not a sound that can be read"),
        ("cut.wav", b"RIFF\0\0\0\0WAVEfmt ", "its header ends early"),
        ("none.wav", wav(noise(0)), "holds no samples"),
        ("none.aiff", wav(noise(0), form="AIFF"), "holds no samples"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=why) as error:
            read(tmp_path / name)
        assert name in str(error.value)
    for path in (tmp_path, tmp_path / "nothing.wav"):
        with pytest.raises(StorageError, match="cannot be read"):
            read(path)


@pytest.mark.bad_input
def test_kinds_and_channels_that_are_none_are_refused():
    with pytest.raises(DataError, match="did you mean 's16'"):
        heard(b"abcd", kind="s16l")
    with pytest.raises(DataError, match="channels is 0; expected a whole number of at least 1"):
        heard(b"abcd", channels=0)


# ---------------------------------------------------------------------- small files, large memory


def peak_of(call):
    """The growth of this process's resident memory during a call, in bytes."""

    def status(key):
        return 1024 * int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_read_decodes_many_channels_in_blocks(tmp_path):
    path = tmp_path / "silence.flac"
    n = 1 << 22
    with soundfile.SoundFile(path, "w", 48_000, 8, "PCM_16", format="FLAC") as file:
        for _ in range(16):
            file.write(np.zeros((n // 16, 8), np.int16))
    assert path.stat().st_size < 1 << 17
    read(path, rate=48_000 // 16)
    mono = 4 * n
    assert peak_of(lambda: read(path)) < 4 * mono  # eight channels at once would be 8 * mono, and their copies more


@pytest.mark.bad_input
@pytest.mark.parametrize("rate", [383_999, 191_999])
def test_stream_rejects_rates_whose_resampling_filter_is_too_large(rate):
    with pytest.raises(ConfigError, match=f"cannot resample from {rate:,} Hz to 8,000 Hz"):
        heard(wav(noise(100), rate=rate))


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_resampler_bounds_the_memory_of_large_ratios():
    samples = torch.zeros(1 << 19)
    resample(samples[:4_000], 384_000, 8_000)
    assert peak_of(lambda: resample(samples, 384_000, 8_000)) < 1 << 27


@pytest.mark.bad_input
def test_read_reports_a_flac_file_cut_in_the_middle(tmp_path):
    (tmp_path / "a.flac").write_bytes(wav(noise(200_003), form="FLAC")[:200_000])
    with pytest.raises(DataError, match="is not a sound that can be read"):
        read(tmp_path / "a.flac")
