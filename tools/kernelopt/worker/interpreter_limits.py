"""Errors that say what Triton's CPU interpreter cannot run, and nothing about the kernel."""

import os
import re
import traceback
from collections.abc import Iterator

from . import compiler_errors

# A sentence of its own: the message that it takes the place of asks for a toolkit, which would not help.
NO_CUDA_CPP = (
    "CUDA C++ cannot run on the CPU: compile_kernel.py compiles it, and a torch stand-in with --allow-libraries tests "
    "the reference and its declarations"
)
# Each found by running such a kernel in the interpreter; the text names what it lacks.
OF_INTERPRETER = (
    (r"inline_asm not supported", "runs no inline PTX"),
    (
        r"`?_(semantic|builder)`? argument must be provided",
        "knows functions of triton.language by that name alone (not after exp = tl.exp), and none of "
        "triton.language.extra",
    ),
    (
        r"'(int|float|bool)' object has no attribute",
        "passes scalar arguments as plain Python numbers, without methods (tl.cast(n, tl.int64) in place of "
        "n.to(tl.int64) runs in both)",
    ),
    (r"mask has unsupported dtype", "takes masks of bool alone"),
    (r"Unsupported data type", "has no atomic operations on 16-bit brain floats and on 8-bit numbers"),
    (r"can only concatenate list", "takes a grid as a tuple, not as a list"),
    (r"'InterpreterBuilder' object has no attribute|in interpreter mode", "does not have this operation"),
)
OF_MACHINE = (
    (r"'HostDriver' object has no attribute|in Triton's interpreter$", "has no GPU to ask, and runs no Gluon"),
    (
        r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|dummy base class"
        r"|requires CUDA support|CUDA driver version is insufficient",
        "has no GPU for CUDA tensors, streams and graphs",
    ),
    (r"CUDA_HOME environment variable is not set", NO_CUDA_CPP),
)
LIBDEVICE = "has no libdevice"


def of(error: BaseException) -> str | None:
    """What the interpreter lacks that this exception followed from; None of any other exception, and on a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    chain = list(compiler_errors.chain(error))
    inside = any(type(one).__name__ == "InterpreterError" or raised_in_interpreter(one) for one in chain)
    text = "\n".join(map(str, chain))
    if inside and "NoneType" in text and any("libdevice" in name for one in chain for name in names_used(one)):
        return LIBDEVICE
    table = (*OF_INTERPRETER, *OF_MACHINE) if inside else OF_MACHINE
    return next((lack for sign, lack in table if re.search(sign, text, re.MULTILINE)), None)


def raised_in_interpreter(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith("triton/runtime/interpreter.py")


def names_used(error: BaseException) -> Iterator[str]:
    """The names that the functions on the way to an exception use, and the modules of what they stand for."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in frame.f_code.co_names:
            yield name
            yield getattr(frame.f_globals.get(name), "__module__", None) or ""
