"""`clearhead cost`: what any module costs, by watching it run on nothing, and, if asked, measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import app
from clearhead.cli.output import A_MODEL, Json, console, show_json, show_picture, table

if TYPE_CHECKING:
    from clearhead.costs import Cost, Machine
    from clearhead.costs.result import Part

# Of --bias, --batch, --dtype, --train, --impl, --formulas, and those that have none.
_DEFAULTS = (False, 1, "float32", False, "auto", False) + (None,) * 8


@app.command()
def cost(
    model: Annotated[
        str | None,
        typer.Argument(help=f"A preset (gpt2). {A_MODEL} Or a TOML file, or package.module:factory."),
    ] = None,
    d_model: Annotated[int | None, typer.Option(help="Instead of a model: one attention layer of this width.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Its heads.")] = None,
    n_kv_heads: Annotated[int | None, typer.Option(help="Its key/value heads, if fewer.")] = None,
    d_head: Annotated[int | None, typer.Option(help="Its heads' width, if not d_model / n_heads.")] = None,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Whether its projections have biases.")] = False,
    tokens: Annotated[
        int | None, typer.Option("--tokens", "-n", help="Length of the sequence (of the target).")
    ] = None,
    source: Annotated[int | None, typer.Option(help="Length of the source, if not the same.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time (on each GPU).")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    train: Annotated[
        bool, typer.Option("--train", help="A training step with AdamW instead of a forward pass.")
    ] = False,
    recompute: Annotated[
        str | None, typer.Option(help="blocks: keep each block's input alone, and run it again on the way back.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help="A mask, such as 'causal() & window(256, 0)'.")] = None,
    impl: Annotated[str, typer.Option(help="How attention is computed: auto, fused, gathered or reference.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cuda, cpu, or a machine whose time is wanted: h200, or a --machine-out file.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs share a training step.")] = None,
    parallel: Annotated[str | None, typer.Option(help="How they share it: ddp or fsdp.")] = None,
    link: Annotated[str | None, typer.Option(help="What each can send, such as 450GB/s; for the time.")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run it here too, and show the ratio; without a model: all that the project answers for."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Without a model: the results file; written after every row.")
    ] = None,
    machine_out: Annotated[Path | None, typer.Option(help="Measure this machine and store its description.")] = None,
    fit: Annotated[str | None, typer.Option(help="Largest batch and length that fit, in 24GiB say.")] = None,
    formulas: Annotated[bool, typer.Option("--formulas", help="Show the formulas beside the numbers.")] = False,
    json: Json = False,
) -> None:
    """Parameters, operations, bytes, memory and kernels of any module, before anything is computed.

    Operations are those of the matrix products, two for each multiplication with its addition.
    """
    from clearhead.costs import cost as predict
    from clearhead.errors import ConfigError

    alone = model is None and d_model is None and n_heads is None and tokens is None
    if machine_out is not None:
        if not alone or measure:
            raise ConfigError("--machine-out measures this machine and nothing else; leave the model and --measure out")
        _measure_machine(device, machine_out, json)
        return
    everything = measure and alone
    if out is not None and not everything:
        raise ConfigError("--out is for --measure without a model and sizes, which measures every model")
    if everything:
        others = (n_kv_heads, d_head, source, mask, fit, recompute, gpus, parallel)
        if (bias, batch, dtype, train, impl, formulas, *others) != _DEFAULTS:
            raise ConfigError(
                "--measure without a model has its own sizes, dtypes, modes; give a model, or only --device and --out"
            )
        _measure_everything(device, out, json)
        return
    if source is not None and tokens is None:
        raise ConfigError("--source is the length of what is read; give --tokens, that of what is written, too")
    subject = _subject(model, d_model, n_heads, {"n_kv_heads": n_kv_heads, "d_head": d_head, "bias": bias})
    how, machine = _how(dtype, train, mask, impl, device, measure)
    length: Any = tokens if source is None or tokens is None else (source, tokens)
    found = predict(subject, tokens=length, batch=batch, recompute=recompute, **how)
    document = found.to_dict(formulas=formulas or json)
    if machine is not None:
        document["time"] = _time(found, machine)
    if gpus is not None or parallel is not None:
        document["share"] = _share(found, gpus, parallel, link, machine)
    if fit is not None:
        document["fit"] = _fit(subject, fit, length, batch, how | {"recompute": recompute})
    if measure:
        document["measure"] = _measure(subject, found, length, batch, how)
    if json:
        show_json(document)
        return
    _show(found, model or "one attention layer", formulas, is_layer=model is None)
    shows = {"time": _show_time, "share": _show_share, "fit": _show_fit, "measure": _show_measured}
    for key, show in shows.items():
        if key in document:
            show(document[key])


def _subject(model: str | None, d_model: int | None, n_heads: int | None, others: dict[str, Any]) -> Any:
    """A model's name, or one attention layer by its sizes."""
    from clearhead.costs import AttentionSizes
    from clearhead.errors import ConfigError

    if model is not None:
        if d_model is not None or n_heads is not None or any(others.values()):
            raise ConfigError("got a model and the sizes of a layer; give one of them")
        return _named(model)
    if d_model is None or n_heads is None:
        raise ConfigError("give a model, such as base, or the sizes of one attention layer: --d-model 512 --n-heads 8")
    return AttentionSizes(d_model, n_heads, **others)


def _named(name: str) -> Any:
    """What a name stands for: a preset, a folder of a model or a run, a TOML file, package.module:factory."""
    import tomllib

    from clearhead import interop, pretrained
    from clearhead.costs import preset
    from clearhead.errors import ConfigError
    from clearhead.models import Config

    path = Path(name) if name not in pretrained.names() else pretrained.BOX / name
    if interop.is_foreign(name):
        return interop.config_of(name)
    if ":" in name and not path.exists():
        return _made(name)
    if path.is_dir():
        files = [path / place for place in ("config.toml", "model/config.toml", "train.toml")]
        path = next((file for file in files if file.exists()), path)
        if path.is_dir():
            raise ConfigError(
                f"{name} has no config.toml and no train.toml; expected the folder of a model or of a run"
            )
    if not path.is_file():
        return preset(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return Config.from_dict(data["model"] if "type" not in data and "model" in data else data)


def _made(name: str) -> Any:
    """What the factory package.module:factory gives: a module or configuration, or a pair of it and its inputs."""
    import importlib
    import sys

    from torch import nn

    from clearhead.costs.subjects import built, model_of
    from clearhead.errors import ConfigError

    sys.path[:0] = [] if "" in sys.path else [""]  # a file in the folder where the command was given
    where, _, what = name.partition(":")
    try:
        factory = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be imported: {error}; expected package.module:factory") from error
    is_made = isinstance(factory, nn.Module) or not callable(factory)
    made: Any = factory if is_made else built(factory)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return replace(model_of(made, inputs), label=name)


def _how(
    dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool
) -> tuple[dict[str, Any], Machine | None]:
    """What `cost` wants beside the sizes, and the machine whose time is wanted."""
    import torch

    from clearhead import masks
    from clearhead.costs import Machine
    from clearhead.errors import DtypeError

    known = ("float32", "bfloat16", "float16", "float64")
    if dtype not in known:
        raise DtypeError(f"dtype is {dtype!r}; expected one of {', '.join(known)}")
    machine = None if device in (None, "cpu", "cuda") or measure else Machine.read(device or "")
    how = {
        "dtype": getattr(torch, dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        "device": _device(device, measure=measure) if machine is None else machine.device,
    }
    return how, machine


def _device(device: str | None, *, measure: bool) -> str:
    """Predictions are for a GPU unless said otherwise; what is measured is measured here."""
    import torch

    from clearhead.errors import ConfigError

    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = (here if measure else "cuda") if device is None else device
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; expected cpu or cuda, where something is measured")
    if measure and device == "cuda" and here == "cpu":
        raise ConfigError(
            "--measure on cuda needs a GPU, and there is none here; leave --device out to measure the CPU"
        )
    return device


def _time(found: Cost, machine: Machine) -> dict[str, Any]:
    took = found.time(machine)
    parts = [
        {"part": name, "seconds": seconds, "ceiling": ceiling}
        for name, (seconds, ceiling) in found.ceilings(machine).items()
    ]
    return {
        "machine": machine.name,
        "seconds": took.seconds,
        "limit": took.limit,
        "waiting": took.waiting,
        "parts": parts,
    }


def _share(
    found: Cost, gpus: int | None, parallel: str | None, link: str | None, machine: Machine | None
) -> dict[str, Any]:
    from clearhead.costs.parallel import link_of, share
    from clearhead.errors import ConfigError

    if gpus is None or parallel is None:
        raise ConfigError("--gpus and --parallel go together, such as --gpus 64 --parallel fsdp")
    if link is not None and machine is None:
        raise ConfigError("--link gives a time, which needs a machine: add --device h200, or a file of --machine-out")
    return asdict(share(found, gpus, parallel, machine=machine, link=None if link is None else link_of(link)))


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
    from clearhead.bench.machine import machine_here
    from clearhead.bench.trial import beside, measure

    machine = machine_here(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **beside(found, machine, asdict(real)).to_dict()}


def _measure_machine(device: str | None, path: Path, json: bool) -> None:
    import torch

    from clearhead.bench.machine import machine_here

    where = _device(device, measure=True)
    machine = machine_here(where, (torch.float32, torch.bfloat16) if where == "cuda" else (torch.float32,))
    machine.write(path)
    if json:
        show_json(machine.to_dict())
    else:
        console.print(f"{machine.name}: written to {path}; predict for it with --device {path}", markup=False)


def _measure_everything(device: str | None, out: Path | None, json: bool) -> None:
    """Every model and size that the project answers for, a line each as it is measured."""
    import torch

    from clearhead.bench.cost import FOREIGN, cases, document_of, line, missing, worst, write
    from clearhead.bench.machine import machine_here

    where = _device(device, measure=True)
    which = cases("full" if where == "cuda" else "small")
    if not json:
        console.print(f"{len(which)} cases; first what this machine can do …", markup=False)
        for name in filter(missing, FOREIGN):
            console.print(f"not measured: {name}, whose library is not installed here", markup=False)
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


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _show(found: Cost, name: str, formulas: bool, *, is_layer: bool) -> None:
    from clearhead.costs.result import readable_bytes, readable_count

    sizes = ", ".join(f"{letter} = {value:,}" for letter, value in found.sizes.items())
    what = "training step" if found.training else "forward pass"
    dtype = str(found.dtype).removeprefix("torch.")
    _say(f"{name}, {what}, {dtype}   {sizes}")
    columns = ["part", "parameters", "operations", "share", *(["backward", "kept"] if found.training else []), "moved"]
    rows = _products(found) if is_layer else found.parts
    cells = [_cells(part, found, formulas) for part in (*rows, found.total)]
    console.print(table([*columns, *(["formula"] if formulas else [])], cells))
    _show_attention(found)
    console.print()
    memory = [
        (name, readable_bytes(amount.value), *([str(amount.formula)] if formulas else []))
        for name, amount in found.memory.rows()
        if amount.value
    ]
    console.print(table(("memory", "", *(["formula"] if formulas else [])), memory))
    made_of = ", ".join(f"{kind} {readable_bytes(n.value)}" for kind, n in found.memory.peak_made_of.items() if n.value)
    _say(f"peak: {found.memory.peak_when} ({made_of})")
    whole = readable_count(found.operations.value)
    _say(f"most operations: {found.bottleneck} ({whole} in all); {found.n_launches:,} kernels")
    if found.recomputed:
        _say(f"computed again on the way back: {readable_count(found.recomputed.value)} operations")
    for operator, times in found.unknown.items():
        _say(f"not known: the operations of {operator}, which ran {times:,} times; its bytes are counted")
    if found.odd_products and found.dtype.itemsize == 2:
        where = ", ".join(found.odd_products)
        _say(f"{where}: a width is no multiple of 8, which a GPU multiplies several times more slowly in {dtype}")
    if formulas and found.why_no_formulas:
        _say(f"numbers stand where there is no formula: {found.why_no_formulas}")


def _products(found: Cost) -> list[Part]:
    """The parts of one attention layer, with its two products apart, as the equation has them."""
    from clearhead.costs.formulas import Amount

    here, none, rows = {look.path for look in found.log.looks}, Amount(0), []
    for part in found.parts:
        if part.name in here and part.forward:
            half = replace(part, name="scores", forward=part.forward.part(2), backward=none)
            rows += [half, replace(half, name="weighted sum", traffic=none, kept=none)]
        else:
            rows.append(part)
    return rows


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
        cells += [count(part.backward.value), readable_bytes(part.kept.value) if part.kept.value else ""]
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
    _say(f"{dense:,} attention weights a head, {dense * pairs.look.heads:,} in all heads of a layer")
    if pairs.mask is not None:
        how = "by the equation" if found.impl == "reference" else "by the fused kernel"
        _say(
            f"{pairs.mask}: {pairs.allowed.value:,} pairs allowed ({100 * pairs.allowed.value / dense:.1f} %), "
            f"{pairs.planned:,} by its plan ({100 * pairs.planned / dense:.1f} %), "
            f"{pairs.computed.value:,} computed, {'by that plan' if pairs.gathers else how}"
        )


def _show_time(found: dict[str, Any]) -> None:
    console.print()
    whole = found["seconds"]
    rows = [
        (part["part"], f"{1e3 * part['seconds']:.3f} ms", f"{100 * part['seconds'] / whole:.1f} %", part["ceiling"])
        for part in found["parts"]
    ]
    rows.append(("total", f"{1e3 * whole:.3f} ms", "", found["limit"]))
    console.print(table((found["machine"], "predicted", "share", "bound by"), rows))
    if found["waiting"]:
        _say(f"{1e3 * found['waiting']:.3f} ms of it the device waits for its host")


def _show_share(found: dict[str, Any]) -> None:
    from clearhead.costs.result import readable_bytes

    console.print()
    kinds = ("weights", "gradients", "optimiser", "gathered", "peak", "sent")
    rows = [(kind, readable_bytes(found[kind])) for kind in kinds]
    console.print(table((f"each of {found['gpus']} GPUs, {found['parallel']}", "in one step"), rows))
    if found["seconds"] is not None:
        hidden = found["computing"] + found["sending"] - found["seconds"]
        _say(
            f"step: {1e3 * found['seconds']:.2f} ms ({1e3 * found['computing']:.2f} ms computing, "
            f"{1e3 * found['sending']:.2f} ms sending, of which {1e3 * hidden:.2f} ms hide behind computing)"
        )


def _show_fit(found: dict[str, Any]) -> None:
    from clearhead.costs.result import readable_bytes

    console.print()
    size = "" if found["tokens"] is None else f" of {found['tokens']} tokens"
    _say(f"in {readable_bytes(found['budget'])}: a batch of up to {found['largest_batch']:,}{size}")
    if found["longest"] is not None:
        end = ", the model's longest" if found["longest_is_models"] else ""
        _say(f"   or, at a batch of {found['batch']:,}, up to {found['longest']:,} tokens{end}")


def _show_measured(found: dict[str, Any]) -> None:
    from clearhead.costs.result import readable_bytes

    sides = (found["predicted"], found["measured"])
    peaks = [readable_bytes(side["peak_bytes"]) for side in sides]
    times = [f"{1e3 * side['seconds']:.2f} ms" for side in sides]
    ratio = found["ratio"]
    rows = [("peak memory", *peaks, f"{ratio['memory']:.3f}"), ("time", *times, f"{ratio['time']:.3f}")]
    console.print()
    console.print(table((found["machine"]["name"], "predicted", "measured", "ratio"), rows))
