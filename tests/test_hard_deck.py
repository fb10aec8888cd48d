"""The problems of the hard deck: what their sessions start from, and the deck's own formulas."""

import ast
import ctypes
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sysconfig

import forks_with_torch
import pytest
from conftest import BUNDLE, STAND_INS, compiled_for_hopper, early_arrivals, made_once, tool_json
from kernelopt.device import programs

DECK = BUNDLE / "benchmarks" / "hard_deck"
BLOCK_SCALES = DECK / "fp8_block_product" / "candidates"
COMMON_KERNELS = {"product_kernel", "few_rows_kernel", "realign_kernel"}  # of halves and wide
KEEP_MAPS = ["fp8_product/candidates/tma", "fp8_block_product/candidates/tma", "moe_up/candidates/roles"]
PROBLEMS = sorted(path.parent for path in DECK.glob("*/about.json"))


@pytest.fixture(scope="module")
def session() -> dict:
    return runpy.run_path(str(DECK / "session.py"))


@pytest.mark.parametrize("folder", PROBLEMS, ids=lambda folder: folder.name)
def test_a_problem_has_what_its_session_takes(session, folder):
    problem = session["Problem"].read(folder.name)
    assert problem.framework in ("triton", "cuda") and problem.notes and 10 <= problem.explore_seconds <= 120
    assert 0 < problem.share_pct <= 100
    files = [folder / "reference.py", folder / "v0.py", *problem.files("candidates"), *problem.files("opponents")]
    assert problem.files("candidates") and problem.files("opponents")
    for file in files:
        names = {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")}
        assert names & ({"Model"} if file.name == "reference.py" else {"kernel_function", "ModelNew"}), file
    plan = (folder / "v1_plan.md").read_text()
    assert "explore/e1.json#NAME" in plan and "RATIO" in plan and (folder / "README.md").exists()


def test_the_leader_is_the_first_right_candidate(session):
    rows = [
        {"name": "library", "status": "OK", "opponent": True, "against_best": None},
        {"name": "wrong", "status": "WRONG_VALUES", "opponent": False, "against_best": None},
        {"name": "a[B=64]", "status": "OK", "opponent": False, "against_best": {"point": 1.5}, "dropped": False},
        {"name": "a", "status": "OK", "opponent": False, "against_best": {"point": 1.4}, "dropped": True},
    ]
    assert session["leader"](rows) == ("a[B=64]", "1.50x")
    assert session["leader"]([{**rows[2], "against_best": None}]) == ("a[B=64]", "an unknown multiple")
    level = [*rows[:3], {**rows[3], "dropped": False}]
    assert session["leader"](level) == ("a", "1.40x")  # its own constants
    with pytest.raises(SystemExit, match="no candidate of the exploration is right"):
        session["leader"](rows[:2])


@pytest.mark.parametrize(("rejected", "last"), [("v1", "report"), ("v0", "gate v0")])
def test_a_session_goes_on_after_a_refused_v1_alone(session, monkeypatch, tmp_path, rejected, last):
    """Stand-ins for the tools, which need a GPU."""
    run = session["Session"](session["Problem"](DECK, "triton", "-", 45, 90), tmp_path)
    run.workspace.mkdir()

    def tool(command):
        wrong = command[1].endswith("run_gate.py") and command[-1] == rejected
        return type("Done", (), {"returncode": int(wrong)})

    monkeypatch.setattr(session["subprocess"], "run", tool)
    try:
        run.start("H200")
        run.judge("v0")
        run.judge("v1")
        run.end()
        assert json.loads((run.workspace / "seconds.json").read_text()) == run.seconds
    except SystemExit as ended:
        assert ended.code == 1
    assert list(run.seconds)[-1] == last


def test_the_decks_formulas_and_its_table():
    deck = runpy.run_path(str(BUNDLE / "benchmarks" / "hard_deck" / "score.py"))
    amounts = {name: problem.amount(**problem.shapes[0]) for name, problem in deck["DECK"].items()}
    assert amounts["fp8_product"] == 2 * 4096**3 and amounts["top_k"] == 4 * 131072 + 12 * 64
    assert amounts["w4a16"] == 2 * 4096 + 2048 * 12288 + 4 * 32 * 12288 + 2 * 12288
    assert amounts["paged_decode"] == 8 * 1024 * 8 * 128 * 2 * 2 + 8 * 32 * 128 * 2 * 2
    scores = [deck["Score"]({}, 10.0, (9.0, 11.0), fraction, 5.0) for fraction in (0.1, 0.4)]
    row = "| 02 kda | 10.0, 10.0 | 5.0, 5.0 | 0.100, 0.400 | 0.2000 | 0.4000 | 0.0135 |"
    assert deck["table"]({"kda": scores}).endswith(row)


def test_a_candidate_is_scored_in_place_of_the_example(monkeypatch, tmp_path):
    """A stand-in for the clock."""
    pytest.importorskip("torch")
    deck = runpy.run_path(str(DECK / "score.py"))
    candidate = tmp_path / "candidate.py"
    candidate.write_text("def kernel_function(x, k): return 'of the candidate'")
    seen = []

    def times_us(call, inputs, calls, held_cycles):
        seen.append(call(*inputs))
        return [20.0 - 10 * bool(held_cycles)] * 5

    monkeypatch.setitem(deck["measured"].__globals__, "times_us", times_us)
    monkeypatch.setitem(deck["measured"].__globals__, "DEVICE", "cpu")
    page = deck["wiki"].product("H100 SXM")
    scores = deck["measured"](deck["DECK"]["top_k"], BUNDLE / "examples" / "top_k", candidate, page)
    assert len(scores) == 5 and set(seen) == {"of the candidate"}
    assert scores[0].fraction_ahead == 2 * scores[0].peak_fraction


def test_the_decks_clock_counts_the_host_unless_the_stream_is_held(monkeypatch):
    """A stand-in for CUDA: work begins when it is launched, or when the work before it ends."""
    torch = pytest.importorskip("torch")
    clock = {"host": 0.0, "stream": 0.0}

    def launch(microseconds, host=2.0):
        clock["host"] += host
        clock["stream"] = max(clock["stream"], clock["host"]) + microseconds

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            launch(0, host=0)
            self.at = clock["stream"]

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    flushed = type("Buffer", (), {"zero_": lambda self: launch(50)})
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flushed())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: launch(cycles / 2000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.update(host=max(clock.values())))
    times_us = runpy.run_path(str(DECK / "score.py"))["times_us"]

    def call():
        launch(10, host=40)
        launch(5, host=40)

    assert times_us(call, [], 3) == pytest.approx([85] * 3)
    assert times_us(call, [], 3, 2_000_000) == pytest.approx([15] * 3)


def test_candidates_are_right_in_the_interpreter_with_what_their_first_call_left_behind(tmp_path):
    pytest.importorskip("triton.tools.tensor_descriptor")  # Triton 3.4
    """A descriptor that is used again must describe the tensor of the second call."""
    code = f"import runpy; runpy.run_path({str(BUNDLE / 'tests' / 'hard_deck_kernels.py')!r}, run_name='__main__')"
    done = forks_with_torch.run(code, DECK, tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def compiled(shared_folder):
    """A folder for Triton's cache, which all workers have in common: its own launcher is compiled once."""
    folder = shared_folder / "lean_launches"
    folder.mkdir(exist_ok=True)
    return folder


def on_a_stand_in_for_cuda(test):
    """Marks a test whose launches go to one."""
    real = runpy.run_path(str(BUNDLE / "benchmarks" / "stand_in_cuda.py"))["real_driver"]()
    test = pytest.mark.skipif(real, reason="torch loads the CUDA driver of this machine, not its stand-in")(test)
    return pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in for the CUDA driver is compiled")(test)


@on_a_stand_in_for_cuda
@pytest.mark.parametrize("candidate", ["fp8_block_product/tma", "fp8_product/tma", "moe_up/roles", "kda/two_products"])
def test_launches_past_tritons_binder_hand_over_what_it_would(candidate, compiled):
    pytest.importorskip("triton.tools.tensor_descriptor")  # Triton 3.4
    if candidate == "moe_up/roles":  # its Gluon
        pytest.importorskip("triton", minversion="3.6")
    script = str(BUNDLE / "tests" / "lean_launches.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    done = forks_with_torch.run(code, DECK, candidate, compiled)
    if done.returncode == 3:
        pytest.skip("this Triton keeps its launcher otherwise: all launches go through its binder")
    assert done.returncode == 0, done.stdout


LAUNCH_COST = f"""
import ctypes, runpy, sys
sys.path.insert(0, {str(BUNDLE / "benchmarks")!r})
if DRIVER: ctypes.CDLL = lambda name: {{"libcuda.so.1": "a driver"}}[name]
runpy.run_path({str(BUNDLE / "benchmarks" / "launch_cost.py")!r}, run_name="__main__")
"""


def test_beside_a_real_driver_launches_are_not_compared():
    done = forks_with_torch.run(f"DRIVER = True\n{LAUNCH_COST}")
    assert done.returncode == 3 and done.stdout.startswith("this machine has NVIDIA's driver"), done.stdout
    assert done.stdout.count("\n") == 1


@on_a_stand_in_for_cuda
def test_what_launches_cost_the_host_is_told_as_ratios(tmp_path):
    pytest.importorskip("triton.tools.tensor_descriptor")  # Triton 3.4
    code = f"DRIVER = False\n{LAUNCH_COST}"
    done = forks_with_torch.run(code, "--rounds", 3, "--calls", 20, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    rows = dict(re.findall(r"^\| ([^|]*\w) \|.*\| (\S+) \| \S+ to", done.stdout, re.M))
    assert "no GPU" in done.stdout and rows["compiled.run, addresses"] == "1.00", done.stdout
    assert float(rows["kernel[grid], 3 new descriptors"]) > 3 * float(rows["launcher, 3 kept tensor maps"]), done.stdout


def test_a_kernel_that_launches_itself_compiles_for_a_gpu_that_is_not_here():
    """Nothing is launched there, and no device is the current one. The command starts its own server of compilations."""
    pytest.importorskip("triton.tools.tensor_descriptor")  # Triton 3.4
    folder = DECK / "fp8_product"
    files = "--kernel", folder / "candidates" / "tma.py", "--reference", folder / "reference.py"
    (target,) = tool_json("compile_kernel.py", *files, "--for", "sm_90")["targets"]
    assert [kernel["name"] for kernel in target["kernels"]] == ["product"]


def test_the_fp8_product_for_hopper_compiles_without_spills_and_with_wgmma_in_flight(compile_here):
    kernels = compiled_for_hopper(compile_here, DECK / "fp8_product" / "candidates" / "cuda.py")
    assert {kernel["name"] for kernel in kernels} == {"product_kernel", "realign_kernel", "few_rows_kernel"}
    for kernel in kernels:
        assert not kernel["stack_bytes"] and "wgmma_serialized" not in kernel["remarks"], kernel
        assert all(".E4M3.E4M3" in name for name in kernel["tensor_instructions"])
        assert bool(kernel["tensor_instructions"]) == (kernel["name"] != "realign_kernel")


def test_the_wide_product_with_block_scales_compiles_without_spills_and_with_wgmma_in_flight(compile_here, tmp_path):
    """A stage is freed behind the loads of its scales: ptxas lets an arrival pass loads whose values the code takes
    later."""
    kernels = compiled_for_hopper(compile_here, BLOCK_SCALES / "wide.py", "--emit", tmp_path)
    assert {kernel["name"] for kernel in kernels} == {"wide_kernel", *COMMON_KERNELS}
    for kernel in kernels:
        assert kernel["stack_bytes"] == kernel["spill_bytes"] == 0, kernel
        assert "wgmma_serialized" not in kernel["remarks"], kernel
        assert all(".E4M3.E4M3" in name for name in kernel["tensor_instructions"])
        assert bool(kernel["tensor_instructions"]) == (kernel["name"] != "realign_kernel")
    assert early_arrivals(tmp_path / "sm_90a" / "wide_kernel.cubin") == []  # a file has all kernels


def test_the_wide_product_with_block_scales_keeps_the_kernels_of_halves():
    texts = [(BLOCK_SCALES / f"{name}.py").read_text() for name in ("halves", "wide")]
    for kernel in COMMON_KERNELS:
        begins = [text.index(f" {kernel}(const") for text in texts]
        former, present = (text[begin : text.index("\n}\n", begin)] for text, begin in zip(texts, begins, strict=True))
        assert former == present, kernel


def test_candidates_that_keep_tensor_maps_do_it_alike():
    def launcher(name):
        text = (DECK / name).read_text()
        return text[text.index("class Launches") : text.index("return bool(getattr(hook")]

    alike = {launcher(f"{name}.py") for name in KEEP_MAPS}
    assert len(alike) == 1


@pytest.fixture(scope="module")
def cuda_runtime(shared_folder):
    """A stand-in for CUDA's runtime, which notes launches; and what builds a candidate's extension on it, by name, once
    for all workers."""
    if programs.find("nvcc") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvcc and gcc")
    if pytest.importorskip("torch").version.cuda:
        pytest.skip("this torch has CUDA's own runtime in the process")
    command = ["gcc", "-w", "-shared", "-fPIC", STAND_INS / "cudart.c", "-o"]
    library = made_once(shared_folder / "libcudart_stand_in.so", lambda to: subprocess.run([*command, to], check=True))
    runtime = ctypes.CDLL(str(library))

    def built(candidate: dict, name: str, constants: list[str]):
        source = made_once(shared_folder / f"{name}.cu", lambda to: to.write_text(candidate["CUDA"]))
        defined = [f"-D{constant}={candidate[constant]}" for constant in constants] + [f"-DTORCH_EXTENSION_NAME={name}"]
        python, target = f"-I{sysconfig.get_paths()['include']}", "-gencode=arch=compute_90a,code=compute_90a"
        options = ["-std=c++17", "-G", target, "-shared", "-Xcompiler=-fPIC", "-cudart=none", python, *defined]
        command = [programs.find("nvcc"), *options, source, library, "-o"]
        extension = made_once(shared_folder / f"{name}.so", lambda to: subprocess.run([*command, to], check=True))
        spec = importlib.util.spec_from_file_location(name, extension)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return runtime, built


X, W, Y, SCALE_X, SCALE_W, COPIES, STREAM, SCALE_COPIES = (number << 20 for number in range(1, 9))


def test_the_launcher_of_the_fp8_product_hands_over_its_arguments(cuda_runtime):
    runtime, built = cuda_runtime
    run = built(runpy.run_path(str(DECK / "fp8_product/candidates/cluster.py")), "fp8_product", ["STAGES", "GROUP"]).run
    words, grid = (ctypes.c_uint64 * 16).in_dll(runtime, "words"), (ctypes.c_uint * 3).in_dll(runtime, "grid")
    wanted, launched = (ctypes.c_int.in_dll(runtime, name) for name in ("wanted", "launched"))

    def call(rows, columns, depth, copies=0):
        before = launched.value
        assert run(X, W, Y, SCALE_X, SCALE_W, True, copies, rows, columns, depth, STREAM) == 0
        assert ctypes.c_uint64.in_dll(runtime, "stream").value == STREAM
        return launched.value - before

    wanted.value = 8
    assert call(256, 1024, 512) == 1 and grid[0] == 8  # four tiles of 256 x 256, two blocks each
    assert (
        words[:5] == [X, W, Y, SCALE_X, SCALE_W]
        and words[5] & 0xFFFFFFFF == 1
        and words[6] == Y
        and words[7] & 0xFFFFFFFF
    )
    assert call(256, 1023, 512) == 1 and words[2] == X and not words[7] & 0xFFFFFFFF  # y not by TMA
    wanted.value = 2
    assert call(65, 64, 100, COPIES) == 2 and words[:2] == [COPIES, COPIES + 65 * 112]
    wanted.value = 6
    assert call(32, 640, 512) == 1 and grid[0] == 10
    assert words[:4] == [X, W, SCALE_X, SCALE_W] and words[5] == Y


@pytest.fixture(scope="module")
def wide_product(cuda_runtime):
    """A call of wide.py's extension on the stand-in: the launches, the last grid, and the tensor maps as (address,
    columns, rows, pitch)."""
    runtime, built = cuda_runtime
    candidate = runpy.run_path(str(BLOCK_SCALES / "wide.py")) | {"PROBE_": 0}
    run = built(candidate, "fp8_block_wide", ["WIDE_GROUP", "HALVES", "BN", "STAGES", "GROUP", "PROBE_"]).run
    maps = (ctypes.c_uint64 * 256).in_dll(runtime, "maps")
    launched, encoded = (ctypes.c_int.in_dll(runtime, name) for name in ("launched", "encoded"))

    def call(rows, columns, depth, arguments, copies=0, scale_copies=0):
        before, first = launched.value, encoded.value
        ctypes.c_int.in_dll(runtime, "wanted").value = arguments
        assert run(X, W, Y, SCALE_X, SCALE_W, copies, scale_copies, rows, columns, depth, STREAM) == 0
        assert ctypes.c_uint64.in_dll(runtime, "stream").value == STREAM
        made = [tuple(maps[4 * (at % 64) : 4 * (at % 64) + 4]) for at in range(first, encoded.value)]
        return launched.value - before, (ctypes.c_uint * 3).in_dll(runtime, "grid")[0], made

    return runtime, call


def test_the_launcher_of_the_wide_product_hands_over_its_arguments(wide_product):
    runtime, call = wide_product
    words = (ctypes.c_uint64 * 16).in_dll(runtime, "words")
    x, lines = (X, 4096, 4096, 4096), (W, 4096, 2, 4096)  # pairs of rows of w
    scales = (SCALE_X, 32, 4096, 128), (SCALE_W, 32, 56, 128)
    assert call(4096, 7168, 4096, 7) == (1, 132, [x, lines, *scales])
    assert words[4] == Y and words[5] == 4096 | 7168 << 32 and words[6] & 0xFFFFFFFF == 0x3F800000  # 1.0
    assert call(32, 7168, 4096, 6) == (1, 112, [(X, 4096, 32, 4096), (W, 4096, 7168, 4096)])
    assert words[2:5] == [SCALE_X, SCALE_W, Y]
    copied = [(COPIES, 4128, 1021, 4128), (COPIES + 1021 * 4128, 4128, 7100, 4128)]
    copied += [(SCALE_COPIES, 33, 1021, 144), (SCALE_COPIES + 1021 * 144, 33, 56, 144)]
    assert call(1021, 7100, 4127, 8, COPIES, SCALE_COPIES) == (2, 132, copied)
    assert (ctypes.c_uint * 3).in_dll(runtime, "former_grid")[0] == 1021 + 7100
    assert words[5] == Y and words[6] & 0xFFFFFFFF == 0  # not by TMA


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "blocks", "pairs"),
    [(65, 32, 512, 2, True), (300, 544, 1024, 12, True), (300, 544, 768, 0, False), (300, 560, 1024, 0, False)],
)
def test_the_wide_product_takes_whole_turns_of_k_and_whole_lines_of_columns(
    wide_product, rows, columns, depth, blocks, pairs
):
    launches, grid, maps = wide_product[1](rows, columns, depth, 7 if pairs else 8)
    assert launches == 1 and (maps[1] == (W, depth, 2, depth)) == pairs
    assert grid == (blocks if pairs else 2 * 2 * 3)


# Configurations of its SPACE
SQUARE = {"BM_": 128, "BN_": 256, "CM_": 2, "CN_": 1, "STAGES_": 8, "SLOTS_": 2}
FOUR_BLOCKS = {"CM_": 2}


@pytest.fixture(scope="module")
def hopper_products(cuda_runtime):
    """The stand-in, and the extensions of fp8_product/candidates/cuda.py in three configurations."""
    runtime, built = cuda_runtime
    candidate = runpy.run_path(str(DECK / "fp8_product/candidates/cuda.py"))
    constants = list(candidate["COMPILED"])
    changes = {"fp8_wide": {}, "fp8_square": SQUARE, "fp8_four_blocks": FOUR_BLOCKS}
    return runtime, *(built(candidate | candidate["COMPILED"] | one, name, constants) for name, one in changes.items())


@pytest.mark.parametrize("clusters", [66, 64, 30, 7])
@pytest.mark.parametrize(
    ("rows", "columns"), [(4096, 4096), (4096, 14336), (65, 8), (300, 136), (1000, 3976), (256, 384)]
)
def test_the_tiles_of_the_fp8_product_cover_the_result_once(hopper_products, rows, columns, clusters):
    torch = pytest.importorskip("torch")
    for extension, group in ((0, 16), (0, 3), (1, 2), (2, 16)):
        given = rows, columns, 4096, clusters, group
        tiles = hopper_products[1 + extension].tiles(*given)
        covered = torch.zeros((rows + 511) // 64, (columns + 1023) // 64, dtype=torch.int)  # by 64 x 64
        for _, row, column, height, width in tiles:
            assert row % 64 == column % 64 == 0 and row < rows and column < columns
            covered[row // 64 : (row + height) // 64, column // 64 : (column + width) // 64] += 1
        assert covered.max() == 1 and (covered[: (rows + 63) // 64, : (columns + 63) // 64] == 1).all(), given
        assert {tile[0] for tile in tiles} <= set(range(min(clusters, len(tiles))))  # the clusters that are launched


@pytest.mark.parametrize(("columns", "longest"), [(4096, 2 * 192 + 128), (14336, 28 * 64)])
def test_narrow_tiles_of_the_fp8_product_even_its_last_wave(hopper_products, columns, longest):
    """Columns of 256 rows that a block of a cluster of two computes; 66 clusters, so a mean of 497 and 1738."""
    work = [0] * 66
    for cluster, _, _, height, width in hopper_products[1].tiles(4096, columns, 4096, 66, 16):
        assert height == 256
        work[cluster] += width // 2
    assert max(work) == longest and sum(work) == 16 * columns // 2


def test_the_launcher_of_the_fp8_product_for_hopper_hands_over_its_arguments(hopper_products):
    runtime, extension, square, four_blocks = hopper_products
    words, grid = (ctypes.c_uint64 * 16).in_dll(runtime, "words"), (ctypes.c_uint * 3).in_dll(runtime, "grid")
    wanted, launched = (ctypes.c_int.in_dll(runtime, name) for name in ("wanted", "launched"))

    def call(rows, columns, depth, run=extension.run, copies=0):
        before = launched.value
        assert run(X, W, Y, SCALE_X, SCALE_W, True, copies, rows, columns, depth, 16, 4, STREAM) == 0
        assert ctypes.c_uint64.in_dll(runtime, "stream").value == STREAM
        assert launched.value == before + 1 + bool(copies)
        return grid[0]

    wanted.value = 7
    assert call(256, 1024, 512) == 8  # four narrow tiles of 256 x 256, since there are clusters enough
    assert words[:5] == [X, W, Y, SCALE_X, SCALE_W] and words[5] & 0xFFFFFFFF == 1 and words[6] == 256 | 1024 << 32
    assert call(256, 1024, 512, square.run) == 16 and call(4096, 14336, 4096) == 132
    assert call(4096, 14336, 4096, four_blocks.run) == 4 * 30  # as many clusters as the stand-in says run at once
    assert call(256, 1024, 100, copies=COPIES) == 8 and words[:3] == [COPIES, COPIES + 256 * 112, Y]
    wanted.value = 6
    assert call(32, 640, 512) == 10 and words[:4] == [X, W, SCALE_X, SCALE_W] and words[5] == Y
    assert call(32, 640, 100, copies=COPIES) == 10 and words[:2] == [COPIES, COPIES + 32 * 112]


def test_the_launcher_of_the_product_with_4_bit_weights_hands_over_its_arguments(cuda_runtime):
    runtime, built = cuda_runtime
    candidate = runpy.run_path(str(DECK / "w4a16/candidates/ring.py"))
    run = built({"CUDA": candidate["source"]()[0]}, "w4a16_ring", []).run
    first, grid = (ctypes.c_uint64 * 16).in_dll(runtime, "first"), (ctypes.c_uint * 3).in_dll(runtime, "grid")
    words, wanted = (ctypes.c_uint64 * 16).in_dll(runtime, "words"), ctypes.c_int.in_dll(runtime, "wanted")
    last = (ctypes.c_uint64 * 16).in_dll(runtime, "last")
    wanted.value = 1
    for columns, tiles, split in ((12288, 96, 8), (4096, 64, 2), (144, 3, 2)):
        assert run(X, W, SCALE_X, SCALE_W, Y, 1, columns, 512, STREAM) == 0
        assert first[:5] == [W, X, SCALE_X, SCALE_W, Y] and first[5] == columns | 4 << 32
        assert grid[:2] == [tiles, split]
    assert run(X, W, SCALE_X, SCALE_W, Y, 8, 4096, 512, STREAM) == 0
    assert first[:5] == [W, X, SCALE_X, SCALE_W, Y] and first[5] == 8 | 4096 << 32 and grid[:2] == [64, 1]
    assert ctypes.c_uint64.in_dll(runtime, "stream").value == STREAM
    wanted.value = 3
    for rows, columns, tiles in ((16, 14336, 56), (9, 880, 4), (32, 12288, 64), (17, 400, 3)):
        assert run(X, W, SCALE_X, SCALE_W, Y, rows, columns, 512, STREAM) == 0
        assert words[:3] == [W, X, SCALE_X] and first[:3] == [W, columns, 256]
        assert grid[:2] == [tiles, 2]
        assert last[:5] == [SCALE_X, SCALE_W, Y, rows | columns << 32, 4 | 2 << 32]  # groups, and those of a block
    assert run(X, W, SCALE_X, SCALE_W, Y, 256, 1920, 512, STREAM) == 0
    assert words[:3] == [X, W, SCALE_X] and grid[:2] == [10, 2]


def test_the_launcher_of_kda_hands_over_its_arguments(cuda_runtime):
    runtime, built = cuda_runtime
    candidate = runpy.run_path(str(DECK / "kda/candidates/records.py"))
    run = built({"CUDA": candidate["source"]()[0]}, "kda_records", []).run
    first, grid = (ctypes.c_uint64 * 16).in_dll(runtime, "first"), (ctypes.c_uint * 3).in_dll(runtime, "grid")
    former = (ctypes.c_uint64 * 16).in_dll(runtime, "former")
    former_grid = (ctypes.c_uint * 3).in_dll(runtime, "former_grid")
    launched, wanted = ctypes.c_int.in_dll(runtime, "launched"), ctypes.c_int.in_dll(runtime, "wanted")
    q, k, v, g, beta, records, out = (number << 20 for number in range(11, 18))
    wanted.value = 1

    def call(batch, tokens, heads, is_float, length):
        before = launched.value
        assert run(q, k, v, g, beta, records, out, batch, tokens, heads, is_float, STREAM, length) == 0
        streams = [ctypes.c_uint64.in_dll(runtime, name).value for name in ("former_stream", "stream")]
        assert streams == [STREAM, STREAM] or launched.value == before
        return launched.value - before

    whole = (2, 1024, 8, 4, 0), (5, 2000, 4, 4, 1), (1, 64, 8, 8, 0), (3, 1, 3, 4, 1), (5, 64, 5, 2, 0)
    for batch, tokens, heads, parts, is_float in whole:
        chunks = -(-tokens // 64)
        assert call(batch, tokens, heads, is_float, candidate["length_of"](chunks, batch * heads)) == 2
        assert former_grid[:] == [heads, batch, chunks]  # of fold
        assert former[:8] == [q, k, v, g, beta, records, tokens | heads << 32, chunks | is_float << 32]
        assert grid[:] == [parts, batch * heads, 1]  # of walk
        assert first[:4] == [records, out, tokens | heads << 32, chunks | chunks << 32] and first[4] & 0xFFFFFFFF == 1
    cut = (2, 2048, 8, 8, 4), (1, 4096, 8, 8, 8), (1, 2048, 4, 4, 8), (1, 1660, 5, 5, 6)  # the default, long, thin
    for batch, tokens, heads, length, segments in cut:
        chunks, pairs = -(-tokens // 64), batch * heads
        assert candidate["length_of"](chunks, pairs) == length and call(batch, tokens, heads, 0, length) == 3
        assert former_grid[:] == [2, pairs, segments - 1] and grid[:] == [2, pairs, segments]  # of transfer and walk
        assert former[:6] == first[:6] and former[:3] == [records, out, tokens | heads << 32]
        assert former[3] == chunks | length << 32 and former[4] & 0xFFFFFFFF == segments
        assert former[5] == records + pairs * chunks * 2 * candidate["RECORD"]
    assert call(0, 64, 2, 0, 1) == 0


def test_the_norm_with_a_scale_a_token_refuses_what_it_would_round():
    torch = pytest.importorskip("torch")
    call = runpy.run_path(str(DECK / "add_rms_norm_fp8/candidates/in_registers.py"))["kernel_function"]
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ValueError, match="must be bf16"):
            call(torch.ones(2, 8, dtype=dtype), torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype))


def test_counters_of_paged_decode_are_kept_by_stream_and_never_given_to_a_graph(monkeypatch):
    """Stand-ins for CUDA's answers."""
    torch, captured = pytest.importorskip("torch"), []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda number, dtype, device: zeros(number, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captured))
    counters = runpy.run_path(str(DECK / "paged_decode/candidates/last_block.py"))["counters"]
    kept = counters(0, 7, 10)
    assert counters(0, 7, 10) is kept and counters(0, 7, 5) is kept and counters(0, 8, 10) is not kept
    captured.append("a graph")
    assert counters(0, 7, 10) is not kept and not counters(0, 7, 10).any()
    captured.clear()
    assert counters(0, 7, 10) is kept and len(counters(0, 7, 11)) == 11


def test_the_backward_pass_of_attention_is_that_of_autograd():
    torch = pytest.importorskip("torch")
    task = runpy.run_path(str(DECK / "attention_backward" / "reference.py"))
    task["attention"].__globals__["ROWS"] = 16
    q, k, v, out, lse, dout = (one.double() for one in task["get_inputs"](batch=2, heads=2, length=37, width=8))
    out, lse = task["attention"](q, k, v)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(out, exact.detach())
    expected = torch.autograd.grad(exact, inputs, dout)
    with torch.no_grad():
        torch.testing.assert_close(task["Model"]()(q, k, v, out, lse, dout), expected)


def test_a_product_with_block_scales_is_the_sum_over_its_blocks():
    torch = pytest.importorskip("torch")
    task = runpy.run_path(str(DECK / "fp8_block_product" / "reference.py"))
    x, weight, scale_x, scale_w = (one.double() for one in task["get_inputs"](m=3, n=150, k=270))
    expected = torch.zeros(3, 150, dtype=torch.float64)
    for n in range(150):
        for block in range(3):
            k = slice(128 * block, 128 * block + 128)
            expected[:, n] += x[:, k] @ weight[n, k] * scale_x[:, block] * scale_w[n // 128, block]
    torch.testing.assert_close(task["Model"]()(x, weight, scale_x, scale_w), expected.to(torch.bfloat16))


E4M3, SCALES = "float8_e4m3fn", "float32"
REFUSED = {
    "do not fit together": [
        ((64, 512), (256, 256), (64, 4), (2, 4), E4M3, SCALES),
        ((64, 512), (256, 512), (64, 3), (2, 4), E4M3, SCALES),
        ((64, 512), (257, 512), (64, 4), (2, 4), E4M3, SCALES),
    ],
    "too long": [((64, 128), (2**30, 128), (64, 1), (2**23, 1), E4M3, SCALES)],
    "must be float8_e4m3fn": [
        ((64, 512), (256, 512), (64, 4), (2, 4), "float8_e5m2", SCALES),
        ((64, 512), (256, 512), (64, 4), (2, 4), E4M3, "float64"),
    ],
}


@pytest.mark.parametrize("candidate", ["halves", "wide"])
@pytest.mark.parametrize(("said", "given"), [(said, one) for said, cases in REFUSED.items() for one in cases])
def test_products_with_block_scales_refuse_what_they_cannot_take(candidate, said, given):
    torch = pytest.importorskip("torch")
    *shapes, operands, scales = given
    dtypes = [getattr(torch, name) for name in (operands, operands, scales, scales)]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=said):
        runpy.run_path(str(BLOCK_SCALES / f"{candidate}.py"))["kernel_function"](*inputs)


def test_one_row_by_tl_dot_compiles_with_k_split(tmp_path, monkeypatch):
    """Triton makes a constant of M = 1. The example's v1 raises there, for columns that do not divide by 16."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    product = runpy.run_path(str(DECK / "w4a16/candidates/ring.py"))["unpacked_product"]
    constants = {"M": 1, "BM": 16, "BN": 64, "SPLIT": 4, "STAGES": 2}
    pointers = {"x": "*bf16", "packed": "*u8", "scales": "*bf16", "zeros": "*bf16", "y": "*bf16", "parts": "*fp32"}
    types = pointers | {"arrived": "*i32", "N": "i32", "K": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in product.arg_names}
    source = compiler.ASTSource(product, signature, constants)
    assert compiler.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}).asm["ptx"]
