"""The styles of figures: a light and a dark theme, without effect on the user's own settings."""

from __future__ import annotations

import pytest

from clearhead._core.plotting import STYLES, new_figure, palette, plot_style, render_figure
from clearhead.errors import ConfigError

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib.colors import to_hex

PAPER = {"light": "#ffffff", "dark": "#14171b"}


@pytest.mark.parametrize("theme", PAPER)
def test_style_sets_paper_and_ink_and_restores_the_settings(theme):
    before = matplotlib.rcParams["text.color"]
    with plot_style(theme):
        figure = new_figure(2, 2)
        axes = figure.add_subplot()
        text = axes.set_title("title")
        ink = palette().ink
    assert to_hex(figure.get_facecolor()) == PAPER[theme]
    assert text.get_color() == ink
    assert matplotlib.rcParams["text.color"] == before
    assert f"fill: {PAPER[theme]}" in render_figure(figure, ".svg").decode()


def test_inner_style_keeps_the_theme_of_the_outer_one():
    @plot_style()
    def ink():
        return palette().ink, matplotlib.rcParams["text.color"]

    with plot_style("dark"):
        dark = ink()
    light = ink()
    assert dark[0] == f"#{dark[1]}".replace("##", "#")
    assert dark != light


def test_styles_do_not_depend_on_the_settings_of_the_user():
    def draw():
        with plot_style():
            figure = new_figure(2, 2)
            figure.add_subplot().plot([1, 2])
            return render_figure(figure, ".svg")

    expected = draw()
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red"}):
        assert draw() == expected


def test_both_styles_set_the_same_parameters():
    names = [
        set(matplotlib.rc_params_from_file(STYLES / f"{theme}.mplstyle", use_default_template=False)) for theme in PAPER
    ]
    assert names[0] == names[1]


@pytest.mark.bad_input
def test_unknown_theme_raises():
    with pytest.raises(ConfigError, match="unknown theme 'sepia'; expected light or dark"), plot_style("sepia"):
        pass
