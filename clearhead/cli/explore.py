"""`clearhead explore`: the live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead import pretrained
from clearhead.cli.app import app
from clearhead.cli.options import A_MODEL, Device, Dtype, argument, option, placed
from clearhead.cli.output import console


@app.command()
def explore(
    models: Annotated[list[str] | None, argument(f"{A_MODEL} Without any: all in the box.")] = None,
    port: Annotated[int, option("Where it listens; 0 takes any free port.", min=0, max=65535)] = 8642,
    host: Annotated[str, option("The address it listens on: this machine only, unless told.")] = "127.0.0.1",
    open_: Annotated[bool, option("Open the browser.", "--open/--no-open")] = True,
    secret_file: Annotated[Path | None, option("Keep the address's secret here, so that bookmarks stay good.")] = None,
    runs: Annotated[int, option("How many requests are computed at the same time.", min=1, max=64)] = 2,
    seconds: Annotated[float, option("The longest that one may take.", min=1)] = 60.0,
    memory: Annotated[str, option("What one may take beyond the models.")] = "4GiB",
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """A live page: run and change a model, masks, attention by hand, costs, claims and sheets.

    It listens on this machine only and needs no network. Ctrl-C ends it."""
    import os
    import webbrowser

    from clearhead.costs.fit import bytes_of
    from clearhead.errors import ConfigError, MissingDependencyError
    from clearhead.interop import is_foreign
    from clearhead.pretrained.box import find

    try:
        from clearhead.explore.desk import Desk, Limits
        from clearhead.explore.server import Place, secret_of, serve
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"the live page needs {error.name}: pip install 'clearhead[explore]'") from error

    if host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"--host is {host!r}, which is every address; give the one by which others reach this machine"
        )
    names = list(dict.fromkeys(models or pretrained.names()))
    for name in names:
        if not is_foreign(name):
            find(name)  # says in one sentence what is wrong with it
    where = placed(device, dtype)
    limits = Limits(runs=runs, seconds=seconds, memory=bytes_of(memory))
    threads = max(1, (os.cpu_count() or 1) // runs)
    desk = Desk(names, limits, threads=threads, placed={"device": where["device"], "dtype": dtype})
    place = Place(host, port, **({} if secret_file is None else {"secret": secret_of(secret_file)}))

    def ready(place: Place) -> None:
        console.print(f"{len(names)} models, {runs} at a time. Ctrl-C ends it.", markup=False)
        typer.echo(place.address)
        if open_:
            webbrowser.open(place.address)

    serve(place, desk, on_ready=ready)
