"""4.2: fast_kernel.py reached 4.80x (4.80 to 4.81) on an H200. Each load of four bytes fetched a sector of 32, and
the seven neighbours' programs had to find the rest in the L2."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=4.2)
