"""Export to disk: a failed write is reported and leaves no files; files follow the umask."""

from __future__ import annotations

import os

import pytest

from clearhead.errors import StorageError
from clearhead.hub import convert
from clearhead.models import gpt2


@pytest.fixture
def model():
    sizes = {"vocab_size": 31, "d_model": 12, "n_heads": 3, "n_layers": 1, "d_ff": 19}
    return gpt2().replace(**sizes).build()


def test_export_to_full_disk_raises_and_leaves_no_files(model, tmp_path, small_disk):
    with (
        small_disk(3_000),
        pytest.raises(StorageError, match=r"cannot write to .*out: File too large; nothing was written"),
    ):
        convert.export_third_party(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_exported_files_follow_the_umask(model, tmp_path):
    before = os.umask(0o027)
    try:
        convert.export_third_party(model, tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
