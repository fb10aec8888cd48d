"""4: eight programs keep eight multiprocessors busy, where the GPUs of the wiki have 40 and more."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=4.0)
