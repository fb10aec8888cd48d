"""Writes the .safetensors files of tests/fixtures/formats/flashinfer: python tests/formats/write_blobs.py"""

import json
import struct
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "formats" / "flashinfer" / "blob" / "workloads"
BLOBS = {
    "paged_small": {"indptr": [0, 3, 3, 5], "indices": [7, 2, 5, 0, 8]},
    "paged_large": {"indptr": [0, 4, 7], "indices": [1, 3, 8, 6, 0, 2, 4]},
}


def content(tensors: dict[str, list[int]]) -> bytes:
    """The file that holds these vectors of 32-bit numbers."""
    header, data = {}, b""
    for name, values in tensors.items():
        first, data = len(data), data + struct.pack(f"<{len(values)}i", *values)
        header[name] = {"dtype": "I32", "shape": [len(values)], "data_offsets": [first, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


if __name__ == "__main__":
    for name, tensors in BLOBS.items():
        (FOLDER / f"{name}.safetensors").write_bytes(content(tensors))
