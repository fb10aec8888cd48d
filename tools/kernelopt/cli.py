"""The command line that all tools share: parsing, output, exit codes."""

import argparse
import contextlib
import importlib.util
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from . import bundle, environment
from .errors import EnvironmentLacks, ToolError, of_the_system, say

EXIT_CODES = "exit codes: 0 done and good, 1 the answer is no, 2 usage, 3 the environment lacks something, 4 time-out"
NEEDED_PACKAGES = ("torch", "triton", "numpy", "jsonschema_rs")
# The commands that need a GPU. Each takes --on ADDRESS, and then runs on a node (docs/remote-gpu.md).
ON_A_NODE = {
    "bench_bandwidth.py",
    "bench_matmul.py",
    "calibrate_gpu.py",
    "cut_problem.py",
    "explore_kernels.py",
    "export_kernel.py",
    "find_kernels.py",
    "gpu_specs.py detect",
    "measure_bandwidth_ceiling.py",
    "measure_ceiling.py",
    "measure_kernel_time.py",
    "optimize_kernel.py",
    "profile_kernel.sh",
    "put_back.py",
    "run_gate.py",
    "verify_kernel.py",
}
LOCKING = {"run_gate.py"}  # these, and what is called with --gate, hold the workspace's lock here, too
PRINTING = {"explore_kernels.py"}  # these print what they have when a signal ends them, there too
PARTLY = {"optimize_kernel.py"}  # these run here, and give single steps to the node


class Parser(argparse.ArgumentParser):
    """One sentence for a wrong call, in place of the usage of all options. A command that needs a GPU has --on."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.prog in ON_A_NODE:
            self.add_argument(
                "--on",
                type=filled,
                metavar="ADDRESS",
                default=os.environ.get("KERNELOPT_ON") or "local",
                help="of a GPU node (default: $KERNELOPT_ON, else local)",
            )

    def parse_args(self, *arguments, **options):
        """The parsed command line. One for a node is run there, and this process ends with its exit code."""
        args = super().parse_args(*arguments, **options)
        if getattr(args, "on", "local") != "local" and self.prog not in PARTLY:
            from .device.stop_signal import Stop
            from .remote import hand_over

            stop = Stop()
            if self.prog in PRINTING:
                handle(stop.signalled, signal.SIGTERM, signal.SIGINT)
            locks = self.prog in LOCKING or bool(getattr(args, "gate", None))
            code, output = hand_over.hand_over(args, args.on, locks, say, stop)
            print(output, end="")
            sys.exit(code)
        return args

    def error(self, message: str):
        if "arguments: --workspace" in message:  # of some tools it is what all is about, and has no option's name
            message += " (the workspace's path alone is enough)"
        say(f"{self.prog}: {message}; --help lists the options")
        self.exit(2)


def parser(description: str, **options) -> Parser:
    """An argument parser with the bundle's conventions."""
    return Parser(
        description=description,
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_benchmark_options(parser) -> None:
    parser.add_argument("--rep-ms", type=positive_int, default=200, help="do_bench's repetition, in milliseconds")
    add_timeout(parser, 300, "in all")
    add_json(parser)


def add_json(target) -> None:
    """The option every command has."""
    target.add_argument("--json", action="store_true", help="print one JSON object")


def add_workspace(target, required: bool = False) -> None:
    target.add_argument(
        "--workspace", type=Path, required=required, metavar="W", help="a workspace made by reference/workspace_init.sh"
    )


def add_set_targets(target, help: str) -> None:
    """--set-target, the former name in measure_ceiling.py, still works."""
    target.add_argument("--set-targets", action="store_true", help=help)
    target.add_argument("--set-target", dest="set_targets", action="store_true", help=argparse.SUPPRESS)


def add_timeout(target, default_s: int, per: str = "for each process") -> None:
    target.add_argument(
        "--timeout", type=positive_float, default=default_s, metavar="S", help=f"seconds {per} (default {default_s})"
    )


def add_gpu_wiki(target) -> None:
    target.add_argument(
        "--gpu-wiki", type=Path, metavar="FOLDER", help="another wiki (default: $GPU_WIKI, else the bundle's own)"
    )


def add_workload(target) -> None:
    target.add_argument(
        "--workload", default="default", metavar="NAME", help="which workload (default: the one of get_inputs)"
    )


def add_subject(target) -> None:
    """What a command works on: a workspace, or a kernel beside a reference."""
    add_workspace(target)
    target.add_argument("--kernel", type=Path, metavar="FILE", help="without a workspace: ModelNew or kernel_function")
    target.add_argument("--reference", type=Path, metavar="FILE", help="with --kernel: file with Model and get_inputs")
    target.add_argument("--dtype", type=filled, help="with --kernel: cast floating inputs to bf16, fp16, fp32 or fp64")


def add_work(target, dtypes: Iterable[str], of: str) -> None:
    """The least work of a problem, by hand. of: which workload's."""
    target.add_argument("--work-dtype", choices=sorted(dtypes), help="dtype of the arithmetic, given by hand")
    target.add_argument("--flops", type=positive_int, help=f"FLOPs {of}, given by hand")
    target.add_argument("--bytes", type=positive_int, help=f"least bytes {of}, given by hand")


def add_device(target) -> None:
    """Where kernels run. Nothing chooses the CPU by itself."""
    chosen = "cpu-interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    target.add_argument(
        "--device",
        choices=["cuda", "cpu-interpreter"],
        default=chosen,
        help="cpu-interpreter runs Triton kernels on the CPU (also by TRITON_INTERPRET=1): logic only, "
        "never a GPU result",
    )


def add_compile_seconds(target) -> None:
    target.add_argument(
        "--compile-seconds",
        type=positive_float,
        default=300,
        metavar="S",
        help="leave a way of running out that is not ready after S seconds (default 300)",
    )


def add_sandbox(target) -> None:
    """How kernels, which nobody has vetted, are kept apart."""
    target.add_argument(
        "--sandbox",
        choices=["auto", "bwrap", "landlock", "none"],
        default="auto",
        help="bwrap: read-only file system, no network; landlock: no writes outside; auto: the first that works",
    )


def add_run(target, timeout_s: int) -> None:
    """How a command that runs a user's code does so, and how it prints the result."""
    target.add_argument(
        "--timeout",
        type=positive_float,
        default=timeout_s,
        metavar="S",
        help=f"seconds a process (default {timeout_s})",
    )
    add_device(target)
    add_sandbox(target)
    add_json(target)


def number(text: str, kind: type, fits: Callable[[float], bool], wanted: str):
    """`text` as an int or float that fits; argparse shows `wanted` when it does not."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}")
    return value


def positive_float(text: str) -> float:
    """An argparse type. As seconds, 1e9 are more than any clock here lasts."""
    return number(text, float, lambda value: 0 < value <= 1e9, "a number above 0, up to 1e9")


def tolerance(text: str) -> float:
    """An argparse type; with 1 an output of zeros would pass."""
    return number(text, float, lambda value: 0 < value < 1, "a number between 0 and 1")


def percentage(text: str) -> float:
    """An argparse type."""
    return number(text, float, lambda value: 0 < value <= 100, "a number above 0, up to 100")


def whole(text: str) -> int:
    """int("12"), and 10**9 for 1e9, as people write FLOPs; ValueError for 1.5."""
    try:
        return int(text)
    except ValueError:
        if not (value := float(text)).is_integer():
            raise
        return int(value)


def natural(text: str) -> int:
    """An argparse type."""
    return number(text, whole, lambda value: value >= 0, "a whole number from 0 on")


def positive_int(text: str) -> int:
    """An argparse type."""
    return number(text, whole, lambda value: value >= 1, "a whole number from 1 on")


def filled(text: str) -> str:
    """An argparse type: an empty string is a variable that was never set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    """An argparse type."""
    return Path(filled(text))


def emit(result: dict, as_json: bool, lines: list[str]) -> None:
    """Print the result: one JSON object, or `lines` for people."""
    print(bundle.dumps(result).rstrip() if as_json else "\n".join(lines))


def continue_in_bundle_environment() -> None:
    """If this interpreter lacks a package that the environment of scripts/setup.sh has, go on there."""
    if all(importlib.util.find_spec(name) for name in NEEDED_PACKAGES):
        return
    with contextlib.suppress(EnvironmentLacks):  # the package that is lacking is named where it is needed
        folder = environment.folder()
        python = folder / "bin" / "python"
        if python.exists() and Path(sys.prefix).resolve() != folder.resolve():
            os.execv(python, [str(python), *sys.argv])


def continue_in_utf8() -> None:
    """Where paths are in another encoding than UTF-8 (LC_ALL=C with Python's own mode for it switched off, a legacy
    locale), go on in Python's UTF-8 mode: torch and others write no path that is not UTF-8, and it would be blamed on
    the kernel's files."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # the children too
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def escape_what_cannot_be_printed() -> None:
    """Half characters, bytes of paths that are no text, and what the terminal's encoding lacks; stderr escapes them
    anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # neither closed nor captured
        sys.stdout.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Send what was printed on its way while an error can still be told."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # what is left goes nowhere, or Python would try it once more and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def handle(handler: Callable[[int, object], object], *signals: int) -> None:
    """Have these signals call `handler`, but leave those alone that whoever started this process had it ignore: nohup
    does so with SIGHUP, a shell without job control (`... &` in a script) with SIGINT. SIGTERM ends it all the same."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def run(main: Callable[[], int]) -> None:
    """Run a tool's `main` and leave with its exit code; errors become one sentence on stderr."""
    name = Path(sys.argv[0]).name
    # So that children and scratch files are cleaned up; SIGINT raises KeyboardInterrupt by itself.
    handle(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)
    escape_what_cannot_be_printed()
    try:
        continue_in_utf8()
        if not {"-h", "--help"} & set(sys.argv[1:]):
            continue_in_bundle_environment()
        try:
            code = main()
        finally:
            flush()
    except ToolError as error:
        say(f"{name}: {error}")
        code = error.exit_code
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        code = 130
    except BrokenPipeError:
        code = 1
    except OSError as error:
        say(f"{name}: {of_the_system(error)}")
        code = 3
    except Exception as error:  # a defect of ours: say so in a sentence, keep the traceback for who asks
        if os.environ.get("KERNELOPT_DEBUG"):
            import traceback

            say(traceback.format_exc())
        say(f"{name}: defect in this tool, {type(error).__name__}: {error}; KERNELOPT_DEBUG=1 shows where")
        code = 70
    sys.exit(code)
