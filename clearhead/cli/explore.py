"""`clearhead explore`: the interactive web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead import hub
from clearhead.cli.app import app
from clearhead.cli.options import MODEL_HELP, Device, Dtype, ModelCommand, argument, load_kwargs, option
from clearhead.cli.output import console


@app.command(cls=ModelCommand)
def explore(
    models: Annotated[list[str] | None, argument(f"{MODEL_HELP} Default: all bundled models.")] = None,
    port: Annotated[int, option("Port; 0 for any free port.", min=0, max=65535)] = 8642,
    host: Annotated[
        str, option("Address to listen on. The default is reachable from this machine only.")
    ] = "127.0.0.1",
    open_: Annotated[bool, option("Open the browser.", "--open/--no-open")] = True,
    token_file: Annotated[
        Path | None, option("Store the secret token of the address in this file, so that bookmarks remain valid.")
    ] = None,
    workers: Annotated[int, option("Number of worker processes.", min=1, max=64)] = 2,
    timeout: Annotated[float, option("Time limit per request, in seconds.", min=1, max=86400)] = 60.0,
    memory: Annotated[str, option("Memory limit per request, in addition to the models.")] = "4GiB",
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Start the explorer, an interactive web page: run models, intervene in them, draw masks, predict costs.

    By default it is reachable from this machine only. It needs no network. Press Ctrl-C to stop it."""
    import webbrowser

    import torch

    from clearhead.analysis.cost.fit import parse_bytes
    from clearhead.errors import ConfigError, MissingDependencyError
    from clearhead.hub.bundled import model_folder
    from clearhead.hub.checkpoint import is_third_party

    try:
        from clearhead.explorer.server import ServerAddress, read_or_create_token, serve
        from clearhead.explorer.worker_pool import ServerLimits, WorkerPool
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the explorer needs {error.name}; install it with: pip install 'clearhead[explore]'"
        ) from error

    if host in ("0.0.0.0", "::", ""):
        raise ConfigError(f"--host is {host!r}, which means all addresses; expected one address of this machine")
    names = list(dict.fromkeys(models or hub.names()))
    for name in names:
        if not is_third_party(name):
            model_folder(name)  # raises if the model does not exist
    device_kwargs = {"device": load_kwargs(device, dtype)["device"], "dtype": dtype}
    limits = ServerLimits(workers=workers, timeout=timeout, memory=parse_bytes(memory))
    threads = max(1, torch.get_num_threads() // workers)  # OMP_NUM_THREADS, if it is set
    pool = WorkerPool(names, limits, threads=threads, device_kwargs=device_kwargs)
    address = ServerAddress(host, port)
    if token_file is not None:
        address = ServerAddress(host, port, read_or_create_token(token_file))

    def on_ready(address: ServerAddress) -> None:
        counts = f"{len(names)} model{'s'[: len(names) > 1]}, {workers} worker{'s'[: workers > 1]}"
        console.print(f"{counts}. Press Ctrl-C to stop.", markup=False)
        typer.echo(address.url)
        if open_:
            webbrowser.open(address.url)

    serve(address, pool, on_ready=on_ready)
