"""Fixtures: folders of tiny models as transformers saves them, built once per session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.third_party_models import PEERS


@pytest.fixture(scope="session")
def saved_peer(tmp_path_factory):
    """Return a function from a name of `PEERS` to the reference model and the folder that it was saved to."""
    cache = {}

    def save(name: str):
        if name not in cache:
            folder = tmp_path_factory.mktemp("saved") / "model"
            model = PEERS[name].build()
            PEERS[name].save(model, folder)
            cache[name] = (model, folder)
        return cache[name]

    return save


@pytest.fixture
def llama(saved_peer, tmp_path) -> Path:
    """A copy of a Llama folder that a test may change."""
    return Path(shutil.copytree(saved_peer("llama")[1], tmp_path / "llama"))


def change_json(path: Path, **changes) -> None:
    """Set keys of a JSON object, or delete keys whose value is None."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    path.write_text(json.dumps(data))
