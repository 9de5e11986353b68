"""A model in a folder: `config.toml` says what it is, `model.safetensors` holds its weights.

Nothing is ever unpickled, so a file from anywhere is only data. A save that is interrupted at any moment leaves either
the old model or the new one, whole; everything that a stored model can get wrong is one `StorageError`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from clearhead._core.atomic_io import save_tensors, sync, wrap_os_errors
from clearhead._version import __version__
from clearhead.config import Config
from clearhead.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from safetensors import safe_open

CONFIG = "config.toml"
WEIGHTS = "model.safetensors"
_NEW = ".new"

# Modules in files of version 0.2, and their current names.
_RENAMED_MODULES = {
    "after1": "post_attention",
    "after2": "post_feed_forward",
    "after_cross": "post_cross_attention",
    "widen": "embedding_proj",
}

# What a stored number may be, under safetensors' names: kinds must agree, widths may differ (a half-precision copy).
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = FLOAT_DTYPES | _OTHERS | {"BOOL": torch.bool}


def save_checkpoint(model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Store a model and its configuration in `folder`, which may hold an older model and other files.

    `dtype=torch.float16` (or bfloat16) stores a smaller copy; the model itself is not changed. Weights that are tied
    are stored once. One process at a time may save to a folder."""
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and would rename every weight
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise StorageError(
            f"{type(model).__name__} has no .config to store (got {type(config).__name__}, expected a Config); "
            "save the model itself, not a wrapper around it"
        )
    check_target("cpu", dtype)
    weights = {names[0]: _stored(names[0], tensor, dtype) for names, tensor in named_tensors(model)}
    folder = Path(folder)
    try:
        with wrap_os_errors(f"cannot save to {folder}"):
            _write(folder, config.to_toml(), weights)
    except ConfigError as error:
        raise StorageError(f"{type(config).__name__} cannot be stored: {error}") from error
    return folder


def load_checkpoint(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The model that `save` stored, in evaluation mode and with the same numbers.

    Its dtype is the stored one unless `dtype` asks for another (a half-precision copy is not widened by itself). The
    result is typed Any, because the folder says which model it is."""
    folder = Path(folder)
    check_target(device, dtype)
    config = _read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise StorageError(f"{folder} has {CONFIG} but no {WEIGHTS}; copy it there, or save the model again")
    with open_safetensors(folder / WEIGHTS, device) as file:
        skeleton = build_empty(config, folder / CONFIG, len(file.keys()))
        stored_names = _stored_names(file)
        _check(skeleton, file, stored_names, folder / WEIGHTS)
        weights: dict[str, Tensor] = {}
        for names, _ in named_tensors(skeleton):
            tensor = file.get_tensor(stored_names[names[0]])
            weights[names[0]] = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
    model, stored = skeleton, skeleton.state_dict()
    if any(name not in stored for name, _ in skeleton.named_buffers(remove_duplicate=False)):
        # Buffers that are not stored are computed while building, so this one has to be built for real;
        # the initial weights are thrown away, and so must be the random numbers that they took.
        with torch.random.fork_rng(devices=[]):
            model = config.build().to(device)
    return assign_parameters(model, weights)


def aligned_copy(tensor: Tensor) -> Tensor:
    """Return the tensor if it starts at a multiple of 64 bytes, else a copy that does.

    Parameters that are copied anyway (another dtype, dequantized, moved) are aligned, as torch's own allocations are.
    Memory-mapped parameters are not: on the CPUs measured, products with a misaligned float32 matrix take a few
    percent longer at most, and bfloat16 at one row about an eighth, while a copy would read the whole file before
    the first use and give up the page cache that processes share."""
    if tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def assign_parameters(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A model with these weights, each under the first of its names, for evaluation."""
    named: dict[str, Tensor] = {}
    for names, expected in named_tensors(model):
        tensor = weights.pop(names[0])
        # One Parameter object under all its names keeps tied weights tied.
        shared = nn.Parameter(tensor, expected.requires_grad) if isinstance(expected, nn.Parameter) else tensor
        named |= dict.fromkeys(names, shared)
    model.load_state_dict(named, assign=True)
    return model.eval()


def check_target(device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Refuses a device or dtype that weights cannot be loaded to."""
    if dtype is not None and dtype not in FLOAT_DTYPES.values():
        raise StorageError(f"got dtype={dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES.values()))}")
    try:
        usable = torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError, TypeError):  # how torch refuses depends on what was left out of it
        usable = False
    if not usable:
        raise StorageError(f'got device={str(device)!r}, which is not there to load to; expected one that is, as "cpu"')


def named_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each stored tensor with all its names; tied parameters are one tensor with several names."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    yield from groups.values()


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if tensor.is_meta:
        what = f"{name} is on the meta device and has no numbers to store"
        raise StorageError(f"{what}; build the model on a real device")
    stored = tensor.detach().cpu().contiguous()
    if dtype is None or not stored.is_floating_point():
        return stored
    narrow = stored.to(dtype)
    if not torch.equal(narrow.isfinite(), stored.isfinite()):
        raise StorageError(
            f"{name} reaches {stored.abs().max().item():.3g}, which {dtype} cannot hold; "
            "use torch.bfloat16 or torch.float32"
        )
    return narrow


def _write(folder: Path, config: str, weights: dict[str, Tensor]) -> None:
    """Put both files in place so that a crash at any point leaves one whole model.

    Both are written under new names first, weights before config. Renaming the weights is the moment when the new model
    counts: from then on a left-over `config.toml.new` without new weights beside it is the right configuration, and
    `_settle` (here, or in the next save) or `_read_config` (a load) takes it."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    _settle(folder)
    new_weights, new_config = folder / (WEIGHTS + _NEW), folder / (CONFIG + _NEW)
    try:
        save_tensors(new_weights, weights, {"format": "pt", "writer": f"clearhead {__version__}"})
        sync(new_weights)
        new_config.write_text(config, encoding="utf-8")
        sync(new_config)
        sync(folder)
        os.replace(new_weights, folder / WEIGHTS)
    finally:
        _settle(folder)
        if is_new:
            with contextlib.suppress(OSError):  # a model is in it
                folder.rmdir()


def _is_decided(folder: Path) -> bool:
    """Whether a save has got as far as its new weights, and only its configuration is not in place."""
    return (folder / (CONFIG + _NEW)).exists() and not (folder / (WEIGHTS + _NEW)).exists()


def _settle(folder: Path) -> None:
    """Finish a save whose new weights have arrived; throw away one that has not got so far."""
    new_config = folder / (CONFIG + _NEW)
    if _is_decided(folder):
        os.replace(new_config, folder / CONFIG)
        sync(folder)
    new_config.unlink(missing_ok=True)  # first: alone, it would read as a save that had been decided
    (folder / (WEIGHTS + _NEW)).unlink(missing_ok=True)


def _read_config(folder: Path) -> Config:
    import clearhead.models  # noqa: F401  (every model of this room must be known by name before one is looked up)

    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise StorageError(f"{folder} {what}, expected a folder with {CONFIG} and {WEIGHTS}, as save() writes it")
    path = folder / (CONFIG + _NEW if _is_decided(folder) else CONFIG)
    if not path.is_file():
        raise StorageError(f"{folder} has no {CONFIG}, expected a folder that save() wrote")
    try:
        return Config.from_toml(path.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: {error}") from error


def build_empty(config: Config, where: Path, n_stored: int) -> nn.Module:
    """The model without numbers; sizes that no model can have are found here.

    A number of layers may be anything, and even layers without numbers take time. So building ends where there are far
    more weights than the file holds: twice as many may be, for those that are tied are stored once."""
    most, made = 2 * n_stored + 100, 0
    builder = threading.get_ident()

    def count(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        nonlocal made
        made += threading.get_ident() == builder
        if made > most:
            raise StorageError(
                f"{where} describes a model with more than {most:,} weight tensors, and {n_stored:,} are stored; "
                "correct the number of layers, or use the pair that was written together"
            )

    counting = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"), _Numberless():
            return config.build()
    except (ConfigError, RuntimeError, TypeError) as error:
        raise StorageError(f"{where} describes a model that cannot be built: {str(error).splitlines()[0]}") from error
    finally:
        counting.remove()


class _Numberless(TorchFunctionMode):
    """Nothing is drawn for tensors that hold no numbers: for that torch would import its compiler, which takes longer
    than reading a model of 100 million weights."""

    # What drawing weights changes in place. Which of them ask for the compiler depends on torch's version.
    FILLS = (nn.init.normal_, Tensor.normal_, Tensor.uniform_, Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def open_safetensors(path: Path, device: str | torch.device) -> Iterator[safe_open]:
    """A safetensors file, with what can be wrong in reading it said in one way."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as error:
        raise StorageError(
            f"{path} is not a whole safetensors file ({error}); it may be torn or of another format: get it again"
        ) from error


def _stored_names(file: safe_open) -> dict[str, str]:
    """Return the name of each tensor in the file by its current name; version 0.2 named some modules differently."""
    return {_current_name(name): name for name in file.keys()}  # noqa: SIM118


def _current_name(name: str) -> str:
    """Return the current name of a tensor in a file of version 0.2."""
    return ".".join(_RENAMED_MODULES.get(part, part) for part in name.split("."))


def _check(model: nn.Module, file: safe_open, stored_names: dict[str, str], path: Path) -> None:
    """Names, shapes and kinds of number must be those of the model; the first few faults of each sort are named."""
    expected = {names[0]: tensor for names, tensor in named_tensors(model)}
    found = stored_names.keys()
    missing, unexpected = [name for name in expected if name not in found], sorted(found - expected.keys())
    shapes, kinds = [], []
    for name in [name for name in expected if name in found]:
        view, tensor = file.get_slice(stored_names[name]), expected[name]
        if tuple(view.get_shape()) != tuple(tensor.shape):
            shapes.append(f"{name} is {tuple(view.get_shape())}, expected {tuple(tensor.shape)}")
        stored = _DTYPES.get(view.get_dtype())
        if stored is None or (stored != tensor.dtype and not (stored.is_floating_point and tensor.is_floating_point())):
            wanted = "one of " + "/".join(FLOAT_DTYPES) if tensor.is_floating_point() else tensor.dtype
            kinds.append(f"{name} is {view.get_dtype()}, expected {wanted}")
    wrong = {"missing": missing, "unexpected": unexpected, "shapes": shapes, "dtypes": kinds}
    faults = [f"{what}: {first_names(which)}" for what, which in wrong.items() if which]
    if faults:
        whose = f"the weights of the {type(model).__name__} that {CONFIG} describes"
        raise StorageError(f"{path} does not hold {whose}; {'; '.join(faults)}. Use the pair that one save() wrote")


def first_names(items: list[str], most: int = 3) -> str:
    """The first of many names."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
