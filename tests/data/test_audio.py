"""Reading audio files and streams, compared with soundfile; notes and errors."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import wave

import numpy as np
import pytest
import torch

from clearhead.data.audio import AudioStream, read_audio
from clearhead.errors import ConfigError, DataError, MissingDependencyError, StorageError

soundfile = pytest.importorskip("soundfile", reason="writes the files that are read")

RATE = 8_000


def noise(n: int = 1_009, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.9, 0.9, (n, channels)).astype(np.float32)


def decode(data: bytes, **options) -> tuple[torch.Tensor, list[str]]:
    stream = AudioStream(io.BytesIO(data), **{"sample_rate": RATE} | options)
    return torch.cat(list(stream)), stream.notes


def wav(samples: np.ndarray, rate: int = RATE, subtype: str = "PCM_16", form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format=form)
    return file.getvalue()


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
@pytest.mark.parametrize("form", ["WAV", "WAVEX", "RF64"])
def test_read_audio_wav_equals_soundfile(subtype, form, tmp_path):
    path = tmp_path / "sound.wav"
    path.write_bytes(wav(noise(), subtype=subtype, form=form))
    expected, rate = soundfile.read(path, dtype="float32")
    waveform = read_audio(path)
    assert (waveform.sample_rate, waveform.notes) == (rate, ())
    assert torch.equal(waveform.samples, torch.from_numpy(expected))
    assert waveform.seconds == len(expected) / RATE


@pytest.mark.parametrize("form", ["FLAC", "OGG"])
def test_read_audio_compressed_format_equals_soundfile(form, tmp_path):
    path = tmp_path / "sound.bin"
    subtype = {"FLAC": "PCM_16", "OGG": "VORBIS"}[form]
    path.write_bytes(wav(noise(5_003, 2) / 4, rate=16_000, subtype=subtype, form=form))
    waveform = read_audio(path, sample_rate=RATE)
    assert len(waveform.samples) == 2_502
    assert waveform.notes == ("averaged 2 channels", "resampled from 16,000 to 8,000 Hz")
    assert torch.equal(read_audio(path).samples, torch.from_numpy(soundfile.read(path, dtype="float32")[0].mean(1)))


def test_read_audio_without_soundfile_reads_only_plain_wav(tmp_path, monkeypatch):
    (tmp_path / "a.wav").write_bytes(wav(noise()))
    (tmp_path / "a.flac").write_bytes(wav(noise(), form="FLAC"))
    expected = soundfile.read(tmp_path / "a.wav", dtype="float32")[0]
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert torch.equal(read_audio(tmp_path / "a.wav").samples, torch.from_numpy(expected))
    with pytest.raises(MissingDependencyError, match=r"clearhead\[audio\]"):
        read_audio(tmp_path / "a.flac")


def test_audio_stream_equals_read_audio(tmp_path):
    data = wav(noise(4_001, 2), rate=44_100)
    (tmp_path / "a.wav").write_bytes(data)
    waveform = read_audio(tmp_path / "a.wav", sample_rate=RATE)
    samples, notes = decode(data, chunk_seconds=0.013)
    assert torch.equal(samples, waveform.samples)
    assert tuple(notes) == waveform.notes == ("averaged 2 channels", "resampled from 44,100 to 8,000 Hz")


@pytest.mark.parametrize(("sample_format", "dtype"), [("s16", "<i2"), ("f32", "<f4"), ("u8", "u1"), ("s32", "<i4")])
def test_audio_stream_raw_samples_are_scaled_by_format(sample_format, dtype):
    values = np.array([0, 1, 100, 127], dtype)
    scale = {"s16": 32_768, "f32": 1, "u8": 128, "s32": 1 << 31}[sample_format]
    expected = (values.astype(np.float64) - (128 if sample_format == "u8" else 0)) / scale
    samples, _ = decode(values.tobytes(), sample_format=sample_format)
    assert samples.tolist() == pytest.approx(expected.tolist(), rel=1e-7)


class Trickle(io.RawIOBase):
    """A pipe that returns a few bytes per read, and counts the reads."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.n_reads = data, sizes, 0

    def read(self, size: int = -1) -> bytes:
        size = min(size, self.sizes[self.n_reads % len(self.sizes)])
        self.n_reads += 1
        part, self.data = self.data[:size], self.data[size:]
        return part


@pytest.mark.parametrize("sizes", [[1], [3, 2], [5, 1, 4_096]])
def test_audio_stream_samples_do_not_depend_on_read_sizes(sizes):
    data = wav(noise(331, 2), rate=RATE)
    chunks = AudioStream(Trickle(data, sizes), sample_rate=RATE)
    assert torch.equal(torch.cat(list(chunks)), decode(data)[0])


def test_audio_stream_yields_available_samples_before_reading_more():
    pipe = Trickle(bytes(12) + bytes(800), [12, 80])
    chunks = iter(AudioStream(pipe, sample_rate=RATE))
    assert len(next(chunks)) == 46
    assert pipe.n_reads == 2


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF - 36])
def test_audio_stream_unknown_header_size_reads_to_the_end(size):
    data = wav(noise())
    at = data.index(b"data") + 4
    samples, notes = decode(data[:at] + struct.pack("<I", size) + data[at + 4 :])
    assert torch.equal(samples, decode(data)[0])
    assert notes == []


def test_audio_stream_ignores_chunks_after_the_samples():
    data = wav(noise())
    assert torch.equal(decode(data + b"LIST\x04\0\0\0abcd")[0], decode(data)[0])


def test_read_audio_ignores_chunks_before_the_samples(tmp_path):
    data = wav(noise())
    for size in (4, 3_000_000):
        long = data[:12] + b"JUNK" + struct.pack("<I", size) + bytes(size) + data[12:]
        (tmp_path / "a.wav").write_bytes(long[:4] + struct.pack("<I", len(long) - 8) + long[8:])
        assert torch.equal(read_audio(tmp_path / "a.wav").samples, decode(data)[0])


def test_audio_stream_source_rate_contradicts_header_is_noted():
    assert decode(wav(noise()), source_rate=16_000)[1] == ["used the header's 8,000 Hz instead of 16,000 Hz"]


def test_audio_stream_truncated_wav_is_read_and_noted():
    data = wav(noise(400))
    samples, notes = decode(data[:-401])
    assert torch.equal(samples, decode(data)[0][:199])
    assert notes == [
        "truncated: 0.03 s less than the header specifies",
        "truncated within a sample: dropped the last 1 of 2 bytes",
    ]


def test_audio_stream_notes_silence_and_clipping():
    assert decode(bytes(1_000))[1] == ["silent: the peak is below −80 dB"]
    loud = np.clip(noise()[:, 0] * 1.2, -1, 32_767 / 32_768)
    (note,) = decode(wav(loud))[1]
    assert note.startswith("clipped: ")
    assert note.endswith("of the samples are at full scale; record with a lower level")
    assert decode(wav(noise()))[1] == []


def test_read_audio_reads_wav_of_the_standard_library(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 3, 11_025, 0, "NONE", ""))
        file.writeframes(b"\x01\x02\x03\xff\xff\xff")
    assert read_audio(tmp_path / "a.wav").samples.tolist() == [0x030201 / (1 << 23), -1 / (1 << 23)]


BAD = {
    "empty": (b"", "contains no samples"),
    "one byte": (b"a", "contains no samples"),
    "a header alone": (b"RIFF\0\0\0\0WAVE", "its header is incomplete"),
    "no samples": (wav(noise(0)), "contains no samples"),
    "a long way to no samples": (b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff" + bytes(99), "is WAV that is not plain PCM"),
    "flac": (wav(noise(), form="FLAC"), "is fLaC, which cannot be read from a stream; give a file"),
    "mp3": (b"ID3\x04" + bytes(99), "is ID3., which cannot"),
    "compressed": (wav(noise(), subtype="ULAW"), "is WAV that is not plain PCM, which cannot"),
    "of three bytes": (wav(noise(), subtype="PCM_24"), "is WAV that is not plain PCM, which cannot"),
    "not a number": (wav(np.array([0, 0.5, np.nan]), subtype="FLOAT"), "contains NaN or infinity at 0.000 s"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BAD)
def test_audio_stream_invalid_content_raises_data_error(case):
    data, message = BAD[case]
    with pytest.raises(DataError, match=message) as error:
        decode(data)
    assert "standard input" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.bad_input
def test_read_audio_invalid_file_raises(tmp_path):
    for name, data, message in [
        ("words.wav", b"this is text instead of audio", "cannot be read as audio"),
        ("empty.wav", b"", "cannot be read as audio"),
        ("cut.wav", b"RIFF\0\0\0\0WAVEfmt ", "its header is incomplete"),
        ("none.wav", wav(noise(0)), "contains no samples"),
        ("none.aiff", wav(noise(0), form="AIFF"), "contains no samples"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message) as error:
            read_audio(tmp_path / name)
        assert name in str(error.value)
    for path in (tmp_path, tmp_path / "nothing.wav"):
        with pytest.raises(StorageError, match="cannot be read"):
            read_audio(path)


@pytest.mark.bad_input
def test_audio_stream_invalid_format_or_channels_raises():
    with pytest.raises(DataError, match="did you mean 's16'"):
        decode(b"abcd", sample_format="s16l")
    with pytest.raises(DataError, match="channels is 0; expected a whole number of at least 1"):
        decode(b"abcd", channels=0)


# ---------------------------------------------------------------------- small files, large memory


PEAK = """
import re
from pathlib import Path
import torch
from clearhead.data.audio import read_audio, resample

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
{warm_up}
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
{call}
print(status("VmHWM") - before)
"""


def peak_of(call, *, warm_up):
    """Return the growth of a new process's resident memory during a call, in bytes.

    The warm-up loads the pages of libraries, which count as memory. Tests before this one do not matter.
    """
    process = subprocess.run(
        [sys.executable, "-c", PEAK.format(call=call, warm_up=warm_up)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_read_audio_many_channels_bounds_memory(tmp_path):
    path = tmp_path / "silence.flac"
    n = 1 << 22
    with soundfile.SoundFile(path, "w", 48_000, 8, "PCM_16", format="FLAC") as file:
        for _ in range(16):
            file.write(np.zeros((n // 16, 8), np.int16))
    assert path.stat().st_size < 1 << 17
    mono = 4 * n
    # Decoding eight channels at once would need 8 * mono, and more for copies.
    peak = peak_of(f"read_audio({str(path)!r})", warm_up=f"read_audio({str(path)!r}, sample_rate=48_000 // 16)")
    assert peak < 4 * mono


@pytest.mark.bad_input
@pytest.mark.parametrize("rate", [383_999, 191_999])
def test_audio_stream_rate_with_too_large_filter_raises_config_error(rate):
    with pytest.raises(ConfigError, match=f"cannot resample from {rate:,} Hz to 8,000 Hz"):
        decode(wav(noise(100), rate=rate))


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_resample_large_ratio_bounds_memory():
    warm_up = "samples = torch.zeros(1 << 19); resample(samples[: 1 << 16], 384_000, 8_000)"  # several chunks
    assert peak_of("resample(samples, 384_000, 8_000)", warm_up=warm_up) < 1 << 27


@pytest.mark.bad_input
def test_read_audio_truncated_flac_raises_data_error(tmp_path):
    (tmp_path / "a.flac").write_bytes(wav(noise(200_003), form="FLAC")[:200_000])
    with pytest.raises(DataError, match="cannot be read as audio"):
        read_audio(tmp_path / "a.flac")
