"""Damaged files: cut short, bits turned, bytes put in or taken out. Reading gives an answer or one sentence."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from clearhead.data import CharTokenizer, Symbols, load_tokenizer, train_bpe
from clearhead.errors import ClearheadError
from clearhead.models import load, save, tiny_decoder
from clearhead.pretrained.box import BOX, read_card
from clearhead.training.recipe import Recipe
from tools.trials import Broken, Case

READERS: dict[str, Callable[[Path], Any]] = {
    "model/model.safetensors": load,
    "model/config.toml": load,
    "characters/tokenizer.json": load_tokenizer,
    "symbols/tokenizer.json": load_tokenizer,
    "bpe/tokenizer.json": load_tokenizer,
    "box/train.toml": Recipe.of,
    "box/card.toml": read_card,
}


@cache
def _whole() -> Path:
    """A folder with one good file of each kind, made once."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    torch.manual_seed(0)
    save(tiny_decoder().build(), folder / "model")
    CharTokenizer("abcdé ").save(folder / "characters")
    Symbols(["<pad>", "<bos>", "<eos>", "a", "b"]).save(folder / "symbols")
    train_bpe(["the cat sat on the mat, the cat ran"] * 3, vocab_size=280).save(folder / "bpe")
    (folder / "box").mkdir()
    for name in ("train.toml", "card.toml"):
        shutil.copy(BOX / "sort-dedup" / name, folder / "box" / name)
    return folder


def draw(chance: random.Random, device: str) -> Case:
    size = chance.choice([40, 400, 10_000, 10**6])  # headers stand at the front
    damage = [
        [chance.choice(["cut", "turn", "put", "take"]), chance.randrange(size), chance.randrange(256)]
        for _ in range(chance.randint(1, 3))
    ]
    return {"file": chance.choice(list(READERS)), "damage": damage}


def check(case: Case) -> list[str]:
    whole = _whole() / case["file"]
    content = bytearray(whole.read_bytes())
    for what, where, value in case["damage"]:
        at = where % (len(content) + 1)
        if what == "cut":
            del content[at:]
        elif what == "turn" and at < len(content):
            content[at] ^= 1 << value % 8
        elif what == "put":
            content[at:at] = bytes([value]) * (1 + value % 3)
        elif what == "take":
            del content[at : at + 1 + value % 9]
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        folder = shutil.copytree(whole.parent, Path(name) / "copy")
        (folder / whole.name).write_bytes(content)
        return [case["file"], _read(READERS[case["file"]], folder)]


def _read(reader: Callable[[Path], Any], folder: Path) -> str:
    try:
        reader(folder)
    except ClearheadError as error:
        if "\n" in str(error).strip() or "Traceback" in str(error) or not str(error):
            raise Broken(f"{type(error).__name__} takes more than a line: {str(error)[:300]!r}") from error
        return "refused"
    return "read"
