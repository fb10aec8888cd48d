"""Where a tensor lies in a .safetensors file: eight bytes of length, a JSON object, the data."""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

MOST_HEADER = 100 << 20
LFS_POINTER = b"version https://git-lfs"
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
}
PIECE = 1 << 24


@dataclass(frozen=True)
class Place:
    """A tensor in a file: from byte `start` of it to `end`. sha256: of these bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    sha256: str


def find(path: Path, key: str) -> Place:
    """The place of a tensor. UsageError where the file is none, or has no such tensor."""
    with open(path, "rb") as file:
        head = file.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            raise UsageError(f"{path} is a pointer of Git LFS; run: git lfs pull")
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else MOST_HEADER + 1
        file.seek(8)
        header = file.read(length) if length <= MOST_HEADER else b""
        try:
            entry = json.loads(header)[key]
            dtype, shape, (first, last) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except KeyError as error:
            raise UsageError(f"{path} has no {error.args[0]}") from None
        except (ValueError, TypeError, RecursionError):
            raise UsageError(f"{path} is no .safetensors file") from None
        start, end = 8 + length + first, 8 + length + last
        if not (8 + length <= start <= end <= path.stat().st_size):
            raise UsageError(f"{path} is cut off: {key} lies beyond its end")
        return Place(path.resolve(), dtype, shape, start, end, digest(file, start, end))


def digest(file, start: int, end: int) -> str:
    """SHA-256 of a part of a file."""
    summed = hashlib.sha256()
    file.seek(start)
    while (left := end - file.tell()) > 0 and (piece := file.read(min(left, PIECE))):
        summed.update(piece)
    return summed.hexdigest()
