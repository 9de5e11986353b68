"""Images with too many pixels are rejected before they are decoded."""

from __future__ import annotations

import pytest
from PIL import Image

from clearhead import hub
from clearhead.analysis.inputs.pipelines import read_image
from clearhead.errors import DataError


@pytest.mark.bad_input
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(13_000, 13_000), (1, 1 << 26)])
def test_read_image_rejects_a_huge_image_before_decoding_it(tmp_path, monkeypatch, size):
    path = tmp_path / "huge.png"
    Image.new("1", size).save(path)
    trained = hub.pipeline("digits-vit")
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("the image was decoded"))
    with pytest.raises(DataError, match=r"huge.png has [\d,]+ × [\d,]+ pixels; expected at most 33,554,432"):
        read_image(trained, str(path), None)
