"""1.6: kernel.py moves 6 matrices' worth of bytes (3 + 1 + 2) where 3 suffice, so twice the speed is the floor's."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=1.6)
