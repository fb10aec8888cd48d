"""What is read of a child's output."""

import pytest
from kernelopt.device import pipes
from kernelopt.profilers import ncu


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("first\nlast \n\n  \n", "last"),
        (b"first\n\xff last\n", "\ufffd last"),
        ("", "it left no message"),
        (b"\n \n", "it left no message"),
    ],
)
def test_the_last_line_of_a_log_is_the_last_that_says_something(log, said):
    assert pipes.last_line(log) == said


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("==PROF== Connected\n==ERROR== no kernel\nthe program's own line\n", "==ERROR== no kernel"),
        ("the program's own line\n\n", "the program's own line"),
        ("", "it left no message"),
    ],
)
def test_of_ncu_its_own_last_message_goes_first(log, said):
    assert ncu.last_message(log) == said
