"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """Return the path of a grey bar on black, as a PNG whose size differs from that of the model."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (50, 70), 10)
    ImageDraw.Draw(image).rectangle((20, 10, 30, 60), fill=240)
    path = tmp_path_factory.mktemp("pictures") / "bar.png"
    image.save(path)
    return path
