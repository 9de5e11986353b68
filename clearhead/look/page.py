"""The page: one HTML file with the weights of a run in it, which needs no network and nothing beside it.

What it looks like and does is in `assets/`; here its data are put together. At thousands of tokens the page holds tiles
and each query's largest weights instead of whole matrices (see `packing`), so that it stays small and quick."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead.disk import refusals
from clearhead.errors import ConfigError
from clearhead.look.album import ROLLOUT_LIMIT, Album
from clearhead.look.chart import Chart, Plane, chart_page
from clearhead.look.labels import Collector, Tally
from clearhead.look.packing import BUDGET, Plan, encode, packing, plan, quantise, with_mean
from clearhead.look.picture import Picture

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("store.js", "matrix.js", "tokens.js", "more.js", "app.js")
_THUMB = 34  # cells of a thumbnail's side
_MOST_TOKENS = 1 << 16  # a kept key's number has 16 bits


def page(album: Album, *, budget: int = BUDGET) -> str:
    """The whole page as text. `budget` bounds the bytes of weights in it, before compression."""
    longest = max(max(len(picture.rows), len(picture.columns)) for picture in album.pictures)
    if longest > _MOST_TOKENS:
        raise ConfigError(
            f"a page shows up to {_MOST_TOKENS:,} tokens and this run has {longest:,}; draw pictures of some rows"
        )
    return filled("page.html", album.title, contents(album, budget=budget), styles=("page.css",), scripts=_SCRIPTS)


def filled(template: str, title: str, data: Any, *, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """A template of `assets/` with everything put into it, so that the page is one file."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "style": _assets(*styles),
        "script": _assets(*scripts),
        # Inside a script element only "</" and "<!--" could end it: no "<" is left.
        "data": text.replace("<", "\\u003c"),
    }
    # In one pass: what a user wrote may look like a place of the template.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _assets(template))


def framed(text: str, title: str) -> str:
    """For a notebook: a page in a frame of its own, which neither takes nor gives styles."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" sandbox="allow-scripts" title="{html.escape(title)}" '
        'style="width: 100%; height: 60rem; border: 0"></iframe>'
    )


def save_page(
    shown: Album | Sequence[Chart | Plane], path: str | Path, *, budget: int = BUDGET, title: str = ""
) -> Path:
    """Write the page of an album, or of charts under a title, to a file.

        look.save_page(look.attribute(model, ids).charts(), "why.html", title="Why this answer")

    A page is one file, which needs no network."""
    return written(page(shown, budget=budget) if isinstance(shown, Album) else chart_page(title, shown), path)


def written(text: str, path: str | Path) -> Path:
    """Write a page's text to a file, whose folder is made."""
    path = Path(path)
    with refusals(f"the page cannot be written to {path}", then="choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def style(*sheets: str) -> str:
    """Style sheets of `assets/`, or that of the page."""
    return _assets(*sheets or ("page.css",))


def module(*scripts: str) -> str:
    """Scripts of `assets/` (those of the page) as an ES module, for a page that has their elements: `show(contents,
    signal, history, location)` draws until the signal aborts. The last two, the browser's own, keep what is chosen."""
    inside = _assets(*scripts or _SCRIPTS)
    return f"export function show(data, signal, history, location) {{\n{inside}\nreturn {{ go, state }};\n}}\n"


def _assets(*names: str) -> str:
    return "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names)


def contents(
    album: Album, *, budget: int = BUDGET, on_layer: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """What a page shows, as its scripts read it; before each layer `on_layer` is told how many are done, and of all."""
    pictures = list(album.pictures)
    texts: dict[tuple[str, ...], int] = {}  # tokens are written once, however many layers show them
    for picture in pictures:
        for labels in (picture.rows, picture.columns):
            texts.setdefault(labels, len(texts))
    how, layers = plan(pictures, budget), []
    for i, picture in enumerate(pictures):
        on_layer(i, len(pictures))
        layers.append(_layer(picture, texts, how))
    first, rollouts = pictures.index(album.first), album.rollouts()
    in_order = [picture for some in album.groups.values() for picture in some]
    return {
        "title": album.title,
        "facts": list(album.facts.items()),
        "texts": [list(labels) for labels in texts],
        "pictures": layers,
        "order": [pictures.index(picture) for picture in in_order],
        "start": {"number": first, "head": pictures[first].n_heads, "row": album.row},  # all heads
        "rollouts": [
            {"title": some[0].title, "rows": texts[some[0].rows], "data": encode(quantise(rollouts[group], 8), 8)}
            for group, some in album.groups.items()
            if group in rollouts
        ],
        "norms": [{"path": path, "values": [float(f"{n:.4g}") for n in norms.tolist()]} for path, norms in album.norms],
        "image": _image(album.image),
        "foot": _foot(pictures),
    }


def _layer(picture: Picture, texts: dict[tuple[str, ...], int], how: Plan) -> dict[str, Any]:
    tally = Tally(picture.places, picture.rows, picture.columns)
    thumbs, packed = _Thumbs(picture), packing(picture, how)
    picture.walk(tally, thumbs, packed)
    plain = {name: getattr(picture, name) for name in ("path", "group", "title", "layer", "kind")}
    return plain | {
        "grid": picture.places.grid,
        "heads": picture.n_heads,
        "rows": texts[picture.rows],
        "columns": texts[picture.columns],
        "thumbs": thumbs.result(),
        "pack": packed.result(),
        "written": _written(picture.written),
        "summary": [
            {
                "label": label.name,
                "score": label.score,
                "scores": {name: round(score, 4) for name, score in label.scores.items()},
                "entropy": round(entropy, 4),
                "distance": round(distance, 4),
            }
            for label, entropy, distance in tally.result().heads
        ],
    }


class _Thumbs(Collector):
    """Each head, and their mean, at the size of a stamp: the largest weight of each part."""

    def __init__(self, picture: Picture) -> None:
        self._rows = len(picture.rows)
        R, C = min(self._rows, _THUMB), min(len(picture.columns), _THUMB)
        self._cells = torch.zeros(picture.n_heads + 1, R, C)

    def add(self, block: Tensor, start: int) -> None:
        _, R, C = self._cells.shape
        narrow = adaptive_max_pool2d(with_mean(block), (block.shape[1], C))
        rows = torch.arange(start, start + block.shape[1]) * R // self._rows
        self._cells.scatter_reduce_(1, rows[None, :, None].expand_as(narrow), narrow, "amax")

    def result(self) -> dict[str, Any]:
        _, R, C = self._cells.shape
        return {"rows": R, "columns": C, "codes": encode(quantise(self._cells, 8), 8)}


def _written(written: Tensor | None) -> dict[str, Any] | None:
    if written is None:
        return None
    most = float(written.max())
    return {"most": most, "data": encode(quantise(written.float() / (most or 1.0), 16), 16)}


def _image(image: Tensor | None) -> dict[str, Any] | None:
    if image is None:
        return None
    pixels = base64.b64encode(image.to(torch.uint8).contiguous().numpy().tobytes()).decode()
    return {"height": image.shape[0], "width": image.shape[1], "pixels": pixels}


def _foot(pictures: list[Picture]) -> str:
    said = ["Made by clearhead look."]
    known = [(p.difference, p.tolerance or 0.0) for p in pictures if p.difference is not None]
    if known:
        worst, allowed = max(known)
        said.append(
            "The run stayed on its fast path; the weights were recomputed from what each layer was given. Times the "
            f"values, they differ from what the run itself produced by {worst:.1g} at most (allowed: {allowed:.1g})."
        )
    if any(p.kind != "cross" and len(p.rows) > ROLLOUT_LIMIT for p in pictures):
        said.append(f"Rollout is left out above {ROLLOUT_LIMIT:,} tokens.")
    return " ".join((*said, "Everything on this page is in this file."))
