"""The errors of compilers, whole: of C++ and nvcc through torch's load and load_inline, and of Triton.

A kernel's file may catch such an error and go on; a later error then hides it. So the first one is noted where it
arises, with what the compiler printed.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

from .. import source_lines

ERROR_LINE = re.compile(r"\berror\b[^'\"]*: |: (fatal )?error:|\bfatal +: |: undefined reference to |\bld: (?!warning)")
SUMMARY_LINE = re.compile(r"^\d+ errors? detected")
WARNING_LINE = re.compile(r": (warning|note)\b|^Remark: |^ptxas\S* info |^module\b|^#\w+ = ")  # or Triton's whole IR
NOISE = re.compile(r"^\[\d+/\d+\] |^FAILED: |^ninja: |^(\S*/)?(nvcc|c\+\+|g\+\+|gcc|clang(\+\+)?|ccache) .*-")
CHARACTERS = 2000  # of errors; the first may be longer
FIRST_CHARACTERS = 8000
OUTPUT_BYTES = 1 << 20
NAME = "compiler_output"  # of an exception's attribute
INLINE = re.compile(r"/[^\s\"']*/(?:cuda\.cu|main\.cpp)\b")  # what load_inline wrote
NOTE = re.compile(r"(\bdetected during .*) at line (\d+)$", re.MULTILINE)  # by nvcc, of the same file

_printed: list[str] = []  # by the last compilation that succeeded
_noted: list[str] = []  # the texts of failed compilations, the first one first; emptied by one that succeeds
_passed_over: list[str] = []  # of extensions, that one which succeeded followed
_capturing = threading.Lock()
_kernels: list[Path] = []  # the files whose compilations are watched


def errors_of(output: str) -> str:
    """The errors in a compiler's output, each with the lines below it: no warnings, no commands, no notes of ninja.
    The first is whole; others follow as long as there is room. Output without an error line comes back as it is."""
    blocks = list(_blocks(output))
    if not blocks:
        return output
    text, shown = blocks[0][:FIRST_CHARACTERS], 1
    while shown < len(blocks) and len(text) + len(blocks[shown]) < CHARACTERS:
        text += f"\n{blocks[shown]}"
        shown += 1
    rest = len(blocks) - shown
    return in_kernel(text) + (f"\n({rest} more error{'s' if rest > 1 else ''})" if rest else "")


def in_kernel(text: str) -> str:
    """The errors with lines of load_inline's files named as those of the kernel's file that they come from, where one
    line there is the same. Others name the bare file, whose folder is gone when they are read."""
    for path in dict.fromkeys(INLINE.findall(text)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            written = Path(path).read_text().splitlines()
            if path.endswith(".cu"):
                text = NOTE.sub(rf"\1 of {path}(\2)", text)
            for kernel in _kernels:
                text = source_lines.named(text, path, written, kernel.name, kernel.read_text().splitlines())
        text = text.replace(path, Path(path).name)
    return text


def _blocks(output: str) -> Iterator[str]:
    """Each error with the lines below it; nvcc's count of errors belongs to the last."""
    block: list[str] = []
    inside = False
    for line in output.splitlines():
        if ERROR_LINE.search(line):
            if block:
                yield "\n".join(block)
            block, inside = [line], True
        elif NOISE.search(line) or WARNING_LINE.search(line):
            inside = False
        elif block and line.strip() and (inside or SUMMARY_LINE.search(line)):
            block.append(line)
    if block:
        yield "\n".join(block)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it followed, the newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def noted() -> str | None:
    """The text of the first failed compilation of this process, where none has succeeded since."""
    return _noted[0] if _noted else None


def passed_over() -> str | None:
    """The text of the first extension of this process that failed, where the file went on and built another one."""
    return _passed_over[0] if _passed_over else None


def printed() -> str:
    """What the last compilation that succeeded printed; a compiler may print an error and go on."""
    return "".join(_printed)


def output_of(error: BaseException) -> str:
    """What the compiler printed beside the error that was raised; empty when nothing is known."""
    return getattr(error, NAME, "")


def uses_extensions(kernel: Path) -> bool:
    """Does the file name torch's builder of extensions? To import that takes a fifth of a second."""
    return kernel.is_file() and b"cpp_extension" in kernel.read_bytes()


def watch(kernel: Path) -> None:
    """Note the errors of Triton's compiler and, for a file that names it, of torch's builder of extensions, from here
    on in this process."""
    import triton.compiler

    _kernels.append(kernel)
    _wrap(triton.compiler, "compile")  # what JITFunction imports when it first compiles
    if uses_extensions(kernel):
        import torch.utils.cpp_extension

        _wrap(torch.utils.cpp_extension, "_jit_compile", is_extension=True)  # below load and load_inline
        _tell_output(torch.utils.cpp_extension)


def _tell_output(cpp_extension) -> None:
    """Have torch print what the compiler prints of a build that succeeds, too, which it keeps and drops: ptxas names
    there what costs time. Of a build that fails torch's error has it, as before."""
    build = getattr(cpp_extension, "_run_ninja_build", None)
    if build is None or hasattr(build, "__wrapped__"):
        return

    def run(*arguments, **options):
        done = subprocess.run(*arguments, **options)
        if done.stdout:
            os.write(1, done.stdout if isinstance(done.stdout, bytes) else done.stdout.encode())
        return done

    @functools.wraps(build)
    def told(*arguments, **options):
        cpp_extension.subprocess = SimpleNamespace(**{**vars(subprocess), "run": run})
        try:
            return build(*arguments, **options)
        finally:
            cpp_extension.subprocess = subprocess

    cpp_extension._run_ninja_build = told


def _wrap(module, name: str, is_extension: bool = False) -> None:
    original = getattr(module, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(module, name, noting(original, is_extension))


def noting(compiled: Callable, is_extension: bool = False) -> Callable:
    """The function, which compiles something, with its errors noted. is_extension: what failed is worth telling after
    one that succeeded, while an autotuner of Triton tries and drops many."""

    @functools.wraps(compiled)
    def watched(*arguments, **options):
        with _captured() as output:
            try:
                result = compiled(*arguments, **options)
            except Exception as error:
                setattr(error, NAME, output())
                _noted.append(f"{type(error).__name__}: {error}\n{output()}".strip())
                raise
            _printed[:] = [output()]
        if is_extension:
            _passed_over.extend(_noted)
        _noted.clear()
        return result

    return watched


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Inside the block, what this process and its children print also goes to a function's answer. Where two threads
    compile, the output of the first alone is captured."""
    if not _capturing.acquire(blocking=False):
        yield lambda: ""
        return
    memory = os.memfd_create("output")
    saved = [os.dup(number) for number in (1, 2)]
    try:
        _flush()
        for number in (1, 2):
            os.dup2(memory, number)

        def output() -> str:
            _flush()
            return os.pread(memory, OUTPUT_BYTES, 0).decode("utf-8", "replace")

        yield output
    finally:
        _flush()
        for number, handle in zip((1, 2), saved, strict=True):
            os.dup2(handle, number)
            os.close(handle)
        with contextlib.suppress(OSError):
            os.write(2, os.pread(memory, OUTPUT_BYTES, 0))
        os.close(memory)
        _capturing.release()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
