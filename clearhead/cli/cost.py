"""`clearhead cost`: what a model or an attention layer costs, predicted by formula and, if asked, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.output import Json, console, show_json, show_picture, table

if TYPE_CHECKING:
    from clearhead.costs import Cost
    from clearhead.costs.result import Part

# Of --bias, --batch, --dtype, --train, --impl and --formulas.
_DEFAULTS = (False, 1, "float32", False, "auto", False)


@app.command()
def cost(
    model: Annotated[str | None, typer.Argument(help="A preset, such as base, gpt2 or vit-small.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Instead of a model: one attention layer of this width.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Its heads.")] = None,
    n_kv_heads: Annotated[int | None, typer.Option(help="Its key/value heads, if fewer.")] = None,
    d_head: Annotated[int | None, typer.Option(help="Its heads' width, if not d_model / n_heads.")] = None,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Whether its projections have biases.")] = False,
    tokens: Annotated[
        int | None, typer.Option("--tokens", "-n", help="Length of the sequence (of the target).")
    ] = None,
    source: Annotated[int | None, typer.Option(help="Length of the source, if not the same.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    train: Annotated[
        bool, typer.Option("--train", help="A training step with AdamW instead of a forward pass.")
    ] = False,
    mask: Annotated[str | None, typer.Option(help="A mask, such as 'causal() & window(256, 0)'.")] = None,
    impl: Annotated[str, typer.Option(help="How attention is computed: auto, fused, gathered or reference.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu; --measure needs it here.")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Run it here too, and show the ratio; without a model: all that the project answers for.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Without a model: the results file; written after every row.")
    ] = None,
    fit: Annotated[str | None, typer.Option(help="Largest batch and length that fit, in 24GiB say.")] = None,
    formulas: Annotated[bool, typer.Option("--formulas", help="Show the formulas beside the numbers.")] = False,
    json: Json = False,
) -> None:
    """Parameters, operations, bytes and memory of a model or of one attention layer, before anything is built.

    Operations are those of the matrix products, two for each multiplication with its addition.
    """
    from clearhead.costs import cost as predict
    from clearhead.errors import ConfigError

    everything = measure and model is None and d_model is None and n_heads is None and tokens is None
    if out is not None and not everything:
        raise ConfigError("--out is for --measure without a model and sizes, which measures every model")
    if everything:
        sizes = (n_kv_heads, d_head, source, mask, fit)
        if sizes != (None,) * 5 or (bias, batch, dtype, train, impl, formulas) != _DEFAULTS:
            raise ConfigError(
                "--measure without a model has its own sizes, dtypes, modes; give a model, or only --device and --out"
            )
        _measure_everything(device, out, json)
        return
    if source is not None and tokens is None:
        raise ConfigError("--source is the length of what is read; give --tokens, that of what is written, too")
    subject = _subject(model, d_model, n_heads, {"n_kv_heads": n_kv_heads, "d_head": d_head, "bias": bias})
    how = _how(dtype, train, mask, impl, device, measure)
    length: Any = tokens if source is None or tokens is None else (source, tokens)
    found = predict(subject, tokens=length, batch=batch, **how)
    document = found.to_dict(formulas=formulas or json)
    if fit is not None:
        document["fit"] = _fit(subject, fit, length, batch, how)
    if measure:
        document["measure"] = _measure(subject, found, length, batch, how)
    if json:
        show_json(document)
        return
    _show(found, model or "one attention layer", formulas, is_layer=model is None)
    for key, show in (("fit", _show_fit), ("measure", _show_measured)):
        if key in document:
            show(document[key])


def _subject(model: str | None, d_model: int | None, n_heads: int | None, others: dict[str, Any]) -> Any:
    """A preset's configuration, or one attention layer by its sizes."""
    from clearhead.costs import AttentionSizes, preset
    from clearhead.errors import ConfigError

    if model is not None:
        if d_model is not None or n_heads is not None or any(others.values()):
            raise ConfigError("got a model and the sizes of a layer; give one of them")
        return preset(model)
    if d_model is None or n_heads is None:
        raise ConfigError("give a model, such as base, or the sizes of one attention layer: --d-model 512 --n-heads 8")
    return AttentionSizes(d_model, n_heads, **others)


def _how(dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool) -> dict[str, Any]:
    """What `cost` wants beside the sizes."""
    import torch

    from clearhead import masks
    from clearhead.errors import DtypeError

    known = ("float32", "bfloat16", "float16", "float64")
    if dtype not in known:
        raise DtypeError(f"dtype is {dtype!r}; expected one of {', '.join(known)}")
    return {
        "dtype": getattr(torch, dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        "device": _device(device, measure=measure),
    }


def _device(device: str | None, *, measure: bool) -> str:
    """Predictions are for a GPU unless said otherwise; what is measured is measured here."""
    import torch

    from clearhead.errors import ConfigError

    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = (here if measure else "cuda") if device is None else device
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; expected cpu or cuda")
    if measure and device == "cuda" and here == "cpu":
        raise ConfigError(
            "--measure on cuda needs a GPU, and there is none here; leave --device out to measure the CPU"
        )
    return device


def _fit(subject: Any, budget: str, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.costs.fit import bytes_of, fit

    found = fit(subject, bytes_of(budget), tokens=tokens, batch=batch, **how)
    return {
        "budget": found.budget,
        "tokens": tokens,
        "largest_batch": found.batch,
        "batch": batch,
        "longest": found.tokens,
        "longest_is_models": found.at_end,
    }


def _measure(subject: Any, found: Cost, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from clearhead.costs.measure import beside, machine_here
    from clearhead.costs.trial import measure

    machine = machine_here(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **beside(found, machine, asdict(real)).to_dict()}


def _measure_everything(device: str | None, out: Path | None, json: bool) -> None:
    """Every model and size that the project answers for, a line each as it is measured."""
    import torch

    from clearhead.costs.measure import cases, document_of, machine_here
    from clearhead.costs.report import line, worst, write

    where = _device(device, measure=True)
    which = cases("full" if where == "cuda" else "small")
    if not json:
        console.print(f"{len(which)} cases; first what this machine can do …", markup=False)
    machine = machine_here(where, (getattr(torch, case.dtype) for case in which))

    def keep(document: dict[str, Any]) -> None:
        if not json:
            show_picture(line(document["rows"][-1]))
        if out is not None:
            write(document, out)

    document = document_of(which, machine, on_row=keep)
    if json:
        show_json(document)
        return
    off = worst(document)
    last = f"{machine.name}: memory is off by at most {100 * off['memory']:.1f} %, time by {100 * off['time']:.1f} %"
    console.print(last + ("" if out is None else f"; written to {out}"), markup=False, soft_wrap=True)


# ---------------------------------------------------------------------- for people


def _show(found: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    from clearhead.costs.result import Part, readable_bytes, readable_count

    sizes = ", ".join(f"{letter} = {value:,}" for letter, value in found.sizes.items())
    what = "training step" if found.training else "forward pass"
    dtype = str(found.dtype).removeprefix("torch.")
    console.print(f"{name}, {what}, {dtype}   {sizes}", markup=False, soft_wrap=True)
    columns = [
        "part",
        "parameters",
        "operations",
        "share",
        *(["backward"] if found.training else []),
        "moved",
    ]
    rows = found.products() if is_layer else found.parts
    whole = Part("total", found.parameters, found.forward, found.backward, found.traffic, found.forward)
    cells = [_cells(part, found, formulas) for part in (*rows, whole)]
    console.print(table([*columns, *(["formula"] if formulas else [])], cells))
    _show_attention(found)
    console.print()
    memory = [
        (name, readable_bytes(amount.value), *([str(amount.formula)] if formulas else []))
        for name, amount in found.memory.rows()
        if amount.value
    ]
    console.print(table(("memory", "", *(["formula"] if formulas else [])), memory))
    most = f"{found.bottleneck} ({readable_count(found.operations.value)} in all)"
    last = f"peak: {found.memory.peak_when}; most operations: {most}"
    console.print(last, markup=False, soft_wrap=True)
    if found.odd_products and found.dtype.itemsize == 2:
        where = ", ".join(found.odd_products)
        slow = f"{where}: a width is no multiple of 8, which a GPU multiplies several times more slowly in {dtype}"
        console.print(slow, markup=False, soft_wrap=True)


def _cells(part: Part, found: Cost, formulas: bool) -> list[str]:
    from clearhead.costs.result import readable_bytes

    def count(n: int) -> str:
        return f"{n:,}" if n else ""

    share = part.forward.value / max(1, found.forward.value)
    cells = [
        part.name,
        count(part.parameters.value),
        count(part.forward.value),
        f"{100 * share:.1f} %" if share else "",
    ]
    if found.training:
        cells.append(count(part.backward.value))
    cells.append(readable_bytes(part.traffic.value) if part.traffic.value else "")
    if formulas:
        cells.append(str((part.forward if part.forward.value else part.parameters).formula))
    return cells


def _show_attention(found: Cost) -> None:
    """Pairs of queries and keys: all there are, those allowed, and those computed."""
    pairs = found.pairs
    if pairs is None:
        return
    console.print()
    dense = pairs.dense.value
    console.print(
        f"{dense:,} attention weights a head, {dense * found.sizes['H']:,} in all heads of a layer",
        markup=False,
    )
    if pairs.mask is not None:
        how = "by the equation" if found.impl == "reference" else "by the fused kernel"
        console.print(
            f"{pairs.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {'by that plan' if pairs.gathers else how}",
            markup=False,
            soft_wrap=True,
        )


def _show_fit(found: dict[str, Any]) -> None:
    from clearhead.costs.result import readable_bytes

    console.print()
    size = "" if found["tokens"] is None else f" of {found['tokens']} tokens"
    console.print(
        f"in {readable_bytes(found['budget'])}: a batch of up to {found['largest_batch']:,}{size}",
        markup=False,
    )
    if found["longest"] is not None:
        end = ", the model's longest" if found["longest_is_models"] else ""
        console.print(f"   or, at a batch of {found['batch']:,}, up to {found['longest']:,} tokens{end}", markup=False)


def _show_measured(found: dict[str, Any]) -> None:
    from clearhead.costs.result import readable_bytes

    predicted, measured, ratio = found["predicted"], found["measured"], found["ratio"]
    rows = (
        (
            "peak memory",
            readable_bytes(predicted["peak_bytes"]),
            readable_bytes(measured["peak_bytes"]),
            f"{ratio['memory']:.3f}",
        ),
        (
            "time",
            f"{1e3 * predicted['seconds']:.2f} ms",
            f"{1e3 * measured['seconds']:.2f} ms",
            f"{ratio['time']:.3f}",
        ),
    )
    console.print()
    console.print(table((found["machine"]["name"], "predicted", "measured", "ratio"), rows))
