"""`clearhead mask`: draw and count an attention mask, and show its sparse plan."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import clearhead as ch
from clearhead._core.json_types import JSONObject
from clearhead.cli.app import app
from clearhead.cli.options import Json, argument, option
from clearhead.cli.output import console, print_line, print_wrapped, show_json, show_picture, writing
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.attention.sparse.plan import Plan


@app.command()
def mask(
    expression: Annotated[str, argument("For example: 'causal() & (window(256, 0) | every(64))'")],
    n: Annotated[int, option("Number of queries (and keys).", "--n", "-n", min=0)] = 16,
    keys: Annotated[int | None, option("Number of keys, if different.", min=0)] = None,
    offset: Annotated[int | None, option("Position of the first query among the keys.", min=0)] = None,
    position: Annotated[
        int | None, option("Draw what this position sees on the grid of the mask (an expression with axis).", min=0)
    ] = None,
    svg: Annotated[Path | None, option("Write the drawing to this SVG file.")] = None,
    plan: Annotated[
        bool, option("Show the sparse plan: which pairs are computed and which are skipped.", "--plan")
    ] = False,
    device: Annotated[str | None, option("Device of the plan: cpu or cuda. Default: a GPU if available.")] = None,
    json: Json = False,
) -> None:
    """Draw a mask and print the number of allowed pairs, its density and its sparsity; or draw a bias of scores.

    Rows are queries, columns are keys; filled cells may attend. Expressions use Python's syntax:
    full() causal() window(before, after) clamped(before, after) every(step, start=0) dilated(step) prefix(n)
    blocks(size) scattered(per_row, seed) padding(length) axis(mask, dim, grid=(…), tile=(…))
    per_head(mask, …, repeat=1), joined by & | ~ and .T. Masks of tensors (documents(ids), intervals(start, stop),
    selected(blocks, size), allow, forbid) exist in Python only.

    Biases of scores: alibi(heads) distance(function), joined by +. Functions of the distance: linear(slope)
    clipped(slope, limit) logarithm(scale, rate) power(scale, exponent) gaussian(width). A bias with a table,
    relative(table, buckets(…)), exists in Python only."""
    if _is_bias(expression):
        if plan or position is not None or device is not None:
            raise ConfigError(f"{expression} is a bias; --plan, --device and --position are for masks")
        return _show_bias(expression, n, keys, offset, svg, json)
    parsed = ch.masks.parse(expression)
    S = n if keys is None else keys
    allowed = parsed.count(n, S, query_offset=offset)
    density = parsed.density(n, S, query_offset=offset)
    on_grid = None if position is None else ch.masks.draw_on_grid(parsed, position, positions=n)
    drawing = parsed.draw(n, S, query_offset=offset) if on_grid is None else on_grid
    if svg is not None:
        with writing(svg, (".svg",)):
            svg.write_text(drawing.svg(), encoding="utf-8")
    sparse_plan, explanation = _plan(parsed, n, S, offset, device) if plan else (None, "")
    pairs = n * S * math.prod(parsed.batch_shape)
    if json:
        document: JSONObject = {"expression": str(parsed), "queries": n, "keys": S, "pairs": pairs, "allowed": allowed}
        document |= {"density": density, "sparsity": 1.0 - density}
        if sparse_plan is not None:
            counts = {
                "dense": sparse_plan.dense_pairs,
                "sparse": sparse_plan.sparse_pairs,
                "computed": sparse_plan.computed_pairs,
            }
            document["plan"] = {**counts, "density": sparse_plan.density, "explanation": explanation}
        return show_json(document)
    show_picture(drawing.text(console.width))
    sparsity = 100 * (1 - density)
    # Never rounded to 100 % while pairs are allowed.
    sparsity_text = f"{sparsity:.4g}" if 99.95 <= sparsity < 100 else f"{sparsity:.1f}"
    console.print(f"\n{allowed:,} of {pairs:,} pairs, density {density:.3g}, sparsity {sparsity_text} %")
    if sparse_plan is not None:
        for line in f"\n{explanation}\n".split("\n"):
            print_wrapped(line.lstrip(), indent=len(line) - len(line.lstrip()), hang=11)
        show_picture(sparse_plan.draw().text(console.width))
    if svg is not None:
        print_line(f"drawing written to {svg}")


def _is_bias(expression: str) -> bool:
    """Return whether an expression begins with the name of a bias."""
    return re.match(r"\s*(alibi|distance|relative)\b", expression) is not None


def _show_bias(expression: str, n: int, keys: int | None, offset: int | None, svg: Path | None, json: bool) -> None:
    """Draw the first head of a bias and print the size of its values."""
    from clearhead.attention import biases

    bias, S = biases.parse(expression), n if keys is None else keys
    drawing = bias.draw(n, S, query_offset=offset or 0)
    if svg is not None:
        with writing(svg, (".svg",)):
            svg.write_text(drawing.svg(), encoding="utf-8")
    n_heads = bias.n_heads or 1
    if json:
        return show_json(
            {"expression": str(bias), "queries": n, "keys": S, "heads": n_heads, "values": n_heads * (n + S)}
        )
    show_picture(drawing.text(console.width))
    heads = "one head" if n_heads == 1 else f"{n_heads} heads"
    console.print(f"\n{n_heads * (n + S):,} values by distance for {heads}, {n_heads * n * S:,} as a tensor")
    if svg is not None:
        print_line(f"drawing written to {svg}")


def _plan(mask: ch.masks.Mask, n: int, S: int, offset: int | None, device: str | None) -> tuple[Plan, str]:
    """Return the plan for a device, which need not be available, and its explanation."""
    import torch

    from clearhead.attention.sparse.cost_model import rates_for
    from clearhead.attention.sparse.plan import default_blocking, plan

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; expected cpu or cuda")
    torch_device = torch.device(name)
    sparse_plan = plan(mask, n, S, query_offset=offset, blocking=default_blocking(torch_device))
    return sparse_plan, sparse_plan.explain(rates_for(torch_device))
