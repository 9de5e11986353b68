"""`clearhead cost`: what any module costs, by watching it run on nothing, and, if asked, measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from clearhead.cli.app import app
from clearhead.cli.options import A_MODEL, Dtype, Json, argument, device_here, dtype_of, option
from clearhead.cli.output import answer, console, show_json, show_picture
from clearhead.errors import ConfigError

if TYPE_CHECKING:
    from clearhead.costs import Cost, Machine

# Of --bias, --batch, --dtype, --train, --impl, --formulas, and those that have none.
_DEFAULTS = (False, 1, "float32", False, "auto", False) + (None,) * 8


@app.command()
def cost(
    model: Annotated[
        str | None, argument(f"A preset (gpt2). {A_MODEL} Or a TOML file, or package.module:factory.")
    ] = None,
    d_model: Annotated[int | None, option("Instead of a model: one attention layer of this width.")] = None,
    n_heads: Annotated[int | None, option("Its heads.")] = None,
    n_kv_heads: Annotated[int | None, option("Its key/value heads, if fewer.")] = None,
    d_head: Annotated[int | None, option("Its heads' width, if not d_model / n_heads.")] = None,
    bias: Annotated[bool, option("Whether its projections have biases.", "--bias/--no-bias")] = False,
    tokens: Annotated[int | None, option("Length of the sequence (of the target).", "--tokens", "-n")] = None,
    source: Annotated[int | None, option("Length of the source, if not the same.")] = None,
    batch: Annotated[int, option("Sequences at a time (on each GPU).", "--batch", "-b")] = 1,
    dtype: Dtype = "float32",
    train: Annotated[bool, option("A training step with AdamW instead of a forward pass.", "--train")] = False,
    recompute: Annotated[
        str | None, option("blocks: keep each block's input alone, and run it again on the way back.")
    ] = None,
    mask: Annotated[str | None, option("A mask, such as 'causal() & window(256, 0)'.")] = None,
    impl: Annotated[str, option("How attention is computed: auto, fused, gathered or reference.")] = "auto",
    device: Annotated[
        str | None, option("cuda, cpu, or a machine whose time is wanted: h200, or a --machine-out file.")
    ] = None,
    gpus: Annotated[int | None, option("How many GPUs share a training step.")] = None,
    parallel: Annotated[str | None, option("How they share it: ddp or fsdp.")] = None,
    link: Annotated[str | None, option("What each can send, such as 450GB/s; for the time.")] = None,
    measure: Annotated[
        bool,
        option("Run it here too, and show the ratio; without a model: all that the project answers for.", "--measure"),
    ] = False,
    out: Annotated[Path | None, option("Without a model: the results file; written after every row.")] = None,
    machine_out: Annotated[Path | None, option("Measure this machine and store its description.")] = None,
    fit: Annotated[str | None, option("Largest batch and length that fit, in 24GiB say.")] = None,
    formulas: Annotated[bool, option("Show the formulas beside the numbers.", "--formulas")] = False,
    json: Json = False,
) -> None:
    """Parameters, operations, bytes, memory and kernels of any module, before anything is computed.

    Operations are those of the matrix products, two for each multiplication with its addition.
    """
    from clearhead.cli import cost_text as text
    from clearhead.costs import cost as predict

    alone = model is None and d_model is None and n_heads is None and tokens is None
    if machine_out is not None:
        if not alone or measure:
            raise ConfigError("--machine-out measures this machine and nothing else; leave the model and --measure out")
        return _measure_machine(device, machine_out, json)
    if out is not None and not (measure and alone):
        raise ConfigError("--out is for --measure without a model and sizes, which measures every model")
    if measure and alone:
        others = (n_kv_heads, d_head, source, mask, fit, recompute, gpus, parallel)
        if (bias, batch, dtype, train, impl, formulas, *others) != _DEFAULTS:
            raise ConfigError(
                "--measure without a model has its own sizes, dtypes, modes; give a model, or only --device and --out"
            )
        return _measure_everything(device, out, json)
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
        return show_json(document)
    text.show(found, model or "one attention layer", formulas, is_layer=model is None)
    shows = {"time": text.show_time, "share": text.show_share, "fit": text.show_fit, "measure": text.show_measured}
    for key, show in shows.items():
        if key in document:
            show(document[key])


def _subject(model: str | None, d_model: int | None, n_heads: int | None, others: dict[str, Any]) -> Any:
    """A model's name, or one attention layer by its sizes."""
    from clearhead.costs import AttentionSizes

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
    from torch import nn

    from clearhead.cli.named import imported
    from clearhead.costs.subjects import built, model_of

    factory = imported(name)
    made: Any = factory if isinstance(factory, nn.Module) or not callable(factory) else built(factory)
    made, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return replace(model_of(made, inputs), label=name)


def _how(
    dtype: str, train: bool, mask: str | None, impl: str, device: str | None, measure: bool
) -> tuple[dict[str, Any], Machine | None]:
    """What `cost` wants beside the sizes, and the machine whose time is wanted."""
    from clearhead import masks
    from clearhead.costs import Machine

    machine = None if device in (None, "cpu", "cuda") or measure else Machine.read(device or "")
    how = {
        "dtype": dtype_of(dtype),
        "training": train,
        "mask": None if mask is None else masks.parse(mask),
        "impl": impl,
        # Predictions are for a GPU unless said otherwise; what is measured is measured here.
        "device": machine.device if machine else device_here(device) if measure else device or "cuda",
    }
    return how, machine


def _time(found: Cost, machine: Machine) -> dict[str, Any]:
    took, parts = found.time(machine), found.ceilings(machine).items()
    told = {"machine": machine.name, "seconds": took.seconds, "limit": took.limit, "waiting": took.waiting}
    return told | {"parts": [{"part": name, "seconds": s, "ceiling": ceiling} for name, (s, ceiling) in parts]}


def _share(
    found: Cost, gpus: int | None, parallel: str | None, link: str | None, machine: Machine | None
) -> dict[str, Any]:
    from clearhead.costs.parallel import link_of, share

    if gpus is None or parallel is None:
        raise ConfigError("--gpus and --parallel go together, such as --gpus 64 --parallel fsdp")
    if link is not None and machine is None:
        raise ConfigError("--link gives a time, which needs a machine: add --device h200, or a file of --machine-out")
    return asdict(share(found, gpus, parallel, machine=machine, link=None if link is None else link_of(link)))


def _fit(subject: Any, budget: str, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.costs.fit import bytes_of, fit

    found = fit(subject, bytes_of(budget), tokens=tokens, batch=batch, **how)
    batches = {"budget": found.budget, "tokens": tokens, "largest_batch": found.batch, "batch": batch}
    return batches | {"longest": found.tokens, "longest_is_models": found.at_end}


def _measure(subject: Any, found: Cost, tokens: Any, batch: int, how: dict[str, Any]) -> dict[str, Any]:
    from clearhead.bench.machine import machine_here
    from clearhead.bench.trial import beside, measure

    machine = machine_here(how["device"], (how["dtype"],))
    real = measure(subject, tokens=tokens, batch=batch, **how)
    return {"machine": machine.to_dict(), **beside(found, machine, asdict(real)).to_dict()}


def _measure_machine(device: str | None, path: Path, json: bool) -> None:
    import torch

    from clearhead.bench.machine import machine_here

    where = device_here(device)
    machine = machine_here(where, (torch.float32, torch.bfloat16) if where == "cuda" else (torch.float32,))
    machine.write(path)
    answer(json, machine.to_dict(), f"{machine.name}: written to {path}; predict for it with --device {path}")


def _measure_everything(device: str | None, out: Path | None, json: bool) -> None:
    """Every model and size that the project answers for, a line each as it is measured."""
    import torch

    from clearhead.bench.cost import FOREIGN, cases, document_of, line, missing, worst, write
    from clearhead.bench.machine import machine_here

    where = device_here(device)
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
    off = worst(document)
    last = f"{machine.name}: memory is off by at most {100 * off['memory']:.1f} %, time by {100 * off['time']:.1f} %"
    answer(json, document, last + ("" if out is None else f"; written to {out}"))
