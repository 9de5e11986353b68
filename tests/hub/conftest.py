"""Small folders to read: a Llama and a GPT-2 as transformers saves them, made once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.third_party_models import PEERS


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """name → the folder that the maker's tiny model wrote, and the model."""
    known = {}

    def make(name: str):
        if name not in known:
            folder = tmp_path_factory.mktemp("made") / "model"
            model = PEERS[name].build()
            PEERS[name].save(model, folder)
            known[name] = (model, folder)
        return known[name]

    return make


@pytest.fixture
def llama(made, tmp_path) -> Path:
    """A Llama folder of one's own, to spoil."""
    return Path(shutil.copytree(made("llama")[1], tmp_path / "llama"))


def change_json(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    path.write_text(json.dumps(data))
