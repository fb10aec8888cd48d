"""2: each load of four bytes fetches a sector of 32, and the seven neighbours' programs must find the rest in the L2."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=2.0)
