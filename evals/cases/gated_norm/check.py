"""1.9: fast_kernel.py reached 2.14x (2.13 to 2.14) on an H200. kernel.py moves 6 matrices' worth of bytes (3 + 1 +
2) where 3 suffice."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=1.9)
