"""Script of the separate process that reads a pickle and writes its tensors as safetensors.

It reads JSON from stdin and writes JSON to stdout. It does not import clearhead. `torch.load(weights_only=True)` runs
no code of the file; the limits of the process hold if torch's reader has a defect.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Keys under which training programs store the parameters.
_NESTED = ("model_state_dict", "state_dict", "model", "module")
_EXTRA_MEMORY = 16 << 30  # address space, of which torch reserves much and uses little
_EXTRA_FILE = 64 << 20
_EXTRA_SECONDS = 300


def _find_tensors(data: Any, torch: Any) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name: at the top level, or under one of the usual keys."""
    if not isinstance(data, dict):
        raise ValueError(f"it contains a {type(data).__name__}; expected a dictionary of tensors")
    tensors = {name: value for name, value in data.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if tensors:
        return tensors
    for key in _NESTED:
        if isinstance(data.get(key), dict):
            return _find_tensors(data[key], torch)
    raise ValueError("it contains no tensors")


def _convert(source: str, target: str) -> dict[str, Any]:
    """Write the tensors of the file `source` to `target`, and return the sizes that Whisper's files contain."""
    import torch
    from safetensors.torch import save_file

    _limit_resources(Path(source).stat().st_size)
    data = torch.load(source, map_location="cpu", weights_only=True)
    # Tied tensors share memory, which safetensors does not allow.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in _find_tensors(data, torch).items()}
    save_file(tensors, target, {"format": "pt"})
    sizes = data.get("dims")
    is_whisper = isinstance(sizes, dict) and all(isinstance(value, int) for value in sizes.values())
    return {"dims": sizes if is_whisper else None}


def _limit_resources(n_bytes: int) -> None:
    """Limit memory, processor time, the size of files, and the number of processes."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {
        resource.RLIMIT_AS: _EXTRA_MEMORY + 6 * n_bytes,
        resource.RLIMIT_CPU: _EXTRA_SECONDS + n_bytes // 10_000_000,
        resource.RLIMIT_FSIZE: _EXTRA_FILE + 4 * n_bytes,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _main() -> None:
    """Convert the file that the request names."""
    request = json.load(sys.stdin)
    try:
        response = _convert(request["source"], request["target"])
    except (Exception, MemoryError) as error:  # torch and pickle raise arbitrary errors for corrupted files
        lines = str(error).strip().splitlines() or [""]
        response = {"error": f"{type(error).__name__}: {lines[0]}"[:300]}
    json.dump(response, sys.stdout)


if __name__ == "__main__":
    _main()
