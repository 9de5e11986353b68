"""Damaged files of every format: truncated, bits flipped, bytes inserted or removed.

Reading such a file works or ends with one line.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from clearhead.data import CharTokenizer, WordLevelTokenizer, load_tokenizer, train_bpe
from clearhead.errors import ClearheadError
from clearhead.hub.bundled import BUNDLED_FOLDER, read_card
from clearhead.models import load_checkpoint, save_checkpoint, tiny_decoder
from clearhead.training.recipe import Recipe
from tools.fuzz_cases import Case, CaseFailure
from tools.fuzz_cases.sandbox import Budget

BUDGET = Budget(cpu_seconds=20, memory=512 << 20)


def _command(*words: str) -> Callable[[Path], Any]:
    """Return a reader that runs a command on a path; `{}` stands for the path."""

    def read(path: Path) -> None:
        from tools.fuzz_cases.options import run_command

        status, error = run_command([word.replace("{}", str(path)) for word in words])
        if status == 1:
            raise ClearheadError(error.strip().partition("\n")[0] or "no message")
        if status != 0:
            raise CaseFailure(f"exit status {status}: {error[-300:]}")

    return read


FOLDER_READERS: dict[str, Callable[[Path], Any]] = {
    "model/model.safetensors": load_checkpoint,
    "model/config.toml": load_checkpoint,
    "characters/tokenizer.json": load_tokenizer,
    "symbols/tokenizer.json": load_tokenizer,
    "bpe/tokenizer.json": load_tokenizer,
    "bundled/train.toml": Recipe.load,
    "bundled/card.toml": read_card,
    "exported/config.json": _command("cost", "{}"),
    "exported/model.safetensors": _command("generate", "KING:", "--model", "{}", "--max-new-tokens", "2"),
    "exported/tokenizer.json": _command("generate", "KING:", "--model", "{}", "--max-new-tokens", "2"),
}
"""Readers of the folder that a damaged file is in."""

FILE_READERS: dict[str, Callable[[Path], Any]] = {
    "gguf/model.gguf": _command("cost", "{}"),
    "sound/sound.wav": _command("listen", "{}"),
    "sound/sound.flac": _command("listen", "{}"),
    "picture/picture.png": _command("inspect", "digits-vit", "{}"),
    "digits/digits.npz": _command("evaluate", "digits-vit", "--data", "{}"),
    "pairs/pairs.tsv": _command("evaluate", "en-es", "--data", "{}", "--beam", "1"),
    "sheet/sheet.toml": _command("exercise", "solve", "{}"),
}
"""Readers of the damaged file."""

READERS = FOLDER_READERS | FILE_READERS


@cache
def _valid_files() -> Path:
    """Create a folder with one valid file of each format, once per process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for name in READERS:
        (folder / name).parent.mkdir(exist_ok=True)
    torch.manual_seed(0)
    save_checkpoint(tiny_decoder().build(), folder / "model")
    CharTokenizer("abcdé ").save(folder / "characters")
    WordLevelTokenizer(["<pad>", "<bos>", "<eos>", "a", "b"]).save(folder / "symbols")
    train_bpe(["the cat sat on the mat, the cat ran"] * 3, vocab_size=280).save(folder / "bpe")
    for name in ("train.toml", "card.toml"):
        shutil.copy(BUNDLED_FOLDER / "sort-dedup" / name, folder / "bundled" / name)
    (folder / "exported").rmdir()
    _run("export", "shakespeare", "--out", str(folder / "exported"))
    _write_media(folder)
    _write_gguf(folder / "gguf/model.gguf")
    (folder / "pairs/pairs.tsv").write_text("Go.\tVe.\nThank you.\tGracias.\n" * 3, encoding="utf-8")
    sheet = Path(str(resources.files("clearhead.course.exercises"))) / "problems" / "attention-by-hand.toml"
    shutil.copy(sheet, folder / "sheet/sheet.toml")
    return folder


def _run(*arguments: str) -> None:
    """Run a command that must succeed."""
    from tools.fuzz_cases.options import run_command

    status, error = run_command(list(arguments))
    if status:
        raise RuntimeError(f"clearhead {' '.join(arguments)}: {error}")


def _write_media(folder: Path) -> None:
    """Write a WAV, a FLAC, a PNG and an archive of digits."""
    import numpy as np
    import soundfile
    from PIL import Image

    rng = np.random.default_rng(0)
    samples = (rng.normal(size=4000) * 3000).astype(np.int16)
    for kind in ("wav", "flac"):
        soundfile.write(folder / f"sound/sound.{kind}", samples, 8000)
    Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / "picture/picture.png")
    pixels, labels = rng.integers(0, 255, (11, 32, 32), dtype=np.uint8), np.arange(11) % 10
    path = folder / "digits/digits.npz"
    np.savez_compressed(path, x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)


def _write_gguf(path: Path) -> None:
    """Write a tiny llama."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([chr(97 + i) for i in range(11)])
    shapes = {"token_embd": (11, 8), "output_norm": (8,), "output": (11, 8)}
    shapes |= {f"blk.0.{name}": (8, 8) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}": (8, 8) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{name}": (8,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prepare() -> None:
    """Create the valid files."""
    _valid_files()


def draw(chance: random.Random, device: str) -> Case:
    """Draw a file and one to three damages: kind, position and value."""
    size = chance.choice([40, 400, 10_000, 10**6])  # small sizes hit headers
    damage = [
        [chance.choice(["cut", "turn", "put", "take"]), chance.randrange(size), chance.randrange(256)]
        for _ in range(chance.randint(1, 3))
    ]
    return {"file": chance.choice(list(READERS)), "damage": damage}


def check(case: Case) -> list[str]:
    """Read a damaged copy of a valid file."""
    original = _valid_files() / case["file"]
    content = damaged(original.read_bytes(), case["damage"])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = shutil.copytree(original.parent, Path(name) / "copy")
        path = folder / original.name
        path.write_bytes(content)
        is_file = case["file"] in FILE_READERS
        return [case["file"], _read(READERS[case["file"]], path if is_file else folder)]


def damaged(content: bytes, damage: list[list[Any]]) -> bytes:
    """Return the content with bytes cut, flipped, inserted or removed."""
    changed = bytearray(content)
    for kind, position, value in damage:
        start = position % (len(changed) + 1)
        if kind == "cut":
            del changed[start:]
        elif kind == "turn" and start < len(changed):
            changed[start] ^= 1 << value % 8
        elif kind == "put":
            changed[start:start] = bytes([value]) * (1 + value % 3)
        elif kind == "take":
            del changed[start : start + 1 + value % 9]
    return bytes(changed)


def _read(reader: Callable[[Path], Any], path: Path) -> str:
    """Classify the result of reading; raise if an error takes more than one line."""
    try:
        reader(path)
    except ClearheadError as error:
        if "\n" in str(error).strip() or "Traceback" in str(error) or not str(error):
            raise CaseFailure(f"{type(error).__name__} takes more than a line: {str(error)[:300]!r}") from error
        return "rejected"
    return "read"
