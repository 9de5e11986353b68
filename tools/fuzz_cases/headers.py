"""Small crafted files whose headers promise absurd sizes: GGUF, safetensors, WAV, PNG, IDX and NumPy archives.

Reading such a file must end soon, in little memory, with one line or a small result.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tools.fuzz_cases import Case, CaseFailure
from tools.fuzz_cases.sandbox import Budget

BUDGET = Budget(cpu_seconds=20, memory=512 << 20)

COUNTS = (0, 1, 2, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
SIZES_32 = tuple(count for count in COUNTS if count < 2**32)
GGUF_ARRAY, GGUF_STRING = 9, 8


def prepare() -> None:
    """Import all commands."""
    from tools.fuzz_cases import options

    options.prepare()


def draw(chance: random.Random, device: str) -> Case:
    """Draw a format and four counts for its header; two of them are small, so that reading gets further."""
    counts = [chance.choice(COUNTS) if chance.random() < 0.5 else chance.choice((1, 2)) for _ in range(4)]
    return {"format": chance.choice(sorted(WRITERS)), "counts": counts, "variant": chance.randrange(6)}


def check(case: Case) -> list[str]:
    """Write the file and run the command that reads it."""
    from tools.fuzz_cases.options import run_command

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        arguments = WRITERS[case["format"]](Path(folder), case["counts"], case["variant"])
        status, error = run_command(arguments)
    if status not in (0, 1) or "Traceback" in error:
        raise CaseFailure(f"exit status {status} | clearhead {' '.join(arguments)} | {error[-600:]}")
    return [case["format"], f"exit {status}"]


# -- formats ----------------------------------------------------------------------------------------------------------


def _gguf(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write a header with absurd numbers of tensors, keys, array elements or characters."""
    n_tensors, n_keys, length, size = counts
    content = b"GGUF" + struct.pack("<I", 3)
    if variant in (0, 1):
        content += struct.pack("<QQ", n_tensors, n_keys)
    else:
        content += struct.pack("<QQ", 0, 1)
    content += _gguf_string("general.architecture")
    if variant == 2:
        content += struct.pack("<IQ", GGUF_STRING, length) + b"llama"
    elif variant == 3:  # an array of arrays
        content += struct.pack("<IIQ", GGUF_ARRAY, GGUF_ARRAY, 1) + struct.pack("<IQ", 0, length)
    else:
        content += struct.pack("<IIQ", GGUF_ARRAY, size % 13, length)
    path = folder / "model.gguf"
    path.write_bytes(content + bytes(40))
    return ["cost", str(path)]


def _gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _safetensors(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write a header with an absurd length, shape or data offset, next to a valid configuration."""
    from clearhead.models import tiny_decoder

    length, rows, columns, end = counts
    (folder / "config.toml").write_text(tiny_decoder().to_toml(), encoding="utf-8")
    entry: dict[str, Any] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, end]}
    header = json.dumps({"embedding.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    size = length if variant < 3 else len(header)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(64))
    return ["cost", str(folder)] if variant % 2 else ["export", str(folder), "--out", str(folder / "out")]


def wav(samples: bytes, *, kind: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16) -> bytes:
    """Return a WAV file with these samples."""
    width = channels * bits // 8
    values = (kind & 0xFFFF, channels & 0xFFFF, rate & 0xFFFFFFFF, rate * width & 0xFFFFFFFF, width & 0xFFFF)
    form = struct.pack("<HHIIHH", *values, bits & 0xFFFF)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def _wav(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write a sound with an absurd rate, number of channels, width or size."""
    rate, channels, bits, size = counts
    options: dict[str, int] = {"rate": rate}
    if variant % 2:
        options["channels"] = channels
    if variant == 4:
        options["bits"] = bits
    content = wav(bytes(200), **options)
    if variant > 3:
        start = content.index(b"data") + 4
        content = content[:start] + struct.pack("<I", size & 0xFFFFFFFF) + content[start + 4 :]
    (folder / "sound.wav").write_bytes(content)
    return ["listen", str(folder / "sound.wav")]


def _flac(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write seconds of silence with up to 8 channels, which compress to almost nothing."""
    import numpy as np
    import soundfile

    channels, rate = 1 + counts[0] % 8, (8000, 48000, 96000)[variant % 3]
    silence = np.zeros((rate * 30, channels), dtype=np.int16)
    soundfile.write(folder / "sound.flac", silence, rate, format="FLAC")
    return ["listen", str(folder / "sound.flac")]


def _png(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write a picture of absurd size, with all of its rows if they compress to little."""
    width, height = (max(1, count % 20_000) if variant < 3 else count & 0xFFFFFFFF for count in counts[:2])
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    size = (width + 1) * height
    rows = zlib.compress(bytes(size if size < 1 << 26 else 100), 9)
    content = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    (folder / "picture.png").write_bytes(content)
    return ["inspect", "digits-vit", str(folder / "picture.png")]


def _chunk(name: bytes, content: bytes) -> bytes:
    """Return a PNG chunk with its checksum."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _npz(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write an archive of arrays with absurd shapes."""
    path = folder / "digits.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_val", "y_val"):
            shape = tuple(counts[: 1 + variant % 3])
            header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
            header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))
    return ["evaluate", "digits-vit", "--data", str(path)]


def _idx(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write MNIST files with absurd sizes."""
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
        sizes = [count & 0xFFFFFFFF for count in counts[:3]]
        (folder / name).write_bytes(struct.pack(">BBBB", 0, 0, 8, 3) + struct.pack(">III", *sizes) + bytes(64))
    for name in ("train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"):
        size = counts[3] & 0xFFFFFFFF
        (folder / name).write_bytes(struct.pack(">BBBB", 0, 0, 8, 1) + struct.pack(">I", size) + bytes(64))
    return ["evaluate", "digits-vit", "--data", str(folder)]


def _json(folder: Path, counts: list[int], variant: int) -> list[str]:
    """Write a Hugging Face configuration with absurd sizes, types or depth."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": counts[0],
        "hidden_size": counts[1],
        "num_hidden_layers": counts[2],
        "num_attention_heads": counts[3],
        "intermediate_size": counts[0],
    }
    if variant == 1:
        config["model_type"] = ["llama"]
    if variant == 2:
        config["model_type"] = "x" * 100_000
    text = json.dumps(config)
    if variant == 3:
        text = "[" * 100_000 + "]" * 100_000
    (folder / "config.json").write_text(text, encoding="utf-8")
    buffer = io.BytesIO()
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    buffer.write(struct.pack("<Q", len(header)) + header + bytes(8))
    (folder / "model.safetensors").write_bytes(buffer.getvalue())
    return ["cost", str(folder)]


WRITERS = {
    "flac": _flac,
    "gguf": _gguf,
    "idx": _idx,
    "json": _json,
    "npz": _npz,
    "png": _png,
    "safetensors": _safetensors,
    "wav": _wav,
}
"""Each writes a file and returns the command that reads it."""
