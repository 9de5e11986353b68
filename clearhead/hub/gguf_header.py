"""Check the counts and offsets of a GGUF file against its size.

The `gguf` package trusts the header: an array that claims 2^40 values is a loop of 2^40 steps. This module walks
the header first, and no count in it may need more bytes than the file has left.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

# Bytes of a value by its type number; 8 is a string, 9 an array.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 12
_MIN_KEY_BYTES = _MIN_STRING_BYTES + 4 + 1
_MIN_TENSOR_BYTES = _MIN_STRING_BYTES + 4 + 4 + 8
_MAX_NESTING = 4
_MAX_DIMS = 8


def check_header(path: Path, quantized_sizes: dict[int, tuple[int, int]]) -> None:
    """Raise `ValueError` if a count or an offset of the header does not fit the file.

    Args:
        path: The GGUF file.
        quantized_sizes: Values per block and bytes per block of each tensor type, by its number.
    """
    with path.open("rb") as file:
        _Header(file, path.stat().st_size).check(quantized_sizes)


class _Header:
    """A position in the header, and how many bytes of the file follow it."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._position = 0
        self._order = "<"

    def check(self, quantized_sizes: dict[int, tuple[int, int]]) -> None:
        if self._read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._read(4)
        if version[:2] == b"\0\0":  # a version below 65,536 in the other byte order
            self._order = ">"
        n_tensors, n_keys = self._unpack("QQ")
        self._require(n_keys, _MIN_KEY_BYTES, "keys")
        for _ in range(n_keys):
            self._skip_string()
            (kind,) = self._unpack("I")
            self._skip_values(kind, 1, 0)
        self._require(n_tensors, _MIN_TENSOR_BYTES, "tensors")
        for _ in range(n_tensors):
            self._check_tensor(quantized_sizes)

    def _check_tensor(self, quantized_sizes: dict[int, tuple[int, int]]) -> None:
        name = self._read(self._string_length()).decode(errors="replace")[:80]
        (n_dims,) = self._unpack("I")
        if n_dims > _MAX_DIMS:
            raise ValueError(f"{name} has {n_dims:,} dimensions; expected at most {_MAX_DIMS}")
        dims = self._unpack(f"{n_dims}Q")
        kind, offset = self._unpack("IQ")
        if kind not in quantized_sizes:
            return  # the reader names the types that it supports
        block, block_bytes = quantized_sizes[kind]
        n_bytes = math.prod(dims) // block * block_bytes
        if offset + n_bytes > self._size:
            raise ValueError(
                f"{name} ends at byte {offset + n_bytes:,} or later, and the file has {self._size:,} bytes"
            )

    def _skip_values(self, kind: int, count: int, depth: int) -> None:
        """Skip `count` values of a type."""
        if kind in _VALUE_BYTES:
            self._require(count, _VALUE_BYTES[kind], "values")
            self._move(count * _VALUE_BYTES[kind])
        elif kind == _STRING:
            self._require(count, _MIN_STRING_BYTES, "strings")
            for _ in range(count):
                self._skip_string()
        elif kind == _ARRAY:
            if depth == _MAX_NESTING:
                raise ValueError(f"arrays are nested more than {_MAX_NESTING} deep")
            self._require(count, _MIN_ARRAY_BYTES, "arrays")
            for _ in range(count):
                item_kind, length = self._unpack("IQ")
                self._skip_values(item_kind, length, depth + 1)
        else:
            raise ValueError(f"{kind} is not a type of value")

    def _skip_string(self) -> None:
        self._move(self._string_length())

    def _string_length(self) -> int:
        (length,) = self._unpack("Q")
        if length > self._size - self._position:
            raise ValueError(f"a string of {length:,} bytes is longer than the rest of the file")
        return length

    def _require(self, count: int, least_bytes: int, items: str) -> None:
        """Raise if `count` items of at least this size do not fit into the bytes that follow."""
        following = self._size - self._position
        if count * least_bytes > following:
            container = "an array of " if items not in ("keys", "tensors") else ""
            raise ValueError(f"{container}{count:,} {items} does not fit into the {following:,} bytes that follow")

    def _unpack(self, form: str) -> tuple[int, ...]:
        form = self._order + form
        return struct.unpack(form, self._read(struct.calcsize(form)))

    def _read(self, n_bytes: int) -> bytes:
        data = self._file.read(n_bytes)
        if len(data) < n_bytes:
            raise ValueError("it ends within its header")
        self._position += n_bytes
        return data

    def _move(self, n_bytes: int) -> None:
        self._file.seek(n_bytes, 1)
        self._position += n_bytes
