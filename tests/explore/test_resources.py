"""The resources of a candidate's compiled code, of which cuobjdump has those of CUDA C++."""

import pytest
from conftest import FIXTURES
from kernelopt.device import programs
from kernelopt.disassembly import listing_files
from kernelopt.explore.resources import CompiledCall, spill_bytes


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A stand-in for cuobjdump, which prints a recorded listing with a stack for one target; it refuses broken.so."""
    text = (FIXTURES / "disassembly" / "scale.so.sass.txt").read_text()
    printed = tmp_path / "printed.txt"
    printed.write_text(text.replace("STACK:0 SHARED:0 LOCAL:0", "STACK:24 SHARED:0 LOCAL:8", 1))
    program = tmp_path / "cuobjdump"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *broken*) echo "cuobjdump fatal   : Invalid fatbin header" >&2; exit 255;;\n'
        f"  *endless*) exec sleep 60;; '-res-usage '*.so) cat {printed};; *) exit 9;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(programs, "find", lambda _: str(program))
    return program


def spilled(folder, *names: str, triton: tuple[int | None, ...] = ()) -> int | None:
    return spill_bytes(CompiledCall(triton, tuple(folder / name for name in names), ""))


def test_the_local_memory_of_an_extension_is_the_most_of_any_kernel_and_target(tmp_path, stand_in):
    assert spilled(tmp_path, "scale.so") == 32
    assert spilled(tmp_path, "scale.so", triton=(9, None)) == 36 and spilled(tmp_path, triton=(None,)) is None


def test_an_extension_that_cuobjdump_does_not_read_says_nothing(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(listing_files, "USAGE_S", 0.2)
    assert spilled(tmp_path, "broken.so") is None and spilled(tmp_path, "endless.so") is None
    assert spilled(tmp_path, "broken.so", "scale.so") == 32
    monkeypatch.setattr(programs, "find", lambda _: None)
    assert spilled(tmp_path, "scale.so") is None and spilled(tmp_path, "scale.so", triton=(2,)) == 8
