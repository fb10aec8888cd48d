"""20: fast_kernel.py reached 27.6x (27.6 to 27.6) on an H200 and 23.7x (23.6 to 23.7) on an H100. Eight programs keep
eight of their 132 multiprocessors busy."""

from pathlib import Path

from measuring import faster_and_right


def check(folder: Path, answer: str) -> list[str]:
    return faster_and_right(Path(__file__).parent, folder, target=20.0)
