"""Lines of a text that was made of a file, and of that file."""

import pytest
from kernelopt import source_lines


@pytest.mark.parametrize(
    ("written", "number", "line"),
    [(["b"], 1, None), (["x", "b"], 2, None), (["c", "a", "b"], 3, 5), (["d"], 1, None), (["b"], 2, None)],
)
def test_of_lines_with_the_same_text_the_one_with_the_same_neighbours_is_named(written, number, line):
    assert source_lines.line_of(written, number, ["a", "b", "c", "a", "b", "c"]) == line


def test_messages_on_a_copy_become_those_on_the_file():
    lines = ["SPACE = [", "    {},", "]", "a = 1", "b = 2"]
    said = "copy.py(2): error: b\nmy_copy.py(2), copy.py:1:3: error, copy.py(9)"
    named = "own.py(5): error: b\nmy_copy.py(2), own.py:4:3: error, copy.py(9)"
    assert source_lines.named(said, "copy.py", lines[3:], "own.py", lines) == named
