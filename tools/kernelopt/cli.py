"""The command line that all tools share: parsing, output, exit codes."""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from . import bundle
from .errors import ToolError

EXIT_CODES = "exit codes: 0 done and good, 1 the answer is no, 2 usage, 3 the environment lacks something, 4 time-out"
NEEDED_PACKAGES = ("torch", "jsonschema")


def parser(description: str, **options) -> argparse.ArgumentParser:
    """An argument parser with the bundle's conventions."""
    return argparse.ArgumentParser(
        description=description,
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_json(target) -> None:
    """The option every command has."""
    target.add_argument("--json", action="store_true", help="print one JSON object")


def add_subject(target) -> None:
    """What a command works on: a workspace, or a kernel beside a reference."""
    target.add_argument("--workspace", type=Path, help="a workspace made by reference/workspace_init.sh")
    target.add_argument("--kernel", type=Path, help="instead of a workspace: file with ModelNew or kernel_function")
    target.add_argument("--reference", type=Path, help="with --kernel: file with Model and get_inputs")
    target.add_argument("--dtype", help="with --kernel: cast floating inputs to bf16, fp16, fp32 or fp64")


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


def positive_float(text: str) -> float:
    """An argparse type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def natural(text: str) -> int:
    """An argparse type: 0, 1, 2 …"""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def positive_int(text: str) -> int:
    """An argparse type: 1, 2, 3 …"""
    value = natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def say(message: str) -> None:
    """Progress and messages go to stderr; stdout belongs to the result."""
    print(message, file=sys.stderr, flush=True)


def emit(result: dict, as_json: bool, lines: list[str]) -> None:
    """Print the result: one JSON object, or `lines` for people."""
    print(bundle.dumps(result).rstrip() if as_json else "\n".join(lines))


def continue_in_bundle_environment() -> None:
    """If this interpreter lacks a package that `.venv` (scripts/setup.sh) has, go on there."""
    python = bundle.ROOT / ".venv" / "bin" / "python"
    lacking = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking and python.exists() and Path(sys.prefix).resolve() != python.parents[1].resolve():
        os.execv(python, [str(python), *sys.argv])


def run(main: Callable[[], int]) -> None:
    """Run a tool's `main` and leave with its exit code; errors become one sentence on stderr."""
    name = Path(sys.argv[0]).name
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children and scratch files are cleaned up
    try:
        if not {"-h", "--help"} & set(sys.argv[1:]):
            continue_in_bundle_environment()
        code = main()
    except ToolError as error:
        say(f"{name}: {error}")
        code = error.exit_code
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        say(
            f"{name}: {error.strerror or error}: {error.filename or 'input or output'}; check disk space and permissions"
        )
        code = 3
    except Exception as error:  # a defect of ours: say so in a sentence, keep the traceback for who asks
        if os.environ.get("KERNELOPT_DEBUG"):
            import traceback

            traceback.print_exc()
        say(f"{name}: defect in this tool, {type(error).__name__}: {error}; KERNELOPT_DEBUG=1 shows where")
        code = 70
    sys.exit(code)
