"""Diagrams of the book, drawn as SVG in the color of the page.

    from diagrams import heads, key_value_cache

Each function returns a value that a notebook displays. Sizes are in pixels; (x, y) is an upper left corner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from plotting import COLORS, HTMLOutput, themed

BLUE, RED, GREEN, YELLOW, PURPLE, CYAN = COLORS


class Drawing:
    """An SVG drawing that is built up from boxes, arrows and text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", color: str = BLUE, fill: float = 0.15
    ) -> None:
        """Draw a rectangle with rounded corners and text in its center; lines are separated by newlines."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{color}" fill-opacity="{fill}" '
            f'stroke="{color}"/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4 + 15 * (i - (len(lines) - 1) / 2), line)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", size: int = 12, color: str = "") -> None:
        """Write a line of text; `anchor` is "start", "middle" or "end"."""
        fill = f' fill="{color}"' if color else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{fill}>{escape(text)}</text>'
        )

    def line(
        self, *points: tuple[float, float], color: str = "currentColor", width: float = 1.2, dash: str = ""
    ) -> None:
        """Draw a line through points."""
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{pattern}/>')

    def arrow(
        self, *points: tuple[float, float], color: str = "currentColor", width: float = 1.2, dash: str = ""
    ) -> None:
        """Draw a line through points with a head at the last one."""
        self.line(*points, color=color, width=width, dash=dash)
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        sides = [(x1 - 8 * math.cos(angle + turn), y1 - 8 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x1, y1), *sides))
        self._parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def circle(self, x: float, y: float, radius: float, color: str = BLUE, fill: float = 0.15) -> None:
        """Draw a circle around (x, y)."""
        self._parts.append(
            f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}" fill-opacity="{fill}" stroke="{color}"/>'
        )

    def html(self) -> HTMLOutput:
        """Return the drawing as a figure."""
        head = f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img" fill="currentColor">'
        parts = themed("".join(self._parts))
        return HTMLOutput(f'<figure class="drawn">{head}<title>{escape(self.title)}</title>{parts}</svg></figure>')


def lookup() -> HTMLOutput:
    """Draw attention as a lookup: a query is compared with keys, and the weights average the values."""
    drawing = Drawing(560, 200, "a query is compared with every key; the weights average the values")
    drawing.box(10, 80, 70, 30, "query q", RED)
    for j in range(4):
        y = 15 + 45 * j
        drawing.box(150, y, 70, 30, f"key k{'₁₂₃₄'[j]}")
        drawing.arrow((80, 95), (150, y + 15))
        drawing.text(265, y + 20, f"q·k{'₁₂₃₄'[j]}")
        drawing.arrow((220, y + 15), (240, y + 15))
        drawing.arrow((290, y + 15), (320, y + 15))
        drawing.box(395, y, 70, 30, f"value v{'₁₂₃₄'[j]}", GREEN)
        drawing.text(378, y + 12, f"w{'₁₂₃₄'[j]}", "end", color=RED)
        drawing.arrow((355, y + 15), (395, y + 15))
        drawing.line((465, y + 15), (500, 95))
    drawing.box(320, 10, 35, 170, "soft\nmax", YELLOW)
    drawing.arrow((495, 95), (505, 95))
    drawing.box(505, 80, 45, 30, "z", RED)
    return drawing.html()


def heads(n_heads: int = 3) -> HTMLOutput:
    """Draw multi-head attention: features are split among the heads, attended, joined and projected."""
    pitch = 86
    drawing = Drawing(640, pitch * n_heads + 30, "features are split among heads, each attends, and they are joined")
    middle = pitch * n_heads / 2 + 15
    drawing.box(5, middle - 40, 60, 80, "x\n(T, M)", PURPLE)
    drawing.box(105, middle - 40, 90, 80, "W_Q W_K W_V\nsplit")
    drawing.arrow((65, middle), (105, middle))
    for h in range(n_heads):
        y = 15 + pitch * h + 8
        drawing.box(245, y, 190, 70, f"head {h + 1}: q, k, v (T, D)\nsoftmax(q kᵀ/√D) v", (RED, GREEN, YELLOW)[h % 3])
        drawing.arrow((195, middle), (245, y + 35))
        drawing.line((435, y + 35), (475, middle))
    drawing.box(475, middle - 40, 60, 80, "join\n(T, H·D)")
    drawing.arrow((535, middle), (560, middle))
    drawing.box(560, middle - 40, 72, 80, "W_O\n(T, M)", PURPLE)
    return drawing.html()


def grouped_heads(n_heads: int = 8, n_shared: Sequence[int] = (8, 2, 1)) -> HTMLOutput:
    """Draw which key/value head each query head reads, for several numbers of key/value heads."""
    names = {n_heads: "multi-head", 1: "multi-query"}
    drawing = Drawing(640, 100 * len(n_shared) + 5, "query heads that share key/value heads")
    pitch, x0 = 56, 190
    for row, n_kv_heads in enumerate(n_shared):
        y = 8 + 100 * row
        drawing.text(10, y + 34, names.get(n_kv_heads, "grouped-query"), "start")
        drawing.text(10, y + 52, f"H = {n_heads}, K = {n_kv_heads}", "start")
        group = n_heads // n_kv_heads
        for h in range(n_heads):
            x = x0 + pitch * h
            shared_x = x0 + pitch * (h // group * group + (group - 1) / 2)
            drawing.box(x, y, 48, 26, f"q{h}", RED)
            drawing.line((x + 24, y + 26), (shared_x + 24, y + 58))
        for g in range(n_kv_heads):
            x = x0 + pitch * (g * group + (group - 1) / 2)
            drawing.box(x, y + 58, 48, 26, f"k{g} v{g}", GREEN)
    return drawing.html()


def block(norm: str = "pre") -> HTMLOutput:
    """Draw a block with its two residual connections; `norm` is "pre" or "post"."""
    drawing = Drawing(640, 110, f"a {norm}-norm block: two branches, each added to the residual stream")
    y = 75
    drawing.text(12, y + 4, "x", "start")
    x = 30
    for branch, color in (("attention", BLUE), ("feed-forward", GREEN)):
        start = x
        drawing.line((x, y), (x + 20, y))
        names = ("norm", branch) if norm == "pre" else (branch,)
        x += 20
        for name in names:
            width = 56 if name == "norm" else 96
            drawing.box(x, y - 16, width, 32, name, YELLOW if name == "norm" else color)
            drawing.arrow((x + width, y), (x + width + 18, y))
            x += width + 18
        drawing.circle(x + 9, y, 9, RED)
        drawing.text(x + 9, y + 4, "+")
        drawing.arrow((start + 6, y), (start + 6, 25), (x + 9, 25), (x + 9, y - 9))
        drawing.line((x + 18, y), (x + 34, y))
        x += 34
        if norm == "post":
            drawing.box(x, y - 16, 56, 32, "norm", YELLOW)
            drawing.line((x + 56, y), (x + 66, y))
            x += 66
    drawing.arrow((x, y), (x + 16, y))
    return drawing.html()


def merges(word: str, pairs: Sequence[tuple[str, str]]) -> HTMLOutput:
    """Draw how the merges of byte-pair encoding, in their order, join the letters of a word."""
    symbols, steps = list(word), [("letters", list(word))]
    for first, second in pairs:
        joined: list[str] = []
        for symbol in symbols:
            is_pair = joined[-1:] == [first] and symbol == second
            joined = [*joined[:-1], first + second] if is_pair else [*joined, symbol]
        if joined != symbols:
            steps.append((f"{first} + {second}", joined))
        symbols = joined
    side = 52
    drawing = Drawing(130 + side * len(word), 10 + 40 * len(steps), f"the merges that join the letters of {word}")
    for row, (name, row_symbols) in enumerate(steps):
        y = 8 + 40 * row
        drawing.text(110, y + 20, name, "end")
        x = 130
        for symbol in row_symbols:
            width = side * len(symbol)
            is_new = row > 0 and symbol not in steps[row - 1][1]
            drawing.box(x, y, width - 6, 30, symbol, RED if is_new else BLUE, 0.35 if is_new else 0.15)
            x += width
    return drawing.html()


def patches(n_sides: int = 3) -> HTMLOutput:
    """Draw how a picture becomes a sequence of patches and tokens, and a class."""
    n, side = n_sides**2, 30
    x0, pitch = 175, 44
    drawing = Drawing(x0 + pitch * (n + 1) + 20, 270, "a picture is cut into patches, which are read like words")
    for i in range(n):
        row, column = divmod(i, n_sides)
        color = COLORS[i % len(COLORS)]
        drawing.box(12 + side * column, 165 + side * row, side - 2, side - 2, f"{i + 1}", color)
        x = x0 + pitch * (i + 1)
        drawing.box(x, 222, 32, 32, f"{i + 1}", color)
        drawing.arrow((x + 16, 222), (x + 16, 202))
        drawing.arrow((x + 16, 172), (x + 16, 130))
    drawing.arrow((12 + side * n_sides + 6, 238), (x0 + pitch - 8, 238))
    drawing.text(60, 150, "picture")
    width = pitch * n - 12
    drawing.box(x0 + pitch, 172, width, 30, "linear map of each patch, W_E", CYAN)
    drawing.text(x0 + 36, 216, "learned", "end")
    drawing.box(x0, 172, 36, 30, "CLS", PURPLE)
    drawing.arrow((x0 + 18, 172), (x0 + 18, 130))
    drawing.text(x0 - 8, 150, "+ positions", "end")
    drawing.box(x0, 85, pitch * (n + 1) - 12, 45, "encoder: blocks of self-attention and feed-forward", BLUE)
    drawing.arrow((x0 + 18, 85), (x0 + 18, 56))
    drawing.box(x0 - 12, 22, 160, 34, "linear: logits of classes", GREEN)
    return drawing.html()


def encoder_decoder(source: Sequence[str], read: Sequence[str], written: Sequence[str]) -> HTMLOutput:
    """Draw an encoder-decoder that reads `source` and `read` and predicts `written`."""
    drawing = Drawing(640, 390, f"an encoder reads {' '.join(source)}; a decoder writes {' '.join(written)}")
    for j, token in enumerate(source):
        x = 40 + 70 * j
        drawing.box(x, 345, 62, 28, token, PURPLE)
        drawing.arrow((x + 31, 345), (x + 31, 325))
    width = max(220, 70 * len(source))
    drawing.box(30, 295, width, 30, "embeddings + positions", CYAN)
    drawing.arrow((30 + width / 2, 295), (30 + width / 2, 275))
    drawing.box(30, 230, width, 45, "self-attention\nmask: padding", BLUE)
    drawing.arrow((30 + width / 2, 230), (30 + width / 2, 205))
    drawing.box(30, 170, width, 35, "feed-forward", GREEN)
    drawing.text(30 + width + 8, 220, "× L", "start")
    drawing.arrow((30 + width / 2, 170), (30 + width / 2, 140))
    drawing.box(30, 105, width, 35, "memory (S, M)", YELLOW)
    right = 340
    wide = max(250, 66 * len(read))
    for j, token in enumerate(read):
        x = right + 6 + 66 * j
        drawing.box(x, 345, 60, 28, token, PURPLE)
        drawing.arrow((x + 30, 345), (x + 30, 325))
    middle = right + wide / 2
    drawing.box(right, 295, wide, 30, "embeddings + positions", CYAN)
    drawing.arrow((middle, 295), (middle, 275))
    drawing.box(right, 230, wide, 45, "self-attention\nmask: causal", BLUE)
    drawing.arrow((middle, 230), (middle, 205))
    drawing.box(right, 160, wide, 45, "cross-attention\nmask: padding of the source", RED)
    drawing.arrow((30 + width, 122), (right - 25, 122), (right - 25, 182), (right, 182), color=RED)
    drawing.text(right - 30, 115, "K, V", "end", color=RED)
    drawing.text(middle + 8, 222, "Q", "start", color=RED)
    drawing.arrow((middle, 160), (middle, 140))
    drawing.box(right, 105, wide, 35, "feed-forward", GREEN)
    drawing.arrow((middle, 105), (middle, 85))
    drawing.box(right, 52, wide, 33, "linear, softmax: p(next token)", CYAN)
    for j, token in enumerate(written):
        x = right + 6 + 66 * j
        drawing.arrow((x + 30, 52), (x + 30, 36))
        drawing.box(x, 8, 60, 28, token, PURPLE)
    return drawing.html()


def scaled_attention() -> HTMLOutput:
    """Draw scaled dot-product attention with the shape of each tensor."""
    drawing = Drawing(
        650, 186, "queries meet keys in a product, which is scaled, masked and normalized, and weighs the values"
    )
    for y, name, shape, color in ((14, "Q", "(T, D)", RED), (74, "K", "(S, D)", BLUE), (138, "V", "(S, E)", GREEN)):
        drawing.box(4, y, 80, 34, f"{name}  {shape}", color)
    middle = 65
    drawing.box(124, 44, 90, 42, "Q Kᵀ\n(T, S)", PURPLE)
    drawing.arrow((84, 31), (104, 31), (104, 56), (124, 56))
    drawing.arrow((84, 91), (104, 91), (104, 74), (124, 74))
    x = 214
    for width, text, color in ((60, "÷ √D", CYAN), (74, "mask", YELLOW), (98, "softmax\nof each row", YELLOW)):
        drawing.arrow((x, middle), (x + 16, middle))
        drawing.box(x + 16, 44, width, 42, text, color)
        x += width + 16
    drawing.text(x + 20, middle - 8, "W (T, S)", "start")
    drawing.arrow((x, middle), (x + 46, middle), (x + 46, 134))
    drawing.box(x + 6, 134, 80, 42, "W V", PURPLE)
    drawing.arrow((84, 155), (x + 6, 155))
    drawing.arrow((x + 86, 155), (x + 104, 155))
    drawing.text(x + 108, 159, "Z (T, E)", "start")
    return drawing.html()


def training_step() -> HTMLOutput:
    """Draw one step of training: forward pass, loss, backward pass, clipping and the update."""
    drawing = Drawing(640, 150, "a batch gives a loss, the loss a gradient, and the gradient an update of the weights")
    steps = (
        ("batch", "(B, T + 1) ids", PURPLE),
        ("model", "logits (B, T, V)", BLUE),
        ("loss", "mean of −log p", RED),
        ("gradient", "one per weight", YELLOW),
        ("clip", "norm at most c", CYAN),
        ("AdamW", "rate η(t)", GREEN),
    )
    width, gap, y = 88, 20, 20
    for i, (name, detail, color) in enumerate(steps):
        x = 4 + (width + gap) * i
        drawing.box(x, y, width, 40, name, color)
        drawing.text(x + width / 2, y + 58, detail, size=11)
        if i:
            drawing.arrow((x - gap, y + 20), (x, y + 20))
    first = 4 + (width + gap) + width / 2
    last = 4 + (width + gap) * (len(steps) - 1) + width / 2
    drawing.line((last, y + 68), (last, 120), (first, 120), color=GREEN, dash="5 3")
    drawing.arrow((first, 120), (first, y + 68), color=GREEN, dash="5 3")
    drawing.text((first + last) / 2, 138, "the weights of the next step", color=GREEN)
    return drawing.html()


def architectures() -> HTMLOutput:
    """Draw which inputs each output depends on in three architectures and under a prefix mask."""
    drawing = Drawing(
        650, 190, "full, causal, prefix and encoder-decoder attention: lines join an output to its inputs"
    )
    pitch, low, high = 25, 140, 56

    def row(x0: float, y: float, names: Sequence[str], color: str) -> None:
        for j, name in enumerate(names):
            drawing.circle(x0 + pitch * j, y, 9, color, 0.4)
            drawing.text(x0 + pitch * j, y + 4, name, size=11)

    panels = (
        ("encoder-only", 5, 5, BLUE),
        ("decoder-only", 5, 0, RED),
        ("decoder-only, prefix", 5, 3, RED),
    )
    x0 = 20.0
    for title, n, n_prefix, color in panels:
        drawing.text(x0 + pitch * (n - 1) / 2, 22, title)
        for i in range(n):
            for j in range(n):
                if j <= i or j < n_prefix:
                    drawing.line((x0 + pitch * i, high + 9), (x0 + pitch * j, low - 9), color=color, width=0.9)
        row(x0, high, [""] * n, color)
        row(x0, low, [f"x{'₁₂₃₄₅'[j]}" for j in range(n)], PURPLE)
        x0 += pitch * n + 28
    drawing.text(x0 + pitch * 2.7, 22, "encoder-decoder")
    target = x0 + pitch * 3.4
    for i in range(3):
        for j in range(3):
            drawing.line((x0 + pitch * i, high + 9), (x0 + pitch * j, low - 9), color=BLUE, width=0.9)
            if j <= i:
                drawing.line((target + pitch * i, high + 9), (target + pitch * j, low - 9), color=RED, width=0.9)
    drawing.arrow((x0 + pitch * 2 + 11, high), (target - 11, high), color=GREEN, width=1.6)
    row(x0, high, [""] * 3, BLUE)
    row(x0, low, ["x₁", "x₂", "x₃"], PURPLE)
    row(target, high, [""] * 3, RED)
    row(target, low, ["y₁", "y₂", "y₃"], PURPLE)
    drawing.text(target - 20, high - 14, "cross", color=GREEN, size=11)
    drawing.text(325, 178, "bottom: inputs of a layer; top: its outputs")
    return drawing.html()


def interventions() -> HTMLOutput:
    """Draw where each method of the chapter reads the residual stream or changes it."""
    drawing = Drawing(650, 224, "methods that read the residual stream, in green, and methods that change it, in red")
    y, left, pitch, width = 120, 60, 190, 120
    drawing.text(left - 34, y + 4, "ids", "end")
    drawing.line((left - 30, y), (left, y), width=3)
    for n in range(3):
        x = left + pitch * n
        drawing.box(x, y - 22, width, 44, f"block {n}\nadds to the stream", BLUE)
        stop = x + pitch if n < 2 else 630
        drawing.line((x + width, y), (stop, y), width=3)
    drawing.text(634, y + 4, "l", "start")
    readers = (
        (left + 140, "logit lens,\nprobe"),
        (left + 140 + pitch, "logit lens,\nprobe"),
        (left + 135 + 2 * pitch, "attribution:\na sum of parts"),
    )
    for x, text in readers:
        drawing.box(x - 50, 22, 100, 38, text, GREEN)
        drawing.arrow((x, y), (x, 60), color=GREEN)
    drawing.box(left + 4, 174, 112, 38, "ablate a head:\nZₕ = 0", RED)
    drawing.arrow((left + 60, 174), (left + 60, y + 22), color=RED)
    drawing.box(left + pitch - 16, 174, 112, 38, "trace: weights\nfrom q and k", GREEN)
    drawing.arrow((left + pitch + 40, y + 22), (left + pitch + 40, 174), color=GREEN)
    drawing.box(left + pitch + 112, 174, 130, 38, "patch: copy from\nthe clean run", RED)
    drawing.arrow((left + pitch + 155, 174), (left + pitch + 155, y + 3), color=RED)
    return drawing.html()


def decoder_only() -> HTMLOutput:
    """Draw a decoder-only Transformer with the shape of each tensor."""
    drawing = Drawing(640, 252, "ids become vectors, blocks add to them, and the embedding table gives logits")
    y, height, gap = 76, 62, 20
    middle = y + height / 2
    parts = (
        (62, "ids\n(T)", PURPLE),
        (98, "embedding\n+ positions", CYAN),
        (200, "", BLUE),
        (60, "norm", YELLOW),
        (84, "× Eᵀ\n(tied)", CYAN),
    )
    starts = [4 + sum(width + gap for width, _, _ in parts[:i]) for i in range(len(parts))]
    for i, (x, (width, text, color)) in enumerate(zip(starts, parts, strict=True)):
        if text:
            drawing.box(x, y, width, height, text, color)
        else:
            drawing.box(x, y - 66, width, height + 132, "", color, 0.06)
            drawing.text(x + width / 2, y - 48, "block, L times")
        if i:
            drawing.arrow((x - gap, middle), (x, middle))
    block = starts[2]
    drawing.line((block, middle), (block + 200, middle), width=2)
    branches = (
        (8, y - 34, "norm → attention", BLUE, 24, 88),
        (62, y + 66, "norm → feed-forward", GREEN, 112, 176),  # reads the stream after the first sum
    )
    for x, top, name, color, tap, plus in branches:
        drawing.box(block + x, top, 130, 30, name, color)
        edge = top + 30 if top < y else top
        drawing.arrow((block + tap, middle), (block + tap, edge))
        drawing.circle(block + plus, middle, 8, RED, 0.3)
        drawing.text(block + plus, middle + 4, "+")
        drawing.arrow((block + plus, edge), (block + plus, middle + (-8 if top < y else 8)))
    drawing.text(starts[1] + 49, y + height + 20, "(T, M)")
    drawing.text(block + 100, y + height + 86, "residual stream (T, M)")
    drawing.text(starts[4] + 42, y + height + 20, "logits (T, V)")
    drawing.arrow((starts[4] + 84, middle), (starts[4] + 84 + gap, middle))
    return drawing.html()


def statement_test() -> HTMLOutput:
    """Draw how a sentence becomes a test with a verdict, and how a condition leads back to the sentence."""
    drawing = Drawing(660, 182, "a sentence, its quantifier and cases, both sides, and a verdict")
    steps = (
        ("sentence", "as printed", PURPLE),
        ("quantifier", "all, can, at least", CYAN),
        ("cases", "small, extreme, random", YELLOW),
        ("both sides", "computed separately", BLUE),
        ("verdict", "holds, or the\nsmallest case", GREEN),
    )
    width, gap, y = 112, 18, 60
    for i, (name, detail, color) in enumerate(steps):
        x = 4 + (width + gap) * i
        drawing.box(x, y, width, 40, name, color)
        for line, text in enumerate(detail.split("\n")):
            drawing.text(x + width / 2, y + 60 + 16 * line, text, size=11)
        if i:
            drawing.arrow((x - gap, y + 20), (x, y + 20))
    last = 4 + (width + gap) * (len(steps) - 1) + width / 2
    drawing.arrow((last, y), (last, 26), (4 + width / 2, 26), (4 + width / 2, y), color=RED, dash="5 3")
    drawing.text(320, 18, "if it fails in some cases: state the condition, and test the corrected sentence", color=RED)
    drawing.text(320, y + 116, "change the thing under test on purpose: does the verdict change?")
    return drawing.html()


def rotation(angle: float = 0.6, positions: Sequence[int] = (0, 1, 2, 3)) -> HTMLOutput:
    """Draw one pair of features of a query that rotary positions turn by `angle` per position."""
    drawing = Drawing(600, 250, "a pair of features turns by the same angle at each position")
    x0, y0, radius = 130, 125, 100
    drawing.circle(x0, y0, radius, "currentColor", 0.0)
    drawing.line((x0 - 115, y0), (x0 + 115, y0), dash="3 3")
    drawing.line((x0, y0 - 115), (x0, y0 + 115), dash="3 3")
    for position in positions:
        turn = 0.25 + angle * position
        x, y = x0 + radius * math.cos(turn), y0 - radius * math.sin(turn)
        drawing.arrow((x0, y0), (x, y), color=COLORS[position % len(COLORS)], width=2)
        drawing.text(x0 + 118 * math.cos(turn), y0 - 112 * math.sin(turn) + 4, f"{position}")
    drawing.text(265, 90, "Position p turns the pair by p·θ.", "start")
    drawing.text(265, 112, "Turning q at i and k at j leaves", "start")
    drawing.text(265, 130, "q·k a function of (i − j)·θ.", "start")
    return drawing.html()


def key_value_cache(tokens: Sequence[str]) -> HTMLOutput:
    """Draw decoding steps with a key-value cache: each step computes one new key and value and reads the others."""
    side = 40
    drawing = Drawing(150 + side * len(tokens) + 170, 40 + side * len(tokens), "each step adds one key and value")
    for j, token in enumerate(tokens):
        drawing.text(150 + side * j + side / 2, 20, token)
    for i, token in enumerate(tokens):
        y = 32 + side * i
        drawing.text(140, y + side / 2, f"step {i + 1}, query {token}", "end")
        for j in range(i + 1):
            color = RED if j == i else BLUE
            drawing.box(150 + side * j + 2, y, side - 4, side - 8, "new" if j == i else "", color, 0.35)
    drawing.box(165 + side * len(tokens), 40, 18, 18, "", RED, 0.35)
    drawing.text(190 + side * len(tokens), 54, "computed now", "start")
    drawing.box(165 + side * len(tokens), 68, 18, 18, "", BLUE, 0.35)
    drawing.text(190 + side * len(tokens), 82, "read from the cache", "start")
    return drawing.html()


def ctc_lattice(text: str, n_frames: int) -> HTMLOutput:
    """Draw the lattice of CTC: the extended text by frames, with the allowed steps."""
    symbols = ["–"]
    for character in text:
        symbols += [character, "–"]
    dx, dy = 62, 36
    drawing = Drawing(90 + dx * n_frames, 40 + dy * len(symbols), f"all alignments of {text} with {n_frames} frames")

    def reachable(t: int, s: int) -> bool:
        needed = len(symbols) - 1 - s
        return s <= 2 * t + 1 and needed <= 2 * (n_frames - 1 - t) + 1

    for s, symbol in enumerate(symbols):
        drawing.text(30, 36 + dy * s, symbol, size=14)
    for t in range(n_frames):
        drawing.text(70 + dx * t, 30 + dy * len(symbols), f"t = {t + 1}")
        for s, symbol in enumerate(symbols):
            if not reachable(t, s):
                continue
            x, y = 70 + dx * t, 32 + dy * s
            for step in (0, 1, 2):
                skips_blank = step == 2 and (symbol == "–" or (s >= 2 and symbols[s - 2] == symbol))
                if t and s >= step and not skips_blank and reachable(t - 1, s - step):
                    drawing.arrow((x - dx + 8, y - dy * step), (x - 8, y), width=0.9)
            drawing.circle(x, y, 7, YELLOW if symbol == "–" else RED, 0.5)
    return drawing.html()


def flash_tiles(n_rows: int = 4, n_columns: int = 6, causal: bool = False) -> HTMLOutput:
    """Draw the tiles of FlashAttention: one row of tiles at a time, with running statistics."""
    side = 44
    drawing = Drawing(150 + side * n_columns + 190, 60 + side * n_rows, "scores are computed tile by tile")
    drawing.text(150 + side * n_columns / 2, 16, "keys and values, tile by tile →")
    drawing.text(138, 40 + side * n_rows / 2, "queries", "end")
    current = n_rows // 2
    for i in range(n_rows):
        for j in range(n_columns):
            if causal and j * n_rows > (i + 1) * n_columns - 1:
                continue
            is_current, is_past = (i, j) == (current, 2), i < current or (i == current and j < 2)
            color = RED if is_current else BLUE if is_past else YELLOW
            drawing.box(150 + side * j, 28 + side * i, side - 4, side - 4, "", color, 0.6 if is_current else 0.15)
    x = 165 + side * n_columns
    for k, (color, text) in enumerate(
        ((RED, "in fast memory now"), (BLUE, "done, forgotten"), (YELLOW, "not yet computed"))
    ):
        drawing.box(x, 34 + 26 * k, 16, 16, "", color, 0.6 if color == RED else 0.15)
        drawing.text(x + 24, 47 + 26 * k, text, "start")
    drawing.text(x, 130, "Kept per query: the maximum m,", "start")
    drawing.text(x, 148, "the sum c and the output o.", "start")
    return drawing.html()
