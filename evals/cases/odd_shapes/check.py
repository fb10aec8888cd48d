"""Padding with 0 shows where the columns are no power of two and a whole row is negative: so in narrow matrices."""

from pathlib import Path

from judging import failures, json_object, number


def check(folder: Path, answer: str) -> list[str]:
    review = json_object(folder / "review.json")
    shape = review.get("wrong_for")
    return failures(
        (f"release is false (found {review.get('release')})", review.get("release") is False),
        (f"the result is wrong for wrong_for (found {shape})", is_wrong_for(shape)),
    )


def is_wrong_for(shape) -> bool:
    """Is at least one row all negative, in random normal input, and is the row padded? Half of all rows 1 column
    wide are negative."""
    if not isinstance(shape, list) or len(shape) != 2 or None in map(number, shape):
        return False
    rows, columns = map(int, map(number, shape))
    padded = columns > 0 and columns & (columns - 1) != 0
    return padded and rows * 0.5**columns >= 0.5
