"""Tables of a trace: errors of the recomputed weights as text, and the last run as HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from clearhead._core.text_tables import PreformattedText, RawHTML, html_table, table
from clearhead.analysis.tracing.recompute import Indices

if TYPE_CHECKING:
    from clearhead.analysis.tracing.trace import Trace

_MAX_THUMBNAIL_POSITIONS = 48


def error_table(trace: Trace, rows: Indices, run: int) -> str:
    """Return a table with the implementation, the maximum error and the tolerance of each attention layer."""
    lines = [("layer", "heads", "queries × keys", "implementation", "max error", "tolerance")]
    for path in trace.paths:
        error = trace.difference(path, rows=rows, run=run)
        bound = trace.tolerance(path, rows=rows, run=run)
        lines.append((path or "the model", *_layer_columns(trace, path, run), f"{error:.1e}", f"{bound:.1e}"))
    note = "The weights are recomputed from the recorded attention inputs."
    return PreformattedText(table(lines, right=(1, 2, 4, 5)) + f"\n{note}")


def run_html(trace: Trace) -> str:
    """Return a table of the last run, with a thumbnail of each layer that is short enough."""
    recorded = set(trace.names)
    rows = [("recorded", "heads", "queries × keys", "implementation", "mean over heads")]
    for path in trace.paths:
        if f"{path}.weights".lstrip(".") in recorded:
            rows.append((path, *_layer_columns(trace, path, -1), _thumbnail(trace, path)))
    for path in trace.outputs:
        if f"{path}.output".lstrip(".") in recorded:
            rows.append((f"{path or 'the model'} output", "", str(tuple(trace.output(path).shape)), "", ""))
    caption = repr(trace)
    return html_table(rows, right=(1, 2), caption=caption) if len(rows) > 1 else f"<p>{escape(caption)}</p>"


def no_attention_reason(records_attention: bool, has_run: bool) -> str:
    """Return the reason why a trace contains no attention layer.

    Args:
        records_attention: Whether the patterns of the trace name the weights of a module.
        has_run: Whether a module ran inside the trace.
    """
    if not records_attention:
        return "No attention is recorded because the patterns name only outputs or inputs; add the pattern **.weights"
    if not has_run:
        return "Nothing has run inside this trace; call the model in its `with` block."
    return (
        "No attention was recorded. A trace records clearhead's attend and MultiHeadAttention, torch's "
        "scaled_dot_product_attention and nn.MultiheadAttention, and attention that is written out as "
        "softmax(q @ k.T) @ v; the model computes attention in another way, or has none."
    )


def _layer_columns(trace: Trace, path: str, run: int) -> tuple[str, str, str]:
    """Return the number of heads, the numbers of queries and keys, and the implementation, as text."""
    n_heads, n_queries, n_keys = trace.layer_sizes(path, run=run)
    return str(n_heads), f"{n_queries} × {n_keys}", trace.implementation(path, run=run)


def _thumbnail(trace: Trace, path: str) -> str:
    """Return a small drawing of the mean of all heads, or nothing for a long sequence."""
    _, T, S = trace.layer_sizes(path)
    if not 0 < max(T, S) <= _MAX_THUMBNAIL_POSITIONS:
        return ""
    weights = trace.weights(path).detach().float().flatten(0, -4)[0].mean(0)
    squares = "".join(
        f'<rect x="{j}" y="{i}" width="1" height="1" fill-opacity="{weights[i, j]:.2f}"/>'
        for i, j in (weights >= 0.01).nonzero().tolist()
    )
    size = f'viewBox="0 0 {S} {T}" width="{max(48, min(2 * S, 96))}"'
    return RawHTML(f'<svg {size} style="outline:1px solid #8888" fill="currentColor" role="img">{squares}</svg>')
