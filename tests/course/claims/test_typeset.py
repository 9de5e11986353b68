"""Mathematics in sentences, as HTML."""

from __future__ import annotations

import pytest

from clearhead.course.claims.report import typeset


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("R = Z W_O", "<i>R</i> = <i>Z</i> <i>W</i><sub><i>O</i></sub>"),
        ("10000^(2i/d)", "10000<sup>2<i>i</i>/<i>d</i></sup>"),
        ("(k + 1)^n", "(<i>k</i> + 1)<sup><i>n</i></sup>"),
        ("4.53e-04 and 1.0e+00", "4.53·10⁻⁴ and 1"),
        ("w = (-2, 1), rows 5-7", "<i>w</i> = (−2, 1), rows 5-7"),
        ("a key of weight a(1 − a)", "a key of weight <i>a</i>(1 − <i>a</i>)"),
        ("A, <STOP> & 'cats'", "A, &lt;STOP&gt; &amp; 'cats'"),
        ("`W_O` of <x>", "<code>W_O</code> of &lt;x&gt;"),
        (
            "A: [1 0; 1/2 1/2]",
            'A: <span class="matrix"><table><tr><td>1</td><td>0</td></tr>'
            "<tr><td>1/2</td><td>1/2</td></tr></table></span>",
        ),
        ("[[0, 1], [2, 3]]", typeset("[0 1; 2 3]")),
        ("[MASK] and [3, 5]", "[MASK] and [3, 5]"),
    ],
)
def test_typeset_returns_html(text, html):
    assert typeset(text) == html
