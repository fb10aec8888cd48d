"""A stand-in for the seccomp filter of Codex's workspace-write sandbox: `python socket_filter.py COMMAND…` runs a command
under it. It refuses, with EPERM, the calls that Codex 0.169.0 refuses (codex-rs/linux-sandbox, landlock.rs; seen in its
`codex sandbox`), and any sockets but Unix ones. tests/clients/ runs Codex itself.

Sources: the kernel's Documentation/userspace-api/seccomp_filter.rst; include/uapi/linux/{filter,seccomp,audit}.h."""

import ctypes
import errno
import os
import socket
import struct
import sys

X86_64 = {"connect": 42, "accept": 43, "sendto": 44, "shutdown": 48, "bind": 49, "listen": 50, "getsockname": 51}
X86_64 |= {"getpeername": 52, "setsockopt": 54, "getsockopt": 55, "accept4": 288, "recvmmsg": 299, "sendmmsg": 307}
AARCH64 = {"connect": 203, "accept": 202, "sendto": 206, "shutdown": 210, "bind": 200, "listen": 201}
AARCH64 |= {"getsockname": 204, "getpeername": 205, "setsockopt": 208, "getsockopt": 209, "accept4": 242}
AARCH64 |= {"recvmmsg": 243, "sendmmsg": 269}
REFUSED = {"x86_64": X86_64, "aarch64": AARCH64}
MAKES_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF: a word at an offset, a comparison, the verdict
NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if equal, jump if not, value)."""
    lines = [(LOAD, 0, 0, NUMBER)]
    for number in REFUSED[machine].values():
        lines += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for number in MAKES_SOCKETS[machine]:
        lines += [(JUMP_IF_EQUAL, 0, 4, number), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_IF_EQUAL, 1, 0, socket.AF_UNIX)]
        lines += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, ALLOW)]


def install() -> None:
    """Filter the calls of this process and of all that it starts."""
    lines = program(os.uname().machine)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(packed)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, MODE_FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be installed here")


if __name__ == "__main__":
    install()
    os.execvp(sys.argv[1], sys.argv[1:])
