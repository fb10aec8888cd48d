"""The digest of a file. Records name the kernel that they are about by it."""

import hashlib
from pathlib import Path

from .. import bundle


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raise UsageError if the file cannot be read."""
    return hashlib.sha256(bundle.read_bytes(path)).hexdigest()
