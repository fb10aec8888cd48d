"""Run a command with loopback alone: unshare --net python isolated.py COMMAND…

In a new network namespace loopback exists and is down; nothing else is there. Source: netdevice(7).
"""

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def interfaces() -> list[str]:
    """The network interfaces that this process sees."""
    return [line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]


def switch_loopback_on() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | IFF_UP, b""))


if __name__ == "__main__":
    switch_loopback_on()
    os.execvp(sys.argv[1], sys.argv[1:])
