"""The encoder-decoder Transformer that translates "Hello world", drawn as SVG and in characters."""

from __future__ import annotations

from html import escape

from clearhead.course.answers.content import SvgFigure

_WIDTH, _TOP, _HEIGHT = 790, 132, 650
_BOX = 178  # width of a sub-layer
_ENCODER, _DECODER, _VARIANTS = 40, 330, 640  # left edges
_COLORS = {
    "embedding": "#fde9d0",
    "attention": "#f9d5c3",
    "norm": "#fbf3c4",
    "feed_forward": "#cfe4f5",
    "output": "#dcd3ee",
    "token": "#ffffff",
}
_LINE = 'stroke="#222" stroke-width="1.3" fill="none"'
_TITLE = "Encoder-decoder Transformer translating “Hello world” to “Hola mundo”"


class _Canvas:
    """Collects the elements of the drawing."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, content: str, *, size: float = 12, anchor: str = "middle", more: str = ""
    ) -> None:
        """Write one line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{more}>{escape(content)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """Draw a box with centered lines."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{_COLORS[kind]}" '
            'stroke="#444" stroke-width="1"/>'
        )
        first = y + height / 2 + 4 - 7.5 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + width / 2, first + 15 * i, line)

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """Draw a dashed frame around a layer, with its label above the right corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9" fill="none" stroke="#777" '
            'stroke-width="1.2" stroke-dasharray="5 4"/>'
        )
        self.text(x + width - 4, y - 6, label, anchor="end", more=' fill="#555" font-style="italic"')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow along points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" {_LINE} marker-end="url(#tip)"/>')

    def plus(self, x: float, y: float) -> None:
        """Draw an addition."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="#fff" stroke="#222" stroke-width="1.2"/>')
        self.parts.append(f'<path d="M {x - 5:g} {y:g} h 10 M {x:g} {y - 5:g} v 10" {_LINE}/>')

    def wave(self, x: float, y: float) -> None:
        """Draw the sign of a position encoding: a sine in a circle."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="#fff" stroke="#222" stroke-width="1.2"/>')
        self.parts.append(f'<path d="M {x - 6:g} {y:g} q 3 -8 6 0 t 6 0" {_LINE}/>')

    def mask(self, x: float, y: float, rows: list[list[int]], label: str) -> None:
        """Draw a small mask: filled cells may be attended to."""
        for i, row in enumerate(rows):
            for j, is_allowed in enumerate(row):
                fill = "#3d6fa5" if is_allowed else "#fff"
                self.parts.append(
                    f'<rect x="{x + 9 * j:g}" y="{y + 9 * i:g}" width="9" height="9" fill="{fill}" stroke="#9ab" '
                    'stroke-width="1"/>'
                )
        for i, line in enumerate((label, "mask")):
            self.text(x + 4.5 * len(rows[0]), y + 9 * len(rows) + 11 + 11 * i, line, size=9.5)

    def svg(self) -> str:
        """Return the SVG element."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {_TOP} {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" '
            'role="img" font-family="Helvetica, Arial, \'Liberation Sans\', \'DejaVu Sans\', sans-serif" fill="#222">'
            f"<title>{escape(_TITLE)}</title>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M 0 0.5 L 8 4 L 0 7.5 z" fill="#222"/></marker></defs>'
            f'<rect y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>' + "".join(self.parts) + "</svg>"
        )


def encoder_decoder() -> SvgFigure:
    """Return the architecture with the example on it, and the two placements of the norm."""
    canvas = _Canvas()
    _draw_encoder(canvas)
    _draw_decoder(canvas)
    _draw_memory(canvas)
    _draw_variants(canvas)
    caption = "Data flow upwards. Filled cells of a mask may be attended to; rows are queries, columns are keys."
    return SvgFigure(canvas.svg(), _CHARACTERS.strip("\n"), caption)


def _tokens(canvas: _Canvas, x: float, y: float, words: tuple[str, str], label: str) -> None:
    for i, word in enumerate(words):
        canvas.box(x + i * (_BOX / 2 + 2), y, _BOX / 2 - 4, 24, "token", word)
    canvas.text(x + _BOX / 2, y + 40, label, size=11, more=' fill="#555"')


def _input(canvas: _Canvas, x: float, words: tuple[str, str], embedding: str, label: str) -> None:
    """Draw tokens, embedding and positions, from y = 780 up to the arrow into the first layer."""
    middle = x + _BOX / 2
    _tokens(canvas, x, 735, words, label)
    canvas.arrow((middle, 733), (middle, 713))
    canvas.box(x, 683, _BOX, 28, "embedding", embedding)
    canvas.arrow((middle, 683), (middle, 660))
    canvas.plus(middle, 649)
    canvas.wave(x + 12, 649)
    canvas.arrow((x + 22, 649), (middle - 10, 649))
    canvas.text(middle - 10, 671, "positional encoding", size=10, anchor="end")


def _sublayer(canvas: _Canvas, x: float, bottom: float, kind: str, *lines: str) -> float:
    """Draw a sub-layer with its residual connection and norm above `bottom`; return its upper edge."""
    middle, height = x + _BOX / 2, 38
    top = bottom - 26 - height
    canvas.arrow((middle, bottom), (middle, bottom - 24))
    canvas.box(x, top, _BOX, height, kind, *lines)
    canvas.arrow((middle, top), (middle, top - 16))
    canvas.box(x, top - 42, _BOX, 24, "norm", "Add & layer norm")
    canvas.arrow((middle, bottom - 8), (x - 14, bottom - 8), (x - 14, top - 30), (x - 1, top - 30))
    return top - 42


def _draw_encoder(canvas: _Canvas) -> None:
    x, middle = _ENCODER, _ENCODER + _BOX / 2
    _input(canvas, x, ("Hello", "world"), "Input embedding", "source")
    bottom = 640.0
    edge = _sublayer(canvas, x, bottom, "attention", "Multi-head", "self-attention (h heads)")
    edge = _sublayer(canvas, x, edge, "feed_forward", "Feed-forward network", "(each position alone)")
    canvas.mask(x + _BOX + 12, bottom - 56, [[1, 1], [1, 1]], "padding")
    canvas.frame(x - 24, edge - 10, _BOX + 76, bottom - edge + 6, "encoder layer, × N")
    canvas.arrow((middle, edge), (middle, edge - 54))
    canvas.box(x + 10, edge - 92, _BOX - 20, 36, "token", "memory: one vector", "per source token")


def _draw_decoder(canvas: _Canvas) -> None:
    x, middle = _DECODER, _DECODER + _BOX / 2
    _input(canvas, x, ("<start>", "Hola"), "Output embedding", "target, shifted right")
    bottom = 640.0
    edge = _sublayer(canvas, x, bottom, "attention", "Masked multi-head", "self-attention (h heads)")
    canvas.mask(x + _BOX + 14, bottom - 56, [[1, 0], [1, 1]], "causal")
    middle_edge = edge
    edge = _sublayer(canvas, x, edge, "attention", "Multi-head", "cross-attention (h heads)")
    canvas.mask(x + _BOX + 14, middle_edge - 56, [[1, 1], [1, 1]], "padding")
    canvas.text(middle + 8, middle_edge - 12, "Q", size=11, anchor="start")
    edge = _sublayer(canvas, x, edge, "feed_forward", "Feed-forward network", "(each position alone)")
    canvas.frame(x - 24, edge - 10, _BOX + 84, bottom - edge + 6, "decoder layer, × N")
    canvas.arrow((middle, edge), (middle, edge - 40))
    canvas.box(x, edge - 68, _BOX, 26, "output", "Linear (to the vocabulary)")
    canvas.arrow((middle, edge - 68), (middle, edge - 86))
    canvas.box(x, edge - 114, _BOX, 26, "output", "Softmax")
    canvas.arrow((middle, edge - 114), (middle, edge - 134))
    for i, word in enumerate(("Hola", "mundo")):
        canvas.box(x + i * (_BOX / 2 + 2), edge - 160, _BOX / 2 - 4, 24, "token", word)
    canvas.text(middle, edge - 168, "next token at each position", size=11, more=' fill="#555"')


def _draw_memory(canvas: _Canvas) -> None:
    """Draw keys and values from the memory to the cross-attention."""
    start = (_ENCODER + _BOX - 10, 354.0)
    turn, target = 286.0, 495.0
    canvas.arrow(start, (turn, 354.0), (turn, target), (_DECODER - 1, target))
    canvas.text(turn + 3, 346, "K, V", size=11)


def _draw_variants(canvas: _Canvas) -> None:
    """Draw post-norm and pre-norm sub-layers."""
    x, width = _VARIANTS + 14, 104
    middle = x + width / 2
    canvas.text(middle, 170, "placement of the norm", more=' font-weight="bold"')
    for top, title, is_post in ((200, "post-norm (as drawn)", True), (450, "pre-norm", False)):
        canvas.text(middle, top, title, more=' font-style="italic"')
        bottom = top + (170 if is_post else 190)
        canvas.text(middle, bottom + 16, "x", more=' font-style="italic"')
        order = (("feed_forward", "Sub-layer"),) if is_post else (("norm", "Layer norm"), ("feed_forward", "Sub-layer"))
        y = bottom
        for kind, label in order:
            canvas.arrow((middle, y), (middle, y - 22))
            canvas.box(x, y - 46, width, 24, kind, label)
            y -= 46
        canvas.arrow((middle, y), (middle, y - 14))
        canvas.plus(middle, y - 24)
        canvas.arrow((middle, bottom - 9), (x - 14, bottom - 9), (x - 14, y - 24), (middle - 10, y - 24))
        y -= 33
        if is_post:
            canvas.arrow((middle, y), (middle, y - 14))
            canvas.box(x, y - 38, width, 24, "norm", "Layer norm")
            y -= 38
        canvas.arrow((middle, y), (middle, y - 18))
    canvas.text(middle, 690, "pre-norm adds one", size=10)
    canvas.text(middle, 703, "norm after the last layer", size=10)


_CHARACTERS = """
                                              next tokens:  Hola   mundo
                                                               ^
                                                            Softmax
                                                               ^
                                                     Linear (to vocabulary)
                                                               ^
                                            +--- decoder layer, x N -----------+
                                            |           Add & norm <---+       |
 memory: one vector per source token        |               ^          |       |
        ^                |                  |         Feed-forward     |       |
        |                |                  |               ^----------+       |
+--- encoder layer, x N -|-------+          |           Add & norm <---+       |
|     Add & norm <---+   |       |          |               ^          |       |
|         ^          |   |       |   K, V   |   Multi-head cross-      |       |
|    Feed-forward    |   +-------|----------|-> attention (Q below)    |       |
|         ^----------+           |          |   [source padding mask]  |       |
|     Add & norm <---+           |          |               ^----------+       |
|         ^          |           |          |           Add & norm <---+       |
| Multi-head self-   |           |          |               ^          |       |
| attention          |           |          |   Masked multi-head self-|       |
| [padding mask]     |           |          |   attention [causal mask]|       |
|         ^----------+           |          |               ^----------+       |
+---------|----------------------+          +---------------|------------------+
  (+) <- positional encoding                  (+) <- positional encoding
          ^                                                 ^
   Input embedding                                  Output embedding
          ^                                                 ^
    Hello   world                              <start>   Hola  (shifted right)

post-norm (as drawn):  x -> LayerNorm(x + Sublayer(x))
pre-norm:              x -> x + Sublayer(LayerNorm(x)), one more norm at the end
"""
