"""Start a program that gets SIGTERM when its parent ends: `python -m kernelopt.remote.child PARENT PROGRAM …`.

PARENT: the number of the parent, which may have ended before this program could ask for the signal.
"""

import os
import signal
import sys

from ..device import processes


def command(program: list[str]) -> list[str]:
    """The command that starts `program` as a child of this process. The thread that starts it must live as long."""
    return [sys.executable, "-m", "kernelopt.remote.child", str(os.getpid()), *program]


if __name__ == "__main__":
    processes.die_with_parent(signal.SIGTERM, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
