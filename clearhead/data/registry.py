"""The data sets this project knows: what they are, whose, how large, and how to tell the right file.

None is part of the package. `fetch(name, folder)` brings one where a network allows; a copy got in any other
way serves as well, and `recognise(path)` says whether a file is one of those known. A checksum that is not
known is None: such a file is then checked by its structure alone, and the listing says so."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clearhead.data import files
from clearhead.data.fetch import Progress, Remote, fetch_file
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.values import did_you_mean


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file that may lie on a user's disk: recognised by its checksum, wherever it came from."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set, as `clearhead data` lists it."""

    name: str
    task: str  # the task that reads it
    description: str
    licence: str
    origin: str  # where it comes from, and how to get it where there is no address
    remotes: tuple[Remote, ...] = ()
    copies: tuple[KnownFile, ...] = ()

    @property
    def size(self) -> int | None:
        """The bytes of what is fetched (or of the known copies, where nothing is); None where not known."""
        sizes = [item.size for item in self.remotes or self.copies]
        known = [size for size in sizes if size is not None]
        return sum(known) if sizes and len(known) == len(sizes) else None

    @property
    def verified(self) -> str:
        """How a fetched file is checked, in words."""
        if not self.remotes:
            return "nothing to fetch"
        if all(remote.sha256 for remote in self.remotes):
            return "sha256"
        return "structure only: no checksum is known"


def _known() -> Iterator[DataSet]:
    """The table in known.toml. A remote file is called by the last part of its address, unless told otherwise."""
    table = tomllib.loads((Path(__file__).parent / "known.toml").read_text(encoding="utf-8"))
    for name, row in table.items():
        remotes = tuple(Remote(**{"name": Path(file["url"]).name} | file) for file in row.pop("remotes", ()))
        copies = tuple(KnownFile(**file) for file in row.pop("copies", ()))
        yield DataSet(name=name, **row, remotes=remotes, copies=copies)


KNOWN: tuple[DataSet, ...] = tuple(_known())


def find(name: str, known: Iterable[DataSet] = KNOWN) -> DataSet:
    """The data set of a name."""
    known = tuple(known)
    for item in known:
        if item.name == name:
            return item
    raise ConfigError(f"no data set is called {name!r}; {did_you_mean(name, [item.name for item in known])}")


def fetch(
    name: str | DataSet, folder: Path | str, *, progress: Progress | None = None, tries: int = 5, pause: float = 1.0
) -> list[Path]:
    """Bring the files of a data set into a folder: resumed where it broke off, checked, whole or absent."""
    item = find(name) if isinstance(name, str) else name
    if not item.remotes:
        raise DataError(f"{item.name} has nothing to fetch: it comes from elsewhere ({item.origin})")
    paths = []
    for remote in item.remotes:
        path = fetch_file(remote, folder, progress=progress, tries=tries, pause=pause)
        if remote.sha256 is None:
            _check_structure(item, path)
        paths.append(path)
    return paths


def _check_structure(item: DataSet, path: Path) -> None:
    """Read a file without a known checksum the way its task will; one that cannot be read is put aside."""
    try:
        if item.task == "translation":
            from clearhead.data.translation import read_pairs

            read_pairs(path)
        elif item.task == "text":
            from clearhead.data.text import read_text

            read_text(path)
        elif path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
    except (DataError, StorageError) as error:
        aside = path.with_name(f"{path.name}.bad")
        path.replace(aside)
        raise StorageError(f"what arrived for {item.name} is not such data ({error}); it is kept as {aside}") from error


def recognise(path: Path | str, known: Iterable[DataSet] = KNOWN) -> tuple[DataSet, str] | None:
    """The data set a local file belongs to and its usual name, by its checksum; None where it is unknown."""
    path = Path(path)
    digest = files.sha256(path)
    for item in known:
        names = {file.sha256: file.name for file in item.remotes}
        names |= {file.sha256: file.name for file in item.copies}
        if digest in names:
            return item, names[digest]
    return None
