"""Tasks that a test writes down: a kernel and a reference, each the text of a file, judged on the CPU."""

from pathlib import Path

from kernelopt.measure import verify
from kernelopt.session.subject import KernelUnderTest

HEAD = "import torch\nimport torch.nn as nn\n"


def judge(interpreter, folder: Path, reference: str, kernel: str, seeds: int = 2, **options) -> dict:
    """The verdict on the kernel as JSON."""
    files = written(folder, reference, kernel)
    return verify.verify(interpreter, KernelUnderTest(*files, **options), seeds=seeds).to_json()


def written(folder: Path, reference: str, kernel: str) -> tuple[Path, Path]:
    """(kernel's file, reference's file)."""
    files = folder / "kernel_file.py", folder / "reference_file.py"
    for file, text in zip(files, (kernel, reference), strict=True):
        file.write_text(HEAD + text)
    return files
