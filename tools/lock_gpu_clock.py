#!/usr/bin/env python3
"""Lock the GPU's SM clock for measurements, and give it back to the driver. Needs root.

lock               until reset
lock -- COMMAND    while COMMAND runs, however it ends; the exit code is COMMAND's
reset              give back what lock took; without a lock of ours nothing is changed

Without --clock: the highest clock that is at most 80 % of the highest one and at most the default applications clock.
The GPU is the first of CUDA_VISIBLE_DEVICES (sudo -E keeps that variable). A lock of another user is not restored,
because NVML does not report it. exit 1: locked already, or the GPU does not keep to the clock."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.device import clocks
from kernelopt.errors import UsageError

EXAMPLES = """examples:
  sudo -E bash scripts/lock-gpu-clock.sh
  sudo -E bash scripts/reset-gpu-clock.sh
  sudo -E bash scripts/lock-gpu-clock.sh --clock 1200 -- python tools/bench_matmul.py"""


def main() -> int:
    args, command = arguments()
    if args.verb == "reset":
        return reset(args.json)
    if command is None:
        note, reading_mhz = clocks.lock(args.clock)
        result = {**note.to_json(), "sm_clock_mhz": reading_mhz}
        cli.emit(result, args.json, [describe(note, reading_mhz), f"give it back with: {clocks.UNLOCK}"])
        return 0
    if args.json:
        raise UsageError("--json takes no command, because stdout belongs to the command")
    return run_locked(command, args.clock)


def describe(note: clocks.Note, reading_mhz: int) -> str:
    line = f"{note.device} ({note.uuid}): SM clock locked at {note.clock_mhz} MHz"
    if reading_mhz >= note.clock_mhz - clocks.SLACK_MHZ:
        return line
    return f"{line}; it reads {reading_mhz} MHz, idle or throttled"


def reset(as_json: bool) -> int:
    note = clocks.release()
    if note is None:
        cli.emit({"reset": False}, as_json, ["nothing to give back: no lock of ours on this GPU; nothing was changed"])
    else:
        line = f"{note.device}: the SM clock is the driver's again, after a lock at {note.clock_mhz} MHz"
        cli.emit({"reset": True, **note.to_json()}, as_json, [line])
    return 0


def run_locked(command: list[str], clock: int | None) -> int:
    """Run a command between lock and release; its exit code, 128 + n after signal n."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} is no program on the PATH; the clock was not touched")
    relay = Relay()
    cli.say(describe(*clocks.lock(clock)))
    try:
        return relay.run(command)
    finally:
        if clocks.release():
            cli.say("the SM clock is the driver's again")


class Relay:
    """Passes terminating signals on to the command. This process survives them, so that it always releases the
    clock."""

    def __init__(self):
        self.taken: list[int] = []
        self.child: subprocess.Popen | None = None
        cli.handle(self.take, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def take(self, number: int, _) -> None:
        self.taken.append(number)
        self.pass_on(number)

    def pass_on(self, number: int) -> None:
        if self.child and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)

    def run(self, command: list[str]) -> int:
        if self.taken:
            return 128 + self.taken[0]
        # A new session: the terminal's Ctrl-C reaches the command once, through this process.
        self.child = subprocess.Popen(command, start_new_session=True)
        for number in list(self.taken):  # signals that came during the start
            self.pass_on(number)
        code = self.child.wait()
        return code if code >= 0 else 128 - code


def arguments():
    """(options, COMMAND after `--` or None)"""
    options, command = sys.argv[1:], None
    if "--" in options:
        cut = options.index("--")
        options, command = options[:cut], options[cut + 1 :]
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}", usage="%(prog)s lock|reset [--clock MHZ] [--json] [-- COMMAND...]")
    parser.add_argument("verb", choices=["lock", "reset"])
    parser.add_argument("--clock", type=cli.positive_int, metavar="MHZ", help="lock at this one of the GPU's clocks")
    cli.add_json(parser)
    args = parser.parse_args(options)
    if command == [] or (args.verb == "reset" and (command or args.clock)):
        parser.error("--clock and a COMMAND, after --, go with lock")
    return args, command


if __name__ == "__main__":
    cli.run(main)
