"""Checkpoint folders: `config.toml` describes the model, `model.safetensors` contains its parameters.

Nothing is unpickled, so loading a file runs no code. An interrupted save leaves either the old or the new model,
complete. Invalid folders raise `StorageError`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from clearhead._core.atomic_io import save_tensors, sync, wrap_os_errors
from clearhead._core.call_types import Args, Kwargs, TorchFunction
from clearhead._core.keywords import explain_keywords
from clearhead._version import __version__
from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, StorageError

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

# Dtypes by their names in safetensors. Stored and expected dtypes may differ only among floating-point dtypes.
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INT_DTYPES = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = FLOAT_DTYPES | _INT_DTYPES | {"BOOL": torch.bool}


@explain_keywords
def save_checkpoint(model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Save a model and its configuration.

    Tied parameters are stored once. Only one process at a time may save to a folder.

    Args:
        model: Model with a `config`.
        folder: Created if necessary; may contain an older model and other files.
        dtype: Dtype of the stored floating-point parameters, such as torch.float16; None for those of the model.

    Returns:
        The folder.

    Raises:
        DtypeError: The model is not a module.
        StorageError: The model has no configuration or cannot be stored, or a write failed.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"got a {type(model).__name__}; expected a PyTorch module, such as the model of a pipeline")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and prefixes parameter names
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise StorageError(
            f"{type(model).__name__} has no .config to store (got {type(config).__name__}, expected a Config); "
            "save the model itself instead of a wrapper"
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


@explain_keywords
def load_checkpoint(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Load a model that `save_checkpoint` wrote, in evaluation mode.

    Args:
        folder: Folder with config.toml and model.safetensors.
        device: Device of the parameters.
        dtype: Dtype of the floating-point parameters; None for the stored dtype.

    Returns:
        The model, of the class that the configuration names.

    Raises:
        StorageError: The folder is incomplete or corrupted, or its files do not match.
    """
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
        # Non-persistent buffers are computed by the constructor, so build the model on the device. The initial
        # parameters are discarded; the state of the random number generator is restored.
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
    """Assign parameters, keyed by the first name of each, and return the model in evaluation mode."""
    named: dict[str, Tensor] = {}
    for names, expected in named_tensors(model):
        tensor = weights.pop(names[0])
        # One Parameter object under all its names keeps tied weights tied.
        shared = nn.Parameter(tensor, expected.requires_grad) if isinstance(expected, nn.Parameter) else tensor
        named |= dict.fromkeys(names, shared)
    model.load_state_dict(named, assign=True)
    return model.eval()


def check_target(device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Raise StorageError for a device or dtype that does not support parameters."""
    if dtype is not None and dtype not in FLOAT_DTYPES.values():
        raise StorageError(f"got dtype={dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES.values()))}")
    try:
        usable = torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError, TypeError):  # the error depends on the build of torch
        usable = False
    if not usable:
        raise StorageError(
            f'got device={str(device)!r}, which is not available; expected an available device such as "cpu"'
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each stored tensor with all its names; tied parameters are one tensor with several names."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    yield from groups.values()


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor to store: on the CPU, contiguous, and converted to `dtype`."""
    if tensor.is_meta:
        raise StorageError(f"{name} is on the meta device and has no data; build the model on a real device")
    stored = tensor.detach().cpu().contiguous()
    if dtype is None or not stored.is_floating_point():
        return stored
    narrow = stored.to(dtype)
    if not torch.equal(narrow.isfinite(), stored.isfinite()):
        raise StorageError(
            f"{name} reaches {stored.abs().max().item():.3g}, which is outside the range of {dtype}; "
            "use torch.bfloat16 or torch.float32"
        )
    return narrow


def _write(folder: Path, config: str, weights: dict[str, Tensor]) -> None:
    """Write both files so that a crash at any point leaves one complete model.

    Both are first written under temporary names, parameters before configuration. Renaming the parameters commits the
    save: afterwards, a `config.toml.new` without `model.safetensors.new` is the valid configuration, which
    `_finish_save` (here, or in the next save) or `_read_config` (in a load) uses."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    _finish_save(folder)
    new_weights, new_config = folder / (WEIGHTS + _NEW), folder / (CONFIG + _NEW)
    try:
        save_tensors(new_weights, weights, {"format": "pt", "writer": f"clearhead {__version__}"})
        sync(new_weights)
        new_config.write_text(config, encoding="utf-8")
        sync(new_config)
        sync(folder)
        os.replace(new_weights, folder / WEIGHTS)
    finally:
        _finish_save(folder)
        if is_new:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def _is_committed(folder: Path) -> bool:
    """Return whether an interrupted save has renamed its parameters, but not yet its configuration."""
    return (folder / (CONFIG + _NEW)).exists() and not (folder / (WEIGHTS + _NEW)).exists()


def _finish_save(folder: Path) -> None:
    """Complete an interrupted save that was committed, or delete its temporary files."""
    new_config = folder / (CONFIG + _NEW)
    if _is_committed(folder):
        os.replace(new_config, folder / CONFIG)
        sync(folder)
    new_config.unlink(missing_ok=True)  # first, because without the parameters it would look committed
    (folder / (WEIGHTS + _NEW)).unlink(missing_ok=True)


def _read_config(folder: Path) -> Config:
    """Return the configuration in a folder."""
    import clearhead.models  # noqa: F401  (registers the configuration classes)

    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise StorageError(f"{folder} {problem}; expected a folder with {CONFIG} and {WEIGHTS}")
    path = folder / (CONFIG + _NEW if _is_committed(folder) else CONFIG)
    if not path.is_file():
        raise StorageError(f"{folder} has no {CONFIG}; expected a folder written by save_checkpoint")
    try:
        return Config.from_toml(path.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: {error}") from error


def build_empty(config: Config, where: Path, n_stored: int) -> nn.Module:
    """Build the model on the meta device; raise StorageError if its sizes are invalid.

    A corrupted configuration could describe a huge number of layers, and even meta layers take time. Building stops
    when the number of parameters exceeds about twice the number of stored tensors (tied parameters are stored once)."""
    limit = 2 * n_stored + 100
    n_parameters = 0
    builder = threading.get_ident()

    def count(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        """Count the parameters of this thread and stop at the limit."""
        nonlocal n_parameters
        n_parameters += threading.get_ident() == builder
        if n_parameters > limit:
            raise StorageError(
                f"{where} describes a model with more than {limit:,} parameter tensors, and {n_stored:,} are stored; "
                "correct the number of layers, or use files that were written together"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"), _SkipInitialization():
            return config.build()
    except (ConfigError, RuntimeError, TypeError) as error:
        raise StorageError(f"{where} describes a model that cannot be built: {str(error).splitlines()[0]}") from error
    finally:
        hook.remove()


class _SkipInitialization(TorchFunctionMode):
    """Skip random initialization of meta tensors.

    For these, torch would import its compiler, which takes longer than loading a model of 100 million parameters."""

    # In-place functions of initializers; which of them import the compiler depends on the version of torch.
    FILL_FUNCTIONS = (
        nn.init.normal_,
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.erfinv_,
        Tensor.mul_,
        Tensor.add_,
        Tensor.clamp_,
    )

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in self.FILL_FUNCTIONS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def open_safetensors(path: Path, device: str | torch.device) -> Iterator[safe_open]:
    """Open a safetensors file, and raise StorageError if reading fails."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as error:
        raise StorageError(
            f"{path} is not a complete safetensors file ({error}); it may be truncated; copy it again"
        ) from error


def _stored_names(file: safe_open) -> dict[str, str]:
    """Return the name of each tensor in the file by its current name; version 0.2 named some modules differently."""
    return {current_name(name): name for name in file.keys()}  # noqa: SIM118


def current_name(name: str) -> str:
    """Return the current name of a tensor in a file of version 0.2."""
    return ".".join(_RENAMED_MODULES.get(part, part) for part in name.split("."))


def _check(model: nn.Module, file: safe_open, stored_names: dict[str, str], path: Path) -> None:
    """Raise StorageError unless names, shapes and dtypes match the model; name the first few mismatches."""
    expected = {names[0]: tensor for names, tensor in named_tensors(model)}
    stored = stored_names.keys()
    missing = [name for name in expected if name not in stored]
    unexpected = sorted(stored - expected.keys())
    shapes, dtypes = [], []
    for name in [name for name in expected if name in stored]:
        view, tensor = file.get_slice(stored_names[name]), expected[name]
        if tuple(view.get_shape()) != tuple(tensor.shape):
            shapes.append(f"{name} is {tuple(view.get_shape())}, expected {tuple(tensor.shape)}")
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None or (dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point())):
            expected_dtype = "one of " + "/".join(FLOAT_DTYPES) if tensor.is_floating_point() else tensor.dtype
            dtypes.append(f"{name} is {view.get_dtype()}, expected {expected_dtype}")
    mismatches = {"missing": missing, "unexpected": unexpected, "shapes": shapes, "dtypes": dtypes}
    problems = [f"{label}: {first_names(names)}" for label, names in mismatches.items() if names]
    if problems:
        raise StorageError(
            f"{path} does not match the {type(model).__name__} that {CONFIG} describes; {'; '.join(problems)}. Use "
            "files that were written together"
        )


def first_names(names: list[str], limit: int = 3) -> str:
    """Join the first few names, with the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:limit]) + more
