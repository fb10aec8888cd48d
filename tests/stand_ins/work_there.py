"""Stands in for a tool on a node: `python -m work_there WORKSPACE STEP…` does what its steps say, and no GPU work."""

import os
import signal
import sys
import time
from pathlib import Path


def main(root: Path, steps: list[str]) -> int:
    for step in steps:
        verb, _, value = step.partition(":")
        if verb == "say":
            print(value.format(root=root), file=sys.stderr, flush=True)
        elif verb == "print":
            print(value.format(root=root))
        elif verb == "write":
            name, _, text = value.partition("=")
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(root=root))
        elif verb == "remove":
            (root / value).unlink()
        elif verb == "pid":
            print(os.getpid(), file=sys.stderr, flush=True)
        elif verb == "exit":
            return int(value)
        elif verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "sleep":
            time.sleep(float(value))
        elif verb == "wait":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            print("waiting", file=sys.stderr, flush=True)
            signal.sigwait({signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
