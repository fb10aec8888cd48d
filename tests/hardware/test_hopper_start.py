"""gpu-wiki/docs/frameworks/hopper-start.md: its figures follow from shapes, or come out of ptxas again."""

import re
import runpy
import subprocess

import pytest
from conftest import BUNDLE
from kernelopt.device import programs

PAGE = (BUNDLE / "gpu-wiki/docs/frameworks/hopper-start.md").read_text()
SHARED_BYTES = 232448  # of a block
REGISTERS = """
template <int THREADS> __global__ void __launch_bounds__(THREADS, 1) k(float* x, int n) {
  float a[180];
#pragma unroll
  for (int i = 0; i < 180; i++) a[i] = x[threadIdx.x + i * THREADS];
  for (int t = 0; t < n; t++) {
#pragma unroll
    for (int i = 0; i < 180; i++) a[i] = a[i] * a[(i + 7) % 180] + x[t + i];
  }
#pragma unroll
  for (int i = 0; i < 180; i++) x[threadIdx.x + i * THREADS] = a[i];
}
"""


def test_an_installed_bundle_has_the_kernels_to_start_from():
    needed = runpy.run_path(str(BUNDLE / "scripts/install.py"))["NEEDED"]
    named = re.findall(r"^\| [^|]+ \| `([^`]+\.py)` \|", PAGE.split("## Threads")[0], re.MULTILINE)
    assert len(named) == 37
    for path in named:
        assert path.split("/")[0] in needed and (BUNDLE / path).is_file(), path


def test_the_table_of_tiles_follows_from_their_shapes():
    assert f"{SHARED_BYTES:,} bytes" in PAGE
    rows = re.findall(r"^\| ([\dx ,]+) \| ([\d,]+) \| (\d+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for tiles, stage, stages, left in rows:
        for tile in tiles.split(","):
            height, width = map(int, tile.split("x"))
            a_stage = 2 * 64 * (height + width)
            slots = (height // 64) * (64 * 64 * 2)  # one a 64 rows, at least
            fit = min((SHARED_BYTES - slots) // a_stage, int(stages))
            assert (f"{a_stage:,}", fit) == (stage, int(stages)), tile
            assert f"{SHARED_BYTES - int(stages) * a_stage:,}" == left, tile


@pytest.mark.skipif(programs.find("nvcc") is None, reason="needs nvcc")
def test_ptxas_caps_registers_by_whole_warpgroups(tmp_path):
    caps = {288: 168, 384: 168, 416: 128, 640: 96}
    assert all(
        f"| {text} | {cap} |" in PAGE for text, cap in (("257 to 384", 168), ("385 to 512", 128), ("513 to 640", 96))
    )
    instances = "".join(f"template __global__ void k<{threads}>(float*, int);\n" for threads in caps)
    (tmp_path / "k.cu").write_text(REGISTERS + instances)
    command = [
        programs.find("nvcc"),
        "-cubin",
        "-arch=sm_90a",
        "-Xptxas",
        "-v",
        "-o",
        tmp_path / "k.cubin",
        tmp_path / "k.cu",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"Compiling entry function '_Z1kILi(\d+)E.*?Used (\d+) registers", log, re.DOTALL)
    assert {int(threads): int(registers) for threads, registers in found} == caps
