"""Digests of contents and files. Records name the kernel that they are about by it."""

import hashlib
from pathlib import Path

from .. import bundle


def content_digest(content: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raise UsageError if the file cannot be read."""
    return content_digest(bundle.read_bytes(path))
