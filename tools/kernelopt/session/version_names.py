"""The names of versions: v0, v1, v2 …"""

import re

from ..errors import UsageError

VERSION = re.compile(r"v(0|[1-9][0-9]{0,11})\Z")


def version_number(version: str) -> int:
    """Return 3 for "v3". Raise UsageError for other names than v0, v1, v2 …"""
    if not VERSION.match(version):
        raise UsageError(f"{version!r} is no version; versions are v0, v1, v2, …")
    return int(version[1:])
