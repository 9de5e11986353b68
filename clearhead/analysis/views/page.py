"""Render an attention report as one self-contained HTML page.

Layout and behavior are in `assets/`. This module encodes the data compactly, at readable precision, with a size bound
for any length. A short layer is stored completely. A long one is stored as an overview (largest and mean weight of each
tile) and, for every query, the keys with the largest weights; so pages stay usable at thousands of tokens. Values are
stored as the square root of the weight, which resolves small weights better.

    H matrices (the heads, then their mean)   T queries   S keys   R × C tiles   k stored keys per row
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
import math
import re
import wave
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, pad

from clearhead._core.atomic_io import wrap_os_errors
from clearhead._core.json_types import JSONObject
from clearhead._core.shapes import Float
from clearhead.analysis.views.attention_map import AttentionMap, HeadStats
from clearhead.analysis.views.chart import Chart, PCAProjection
from clearhead.analysis.views.report import ROLLOUT_LIMIT, AttentionReport, Sound
from clearhead.errors import ConfigError

_ASSETS = Path(__file__).parents[1] / "assets"
_SCRIPTS = ("store.js", "matrix.js", "tokens.js", "more.js", "app.js")
_THUMB = 34  # cells per side of a thumbnail
_MOST_TOKENS = 1 << 16  # key indices have 16 bits
BUDGET = 24 << 20  # bytes of a page's weights before compression
_FINE = 2 << 20  # maximum number of cells stored in 16 bits each
_SIDES = (256, 192, 128, 96, 64, 48, 32)
_KEYS_PER_ROW = (64, 48, 32, 24, 16, 12, 8, 4)


def render_page(report: AttentionReport, *, budget: int = BUDGET) -> str:
    """Return the page of a report as text.

    Args:
        report: The report.
        budget: Maximum bytes of weights before compression.

    Raises:
        ConfigError: If the run has more tokens than a page can show.
    """
    longest = max(max(len(attention_map.rows), len(attention_map.columns)) for attention_map in report.maps)
    if longest > _MOST_TOKENS:
        raise ConfigError(
            f"a page can show {_MOST_TOKENS:,} tokens but this run has {longest:,}; draw figures of some rows"
        )
    return render_template(
        "page.html", report.title, page_data(report, budget=budget), styles=("page.css",), scripts=_SCRIPTS
    )


def chart_page(title: str, charts: Sequence[Chart | PCAProjection]) -> str:
    """Return a page of charts: one file without scripts."""
    return render_template("charts.html", title, styles=("charts.css",), body="".join(chart.html() for chart in charts))


def render_template(
    template: str,
    title: str,
    data: object = None,
    *,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    body: str = "",
) -> str:
    """Insert everything into a template of `assets/`, so that the page is one file."""
    values = {"title": html.escape(title), "style": read_assets(*styles), "script": read_assets(*scripts), "body": body}
    # Escape "<", because "</" or "<!--" could end the script element.
    values["data"] = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    # In one pass, because user text may look like a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], read_assets(template))


def iframe(text: str, title: str) -> str:
    """Return a page in an iframe, which isolates its styles, for a notebook."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" sandbox="allow-scripts" title="{html.escape(title)}" '
        'style="width: 100%; height: 60rem; border: 0"></iframe>'
    )


def save_page(
    content: AttentionReport | Sequence[Chart | PCAProjection],
    path: str | Path,
    *,
    budget: int = BUDGET,
    title: str = "",
) -> Path:
    """Write the page of a report, or of charts under a title, to a file.

        analysis.save_page(analysis.attribute(model, ids).charts(), "why.html", title="Why this answer")

    Args:
        content: A report or a sequence of charts.
        path: Path of the HTML file.
        budget: Maximum bytes of weights before compression.
        title: Title of a page of charts.

    Returns:
        The path.

    Raises:
        ConfigError: If the report has more tokens than a page can show.
        StorageError: If the file cannot be written.
    """
    return write_file(
        render_page(content, budget=budget) if isinstance(content, AttentionReport) else chart_page(title, content),
        path,
    )


def write_file(content: str | bytes, path: str | Path, kind: str = "page") -> Path:
    """Write text or bytes to a file and create its folder."""
    path = Path(path)
    with wrap_os_errors(f"the {kind} cannot be written to {path}", advice="choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def script_module(*scripts: str) -> str:
    """Return scripts of `assets/` as an ES module for a page that has their elements.

    Its `show(contents, signal, history, location)` draws until the signal aborts; the last two store the selection. It
    returns the functions of the page: `go` changes the selection, `state`.
    """
    code = read_assets(*scripts or _SCRIPTS)
    return f"export function show(data, signal, history, location) {{\n{code}\nreturn api;\n}}\n"


def read_assets(*names: str) -> str:
    """Concatenate files of `assets/`."""
    return "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names)


def page_data(
    report: AttentionReport, *, budget: int = BUDGET, on_layer: Callable[[int, int], None] = lambda done, of: None
) -> JSONObject:
    """Return the data for the scripts of the page; `on_layer` is called with finished and total layers."""
    maps = list(report.maps)
    texts: dict[tuple[str, ...], int] = {}  # each list of tokens is stored once
    for attention_map in maps:
        for labels in (attention_map.rows, attention_map.columns):
            texts.setdefault(labels, len(texts))
    storage = plan(maps, budget)
    layers = []
    for i, attention_map in enumerate(maps):
        on_layer(i, len(maps))
        layers.append(_layer(attention_map, texts, storage))
    first = maps.index(report.default_map)
    rollouts = report.rollouts()
    image = None
    if report.image is not None:
        pixels = base64.b64encode(report.image.to(torch.uint8).contiguous().numpy().tobytes()).decode()
        image = {"height": report.image.shape[0], "width": report.image.shape[1], "pixels": pixels}
    in_order = [attention_map for stack_maps in report.stacks.values() for attention_map in stack_maps]
    return {
        "title": report.title,
        "metadata": list(report.metadata.items()),
        "texts": [list(labels) for labels in texts],
        "maps": layers,
        "order": [maps.index(attention_map) for attention_map in in_order],
        "start": {"number": first, "head": maps[first].n_heads, "row": report.query},  # all heads
        "rollouts": [
            {
                "title": stack_maps[0].title,
                "rows": texts[stack_maps[0].rows],
                "data": encode(quantize(rollouts[stack], 8), 8),
            }
            for stack, stack_maps in report.stacks.items()
            if stack in rollouts
        ],
        "norms": [
            {"path": path, "values": [float(f"{n:.4g}") for n in norms.tolist()]} for path, norms in report.norms
        ],
        "image": image,
        "sound": None if report.sound is None else _sound(report.sound),
        "footer": _footer(report),
    }


def _sound(sound: Sound) -> JSONObject:
    """Return the recording as a WAV file, the time of the picture's edges, and the recognized symbols."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sound.sample_rate)
        out.writeframes((sound.samples.float().clamp(-1, 1).cpu() * 32767).to(torch.int16).numpy().tobytes())
    ends = sound.ends
    step = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    return {
        "wav": base64.b64encode(file.getvalue()).decode(),
        "start": ends[0] - step,
        "end": ends[-1],
        "symbols": [{"text": text, "end": ends[n]} for n, text in sound.symbols.items()],
    }


def _layer(attention_map: AttentionMap, texts: dict[tuple[str, ...], int], storage: StoragePlan) -> JSONObject:
    stats = HeadStats(attention_map.layout, attention_map.rows, attention_map.columns)
    thumbs = _Thumbnails(attention_map)
    packed = make_packer(attention_map, storage)
    for rows in attention_map.row_blocks():
        for part in (stats, thumbs, packed):
            part.add(*rows)
    value_norms = None
    if attention_map.value_norms is not None:
        largest = float(attention_map.value_norms.max())
        value_norms = {
            "max": largest,
            "data": encode(quantize(attention_map.value_norms.float() / (largest or 1.0), 16), 16),
        }
    plain = {name: getattr(attention_map, name) for name in ("path", "stack", "title", "layer", "kind")}
    return plain | {
        "grid": attention_map.layout.grid,
        "heads": attention_map.n_heads,
        "rows": texts[attention_map.rows],
        "columns": texts[attention_map.columns],
        "thumbs": thumbs.result(),
        "pack": packed.result(),
        "value_norms": value_norms,
        "summary": [
            {
                "label": label.name,
                "score": label.score,
                "scores": {name: round(score, 4) for name, score in label.scores.items()},
                "entropy": round(entropy, 4),
                "distance": round(distance, 4),
            }
            for label, entropy, distance in stats.result().heads
        ],
    }


class _Thumbnails:
    """Thumbnails of each head and of their mean: the largest weight of each part."""

    def __init__(self, attention_map: AttentionMap) -> None:
        self._rows = len(attention_map.rows)
        R = min(self._rows, _THUMB)
        C = min(len(attention_map.columns), _THUMB)
        self._cells = torch.zeros(attention_map.n_heads + 1, R, C)

    def add(self, block: Tensor, start: int) -> None:
        _, R, C = self._cells.shape
        narrow = adaptive_max_pool2d(with_mean(block), (block.shape[1], C))
        rows = torch.arange(start, start + block.shape[1]) * R // self._rows
        self._cells.scatter_reduce_(1, rows[None, :, None].expand_as(narrow), narrow, "amax")

    def result(self) -> JSONObject:
        _, R, C = self._cells.shape
        return {"rows": R, "columns": C, "codes": encode(quantize(self._cells, 8), 8)}


def _footer(report: AttentionReport) -> str:
    """Return what made the page, and how exact its weights are."""
    # `inspect` and `listen` both write pages of recordings.
    sentences = ["Made by clearhead inspect." if report.sound is None else "Made by clearhead."]
    maps = list(report.maps)
    differences = [(p.difference, p.tolerance or 0.0) for p in maps if p.difference is not None]
    if differences:
        worst, allowed = max(differences)
        sentences.append(
            "The weights were recomputed from the inputs of each layer. Weights times values differ from the outputs "
            f"of the run by at most {worst:.1g} (tolerance: {allowed:.1g})."
        )
    if any(p.kind != "cross" and len(p.rows) > ROLLOUT_LIMIT for p in maps):
        sentences.append(f"Rollout is omitted above {ROLLOUT_LIMIT:,} tokens.")
    return " ".join((*sentences, "This page is self-contained."))


# ---------------------------------------------------------------------- weights as bytes


@dataclass(frozen=True)
class StoragePlan:
    """Storage of weights: complete (no `side`), or at most side × side tiles and `keys_per_row` keys per row."""

    bits: int = 16
    side: int | None = None
    keys_per_row: int = 0


def plan(maps: list[AttentionMap], budget: int = BUDGET) -> StoragePlan:
    """Return the most detailed plan within the budget, or the smallest one."""
    sizes = [(attention_map.n_heads + 1, len(attention_map.rows), len(attention_map.columns)) for attention_map in maps]
    cells = sum(H * T * S for H, T, S in sizes)
    if cells <= _FINE:
        return StoragePlan(bits=16)
    if cells <= budget:
        return StoragePlan(bits=8)
    for side, keys_per_row in itertools.product(_SIDES, _KEYS_PER_ROW):
        tiles = sum(2 * H * min(T, side) * min(S, side) for H, T, S in sizes)
        rows = sum(3 * H * T * min(S, keys_per_row) for H, T, S in sizes)  # 2 bytes per key, 1 per weight
        # The overview takes at most a third.
        if tiles <= budget / 3 and tiles + rows <= budget:
            return StoragePlan(bits=8, side=side, keys_per_row=keys_per_row)
    return StoragePlan(bits=8, side=_SIDES[-1], keys_per_row=_KEYS_PER_ROW[-1])


def quantize(weights: Float[Tensor, "..."], bits: int) -> Tensor:
    """Return √w in steps of 1/(2^bits − 1): uint8, or 16 bits in an int32 tensor."""
    codes = (weights.clamp(0, 1).sqrt() * ((1 << bits) - 1)).round()
    return codes.to(torch.uint8 if bits == 8 else torch.int32)


def encode(codes: Tensor, bits: int) -> str:
    """Return little-endian bytes, deflated, in base64."""
    raw = codes.contiguous().numpy().astype("<u2" if bits == 16 else "u1")
    return base64.b64encode(zlib.compress(raw.tobytes(), 6)).decode()


def make_packer(attention_map: AttentionMap, storage: StoragePlan) -> _FullMatrices | _TiledMatrices:
    """Return the encoder of one layer's weights, heads and mean, for this plan."""
    return (
        _FullMatrices(storage.bits)
        if storage.side is None
        else _TiledMatrices(attention_map, storage.side, storage.keys_per_row)
    )


def with_mean(block: Float[Tensor, "heads r S"]) -> Float[Tensor, "H r S"]:
    """Append the mean of the heads."""
    return torch.cat((block, block.mean(0, keepdim=True)))


class _FullMatrices:
    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._parts: list[Tensor] = []

    def add(self, block: Tensor, start: int) -> None:
        self._parts.append(quantize(with_mean(block), self._bits))

    def result(self) -> JSONObject:
        return {"bits": self._bits, "matrices": [encode(matrix, self._bits) for matrix in torch.cat(self._parts, 1)]}


class _TiledMatrices:
    def __init__(self, attention_map: AttentionMap, side: int, keys_per_row: int) -> None:
        self._sizes = H, T, S = attention_map.n_heads + 1, len(attention_map.rows), len(attention_map.columns)
        self._tall, self._wide = math.ceil(T / side), math.ceil(S / side)  # cells of a tile
        R, C = math.ceil(T / self._tall), math.ceil(S / self._wide)
        self._largest = torch.zeros(H, R, C)
        self._sums = torch.zeros(H, R, C)
        keys_per_row = min(keys_per_row, S)
        self._keys = torch.zeros(H, T, keys_per_row, dtype=torch.int32)
        self._weights = torch.zeros(H, T, keys_per_row)

    def add(self, block: Tensor, start: int) -> None:
        H, _, S = self._sizes
        C, keys_per_row = self._sums.shape[-1], self._keys.shape[-1]
        block = with_mean(block)
        row_slice = slice(start, start + block.shape[1])
        rows = torch.arange(row_slice.start, row_slice.stop) // self._tall
        parted = pad(block, (0, C * self._wide - S)).unflatten(-1, (C, self._wide))  # (H, r, C, cells)
        self._largest.scatter_reduce_(1, rows[None, :, None].expand(H, -1, C), parted.amax(-1), "amax")
        self._sums.index_add_(1, rows, parted.sum(-1))
        top = block.topk(keys_per_row, dim=-1)
        self._keys[:, row_slice] = top.indices.to(torch.int32)
        self._weights[:, row_slice] = top.values

    def result(self) -> JSONObject:
        _, T, S = self._sizes
        # Number of cells of each tile along both sides; the last tile may have fewer.
        tall = (T - torch.arange(0, T, self._tall)).clamp(max=self._tall)
        wide = (S - torch.arange(0, S, self._wide)).clamp(max=self._wide)
        return {
            "bits": 8,
            "tile": [self._tall, self._wide],
            "tiles": list(self._sums.shape[1:]),
            "keys_per_row": self._keys.shape[-1],
            "largest": [encode(matrix, 8) for matrix in quantize(self._largest, 8)],
            "mean": [encode(matrix, 8) for matrix in quantize(self._sums / (tall[:, None] * wide), 8)],
            "keys": [encode(matrix, 16) for matrix in self._keys],
            "weights": [encode(matrix, 8) for matrix in quantize(self._weights, 8)],
        }
