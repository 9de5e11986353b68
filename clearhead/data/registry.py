"""The data sets this project knows: what they are, whose, how large, and how to tell the right file.

None is part of the package. `fetch(name, folder)` brings one where a network allows; a copy got in any other
way serves as well, and `recognise(path)` says whether a file is one of those known. A checksum that is not
known is None: such a file is then checked by its structure alone, and the listing says so.
"""

from __future__ import annotations

from collections.abc import Iterable
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


_SVHN = "http://ufldl.stanford.edu/housenumbers"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"


def _idx(address: str, *entries: tuple[str, int, str]) -> tuple[Remote, ...]:
    return tuple(
        Remote(url=f"{address}/{name}-ubyte.gz", name=f"{name}-ubyte.gz", size=size, sha256=sha256)
        for name, size, sha256 in entries
    )


KNOWN: tuple[DataSet, ...] = (
    DataSet(
        name="en-es",
        task="translation",
        description="English and Spanish everyday sentences, tab-separated pairs: 124,547 rows in 2020",
        licence="CC-BY 2.0 FR (Tatoeba)",
        origin=(
            "Tatoeba through manythings.org; the address gives the newest edition, which grows. "
            "The edition of 2020-08-23 is data/spa.txt in the PyPI source package nmt 0.0.6"
        ),
        remotes=(Remote(url="https://www.manythings.org/anki/spa-eng.zip", name="spa-eng.zip"),),
        copies=(
            KnownFile(
                name="spa.txt",
                size=18_607_094,
                sha256="5728ca47ff4f5bb12af70a6513e6b78800ad01c7f21671a857a4e58beeec3251",
            ),
            KnownFile(
                name="spa-eng.zip",
                size=4_812_467,
                sha256="16b1aca3380e679055a1d0cb05c6234db4cfab447cf40425040daa66677faf48",
            ),
            KnownFile(
                name="nmt-0.0.6.tar.gz",
                size=15_744_217,
                sha256="65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
            ),
            KnownFile(
                name="train.tsv.xz",
                size=1_859_116,
                sha256="82ef431e56369c6a3278e81af01c0bfd63f9fbd74967649c96e0851897bb9be9",
            ),
            KnownFile(
                name="train.tsv",
                size=7_665_298,
                sha256="22a87b2ab4ac596e73defcbb3e6fd045608d9fe660cc1899794a2d3003160ed5",
            ),
            KnownFile(
                name="dev.tsv",
                size=137_340,
                sha256="3d7f4f13ae01a7a2bb373aa5e038df1b764ea868b16a731cc1b649c8cbac0445",
            ),
        ),
    ),
    DataSet(
        name="svhn",
        task="digits",
        description="house numbers cropped to one digit, 32×32 colour: 73,257 to train, 26,032 to test",
        licence="non-commercial use only (Netzer et al. 2011)",
        origin="the authors' page at Stanford",
        remotes=(
            Remote(
                url=f"{_SVHN}/train_32x32.mat",
                name="train_32x32.mat",
                size=182_040_794,
                sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            Remote(
                url=f"{_SVHN}/test_32x32.mat",
                name="test_32x32.mat",
                size=64_275_384,
                sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
    DataSet(
        name="svhn-grey",
        task="digits",
        description="house numbers cropped to one digit, 32×32 grey: 29,227 to train, 2,890 to validate",
        licence="non-commercial use only (Netzer et al. 2011)",
        origin="made for this project from the full-number pictures; use svhn where you have no copy",
        copies=(
            KnownFile(
                name="svhn_gray.npz.xz",
                size=22_391_768,
                sha256="fea799deab55fff733bd6d7e494dd8d8d39d4ddaf19948abda80489a5ef8547f",
            ),
        ),
    ),
    DataSet(
        name="shakespeare",
        task="text",
        description="40,000 lines from the plays: 1,115,394 characters, 65 different ones",
        licence="public domain",
        origin="the char-rnn repository",
        remotes=(
            Remote(
                url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                name="input.txt",
                size=1_115_394,
                sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
    DataSet(
        name="fashion-mnist",
        task="digits",
        description="clothes in ten classes, 28×28 grey: 60,000 to train, 10,000 to test",
        licence="MIT (Zalando)",
        origin="the authors' bucket; also Debian's package dataset-fashion-mnist",
        remotes=_idx(
            _FASHION,
            (
                "train-images-idx3",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            ("train-labels-idx1", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (
                "t10k-images-idx3",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            ("t10k-labels-idx1", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    DataSet(
        name="mnist",
        task="digits",
        description="handwritten digits, 28×28 grey: 60,000 to train, 10,000 to test",
        licence="CC-BY-SA 3.0 (LeCun, Cortes, Burges)",
        origin="a mirror of the authors' page",
        remotes=_idx(
            _MNIST,
            (
                "train-images-idx3",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            ("train-labels-idx1", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (
                "t10k-images-idx3",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            ("t10k-labels-idx1", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    DataSet(
        name="spoken-digits",
        task="speech",
        description="spoken English digits, 8 kHz: six speakers, each digit 50 times; numbers 0 to 4 are for testing",
        licence="CC BY-SA 4.0 (Free Spoken Digit Dataset)",
        origin="Jakobovski/free-spoken-digit-dataset on GitHub; also on Zenodo",
        remotes=(
            Remote(
                url="https://codeload.github.com/Jakobovski/free-spoken-digit-dataset/tar.gz/refs/heads/master",
                name="free-spoken-digit-dataset.tar.gz",
            ),
        ),
        copies=(
            KnownFile(
                name="recordings-5-to-49.tar.xz",
                size=12_189_264,
                sha256="7bd861ab9b480f18afcfb944c96130a74208aa43a05de7e602de79e345d05e8a",
            ),
        ),
    ),
    DataSet(
        name="sklearn-digits",
        task="digits",
        description="handwritten digits, 8×8 grey: 1,797, the last fifth to validate",
        licence="CC-BY 4.0 (UCI, Alpaydin and Kaynak)",
        origin="inside scikit-learn",
    ),
    DataSet(
        name="sort-dedup",
        task="sort-dedup",
        description="letters to be sorted without repeats, made when asked for from a seed",
        licence="none needed",
        origin="made by this project's code",
    ),
)


def find(name: str, known: Iterable[DataSet] = KNOWN) -> DataSet:
    """The data set of a name."""
    known = tuple(known)
    for item in known:
        if item.name == name:
            return item
    raise ConfigError(f"no data set is called {name!r}; {did_you_mean(name, [item.name for item in known])}")


def fetch(
    name: str | DataSet,
    folder: Path | str,
    *,
    progress: Progress | None = None,
    tries: int = 5,
    pause: float = 1.0,
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
