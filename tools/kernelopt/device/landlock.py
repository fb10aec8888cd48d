"""Landlock: a process gives up, for itself and its children, writing outside some folders. Linux 5.13, no privileges.

The system calls have no wrapper in the C library or in Python. Source: the kernel's
Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h.
"""

import ctypes
import os
import struct

SHARED_MEMORY = "/dev/shm"  # writable in every sandbox
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1
PR_SET_NO_NEW_PRIVS = 38
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
CHANGING = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make entries of every kind
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1  # neither of processes outside


def version() -> int:
    """Landlock's version here; 0 when the kernel lacks it, or has it switched off."""
    return max(0, _call(CREATE_RULESET, None, 0, ASK_VERSION))


def confine(writable: list[str]) -> None:
    """Forbid this process to change files outside `writable`, /dev and /proc. Where the kernel can do it, also forbid
    TCP connections (Linux 6.7) and signals to processes outside (6.12). OSError when the kernel refuses."""
    known = version()
    files = CHANGING | (REFER if known >= 2 else 0) | (TRUNCATE if known >= 3 else 0)
    handled = [
        files,
        BIND_TCP | CONNECT_TCP if known >= 4 else 0,
        SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if known >= 6 else 0,
    ]
    handled = handled[: 1 if known < 4 else 2 if known < 6 else 3]  # older kernels take a shorter list
    attributes = struct.pack(f"{len(handled)}Q", *handled)
    rules = _done(_call(CREATE_RULESET, attributes, len(attributes), 0))
    to_devices = files & (WRITE_FILE | TRUNCATE)
    for path, rights in [
        *((path, files) for path in (*writable, SHARED_MEMORY)),
        ("/dev", to_devices),
        ("/proc", to_devices),
    ]:
        if os.path.isdir(path):  # noqa: PTH112 (these are plain strings from the request)
            folder = os.open(path, os.O_PATH)
            _done(_call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, folder), 0))
            os.close(folder)
    _done(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _done(_call(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _call(*arguments) -> int:
    try:
        return ctypes.CDLL(None, use_errno=True).syscall(*arguments)
    except (OSError, AttributeError):  # no Linux
        return -1


def _done(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
