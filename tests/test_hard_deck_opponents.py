"""The opponents of other libraries: what they pass to a library's interface, and what happens without the library.

No library is installed here and no GPU is there: each test has a stand-in for the library, which computes in float64
from what it is given, by the library's documented layout."""

import ast
import itertools
import re
import runpy
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from conftest import BUNDLE

torch = pytest.importorskip("torch")

DECK = BUNDLE / "benchmarks" / "hard_deck"
FP8_NORM = DECK / "add_rms_norm_fp8"
LIBRARY_OF = {
    DECK / "paged_decode/opponents/flashinfer_decode.py": "flashinfer",
    DECK / "paged_decode/opponents/flashinfer_decode_tensor_cores.py": "flashinfer",
    DECK / "paged_decode/opponents/vllm_unified_attention.py": "vllm",
    DECK / "top_k/opponents/flashinfer_top_k.py": "flashinfer",
    DECK / "top_k/opponents/flashinfer_top_k_deterministic.py": "flashinfer",
    DECK / "w4a16/opponents/gemlite_a16w4.py": "gemlite",
    DECK / "w4a16/opponents/marlin_of_vllm.py": "vllm",
    DECK / "cross_entropy_backward/opponents/quack_in_place.py": "quack",
    DECK / "moe_up/opponents/quack_gated.py": "quack",
    FP8_NORM / "opponents/vllm_dynamic_per_token.py": "vllm",
    FP8_NORM / "opponents/flashinfer_and_torch_compile.py": "flashinfer",
}


@pytest.fixture
def opponent(monkeypatch):
    """Runs an opponent's file, with these modules in place of its library's: the file's names."""

    def load(path: str, **modules):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
        return runpy.run_path(str(DECK / path))

    return load


def module(**names) -> ModuleType:
    made = ModuleType("stand_in")
    vars(made).update(names)
    return made


def task(folder: Path) -> dict:
    return runpy.run_path(str(folder / "reference.py"))


def exact(task: dict, inputs: list):
    """What the task's reference returns, in float64."""
    wide = [one.double() if torch.is_tensor(one) and one.is_floating_point() else one for one in inputs]
    return task["Model"]()(*wide)


def close(found, wanted):
    """As far as a reference that computes in fp32 can tell."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# Without the library


def test_each_opponent_that_needs_a_library_is_listed_here():
    ours = ("torch", "liger_kernel", "fla", "triton")  # what the example sessions had
    for path in [*DECK.glob("*/opponents/*.py"), *FP8_NORM.glob("opponents/*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        others = {name.split(".")[0] for name in imported} - {*ours, *sys.stdlib_module_names}
        assert others <= {LIBRARY_OF.get(path)}, path


@pytest.mark.parametrize("path", LIBRARY_OF, ids=lambda path: path.stem)
def test_without_its_library_an_opponent_says_how_to_install_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARY_OF[path], None)
    text = path.read_text()
    assert re.search("on an h[12]00", " ".join(text.lower().split()))
    assert "Written for" in text and "ept between calls" in text
    with pytest.raises(ImportError, match="is not installed in this environment; run: pip install"):
        runpy.run_path(str(path))


def test_an_exploration_goes_on_without_an_opponent_whose_library_is_missing(problem, tmp_path, run_here):
    (tmp_path / "absent.py").write_text("import a_library_that_nobody_has\n")
    (tmp_path / "there.py").write_text(Path(problem["kernel"]).read_text())
    against = ["--against", tmp_path / "absent.py", tmp_path / "there.py"]
    at = ("--reference", problem["reference"], "--device", "cpu-interpreter")
    done = run_here("explore_kernels.py", problem["kernel"], *at, *against)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["absent", "IMPORT_ERROR"] in rows and ["there", "opponent"] in rows and ["candidate", "OK"] in rows


def test_the_comparison_of_examples_goes_on_without_an_opponent_whose_library_is_missing(problem, tmp_path):
    from kernelopt.device.sandbox import Sandbox
    from kernelopt.measure import timing

    benchmark = runpy.run_path(str(BUNDLE / "benchmarks" / "run_examples.py"))
    (tmp_path / "absent.py").write_text("import a_library_that_nobody_has\n")
    kernel, reference = (Path(problem[name]) for name in ("kernel", "reference"))
    rows: dict[str, dict] = {"default": {}}
    with Sandbox("cpu-interpreter", tmp_path) as sandbox:
        cases = timing.inputs(sandbox, reference, None, ["default"], 60)
        for name, path in {"absent": tmp_path / "absent.py", "there": kernel}.items():
            benchmark["time_against"](sandbox, kernel, name, path, cases, rows, 60)
    against = rows["default"]["against"]
    assert "a_library_that_nobody_has" in against["absent"]["error"] and against["there"]["us"] > 0


# Paged decode


class Wrapper:
    """Stands in for flashinfer.BatchDecodeWithPagedKVCacheWrapper: the same interface, in float64."""

    made: ClassVar[list["Wrapper"]] = []

    def __init__(self, workspace, layout, use_tensor_cores):
        assert workspace.dtype == torch.uint8 and len(workspace) == 128 << 20 and not workspace.any()
        assert layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        Wrapper.made.append(self)

    def plan(self, indptr, indices, last, heads, kv_heads, width, page, q_data_type, kv_data_type):
        assert {one.dtype for one in (indptr, indices, last)} == {torch.int32}
        assert q_data_type == kv_data_type == torch.bfloat16
        self.indptr, self.indices, self.last, self.sizes = indptr, indices, last, (heads, kv_heads, width, page)

    def run(self, query, cache):
        heads, kv_heads, width, page = self.sizes
        keys, values = cache
        assert keys.shape[1:] == values.shape[1:] == (page, kv_heads, width) and query.shape[1:] == (heads, width)
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        out = torch.zeros(query.shape, dtype=torch.float64)
        for request, (first, end) in enumerate(zip(self.indptr[:-1], self.indptr[1:], strict=True)):
            pages = self.indices[first:end].long()
            count = max(len(pages) - 1, 0) * page + int(self.last[request])
            assert (1 <= self.last[request] <= page) if len(pages) else self.last[request] == 0
            if count:
                out[request] = attention(query[request], *(one[pages].flatten(0, 1)[:count] for one in cache))
        return out


def attention(query, keys, values):
    """Of one request: query is heads x width, keys and values tokens x kv heads x width."""
    grouped = query.double().unflatten(0, (keys.shape[1], -1))
    weights = torch.softmax(torch.einsum("hgd,thd->hgt", grouped, keys.double()) * query.shape[1] ** -0.5, -1)
    return torch.einsum("hgt,thd->hgd", weights, values.double()).flatten(0, 1)


SIZES = {"requests": 3, "kv_heads": 2, "group": 4, "width": 64}
PAGED = {"full": {"longest": 64}, "odd": {"longest": 43}, "uneven": {"longest": 100, "uneven": 4}}


@pytest.mark.parametrize("sizes", PAGED.values(), ids=PAGED)
@pytest.mark.parametrize("name", ["flashinfer_decode", "flashinfer_decode_tensor_cores"])
def test_flashinfer_gets_the_pages_of_each_request(opponent, name, sizes):
    library = module(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    found, paged = opponent(f"paged_decode/opponents/{name}.py", flashinfer=library), task(DECK / "paged_decode")
    inputs = paged["get_inputs"](**SIZES, **sizes)
    close(found["kernel_function"](*inputs), exact(paged, inputs))
    assert Wrapper.made[-1].use_tensor_cores == name.endswith("tensor_cores")


def test_a_plan_is_kept_for_the_memory_of_its_table_alone(opponent):
    library, paged = module(BatchDecodeWithPagedKVCacheWrapper=Wrapper), task(DECK / "paged_decode")
    found = opponent("paged_decode/opponents/flashinfer_decode.py", flashinfer=library)
    kernel = found["kernel_function"]
    inputs, before = paged["get_inputs"](**SIZES, longest=64), len(Wrapper.made)
    for _ in range(2):
        kernel(*(one.detach() for one in inputs))  # the harness passes a new alias in each call
    assert len(Wrapper.made) == before + 1
    *_, table, lengths = inputs
    table.copy_(table.flip(0))  # other pages in the same memory: read anew
    close(kernel(*inputs), exact(paged, inputs))
    lengths[1] = 5
    found["forget"]()
    close(kernel(*inputs), exact(paged, inputs))
    assert len(Wrapper.made) == before + 2


def test_no_plan_is_kept_for_memory_that_was_freed(opponent):
    """The allocator gives it out again, for other lengths."""
    library, paged = module(BatchDecodeWithPagedKVCacheWrapper=Wrapper), task(DECK / "paged_decode")
    kernel = opponent("paged_decode/opponents/flashinfer_decode.py", flashinfer=library)["kernel_function"]
    query, cache, table, lengths = paged["get_inputs"](**SIZES, longest=100, uneven=4)
    place = bytearray(4 * lengths.numel())
    for count in (100, 50):
        lengths = torch.frombuffer(place, dtype=torch.int32)  # each time a storage of its own, at the same address
        lengths.copy_(torch.tensor([count, 0, 20]))
        close(kernel(query, cache, table, lengths), exact(paged, [query, cache, table, lengths]))
        del lengths


@pytest.mark.parametrize("sizes", PAGED.values(), ids=PAGED)
def test_vllm_gets_the_cache_and_table_as_its_backend_passes_them(opponent, sizes):
    def unified_attention(q, k, v, out, block_table, seqused_k, cu_seqlens_q, softmax_scale, **others):
        assert others["max_seqlen_q"] == 1 and others["causal"] is True and others["window_size"] == (-1, -1)
        assert others["seq_threshold_3D"] == 64 and others["num_par_softmax_segments"] == 16
        assert others["softmax_segm_output"].shape == (*q.shape[:2], 16, q.shape[2])
        assert others["softmax_segm_max"].shape == others["softmax_segm_expsum"].shape == (*q.shape[:2], 16)
        assert softmax_scale == q.shape[2] ** -0.5 and cu_seqlens_q.tolist() == list(range(len(q) + 1))
        assert block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
        assert others["max_seqlen_k"] >= seqused_k.max() and k.stride(-1) == v.stride(-1) == 1
        for request, count in enumerate(seqused_k.tolist()):
            if count:  # it writes nothing where there are no tokens
                pages = block_table[request].long()
                out[request] = attention(q[request], *(one[pages].flatten(0, 1)[:count] for one in (k, v)))

    kernels = module(unified_attention=unified_attention)
    found = opponent(
        "paged_decode/opponents/vllm_unified_attention.py",
        **{"vllm__v1__attention__ops__triton_unified_attention": kernels},
    )
    paged = task(DECK / "paged_decode")
    inputs = paged["get_inputs"](**SIZES, **sizes)
    torch.testing.assert_close(found["kernel_function"](*inputs), exact(paged, inputs).bfloat16())


# Top-k


@pytest.mark.parametrize("deterministic", [False, True])
def test_flashinfers_top_k_is_asked_for_sorted_values(opponent, deterministic):
    def top_k(x, k, sorted=False, deterministic=False):
        assert sorted
        asked.append(deterministic)
        return torch.topk(x, k)

    asked: list[bool] = []
    name = "flashinfer_top_k_deterministic" if deterministic else "flashinfer_top_k"
    found = opponent(f"top_k/opponents/{name}.py", flashinfer=module(top_k=top_k))
    x = torch.randn(3, 50)
    torch.testing.assert_close(found["kernel_function"](x, 4), tuple(torch.topk(x, 4)))
    assert asked == [deterministic]


# 4-bit weights


def four_bits() -> tuple[dict, list]:
    w4a16 = task(DECK / "w4a16")
    return w4a16, w4a16["get_inputs"](m=3, n=128, k=256)


class A16W4:
    """Stands in for gemlite.helper.A16W4_HQQ_INT, in float64."""

    made: ClassVar[list[torch.Tensor]] = []

    def __init__(self, device, dtype):
        assert (device, dtype) == ("cpu", torch.bfloat16)

    def from_weights(self, W_q, scales, zeros):  # noqa: N803
        assert W_q.dtype == torch.uint8 and W_q.is_contiguous() and scales.is_contiguous()
        assert len(W_q) == len(scales) == len(zeros)
        A16W4.made.append(W_q)
        group = W_q.numel() // scales.numel()
        scales, zeros = (one.double().repeat_interleave(group, 1) for one in (scales, zeros))
        return lambda x: x.double() @ ((W_q - zeros) * scales).t()


GEMLITE = {"gemlite": module(), "gemlite__helper": module(A16W4_HQQ_INT=A16W4)}


def test_gemlite_gets_a_byte_a_weight_and_its_groups_by_rows(opponent):
    w4a16, inputs = four_bits()
    found, before = opponent("w4a16/opponents/gemlite_a16w4.py", **GEMLITE), len(A16W4.made)
    for _ in range(2):
        torch.testing.assert_close(found["kernel_function"](*inputs), exact(w4a16, inputs))
    assert len(A16W4.made) == before + 1
    inputs[1].copy_(inputs[1].flip(0))
    found["forget"]()
    torch.testing.assert_close(found["kernel_function"](*inputs), exact(w4a16, inputs))


class Marlin:
    """Stands in for vLLM's operators, in float64. It takes apart what Marlin reads: of 64 columns of scales Marlin's
    thread t holds those of t // 8 in each of eight tiles; zero points lie so too, eight in a word, the even ones of
    them first."""

    def gptq_marlin_repack(self, words, depth, columns, bits, eight_bits_of_x):
        assert (
            words.dtype == torch.int32
            and words.shape == (depth // 8, columns)
            and (bits, eight_bits_of_x) == (4, False)
        )
        return words

    def marlin_gemm(self, x, out, words, bias, scales, of_x, overall, points, locks, kind, *rest):
        rows, columns, depth, atomic, sums_in_fp32, float_points = rest
        assert columns == words.shape[1]
        assert (out, bias, of_x, overall) == (None,) * 4 and (atomic, sums_in_fp32, float_points) == (
            False,
            True,
            False,
        )
        assert (rows, depth) == x.shape and kind == 4 << 8 | 1 << 50
        assert locks.dtype == torch.int32 and not locks.any() and len(locks) == 4 * 132
        values = torch.stack([words >> 4 * place & 15 for place in range(8)], 1).flatten(0, 1)
        unpacked = torch.stack([points >> 4 * place & 15 for place in range(8)], -1)
        in_order = torch.empty_like(unpacked)
        in_order[..., [0, 2, 4, 6, 1, 3, 5, 7]] = unpacked
        zeros, scales = self.by_column(in_order.flatten(-2)), self.by_column(scales)
        wide = [one.double().repeat_interleave(128, 0) for one in (zeros, scales)]
        return x.double() @ ((values - wide[0]) * wide[1])

    @staticmethod
    def by_column(permuted):
        return permuted.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3)


@pytest.fixture
def vllm_operators(monkeypatch, tmp_path):
    """A package named vllm whose library of operators is a stand-in."""

    def use(operators):
        (tmp_path / "vllm").mkdir()
        for name in ("__init__.py", "_C_stable_libtorch.abi3.so"):
            (tmp_path / "vllm" / name).write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        monkeypatch.setattr(torch.ops, "load_library", loaded.append)
        monkeypatch.setattr(torch.ops, "_C", operators, raising=False)
        return loaded

    loaded: list[str] = []
    return use


@pytest.fixture
def marlin(vllm_operators, monkeypatch):
    """Marlin's stand-in in its place: the libraries that are loaded."""
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return vllm_operators(Marlin())


def test_marlin_gets_weights_scales_and_zero_points_in_its_order(opponent, marlin):
    found = opponent("w4a16/opponents/marlin_of_vllm.py")
    assert [Path(path).name for path in marlin] == ["_C_stable_libtorch.abi3.so"] and "vllm" not in sys.modules
    w4a16, inputs = four_bits()
    for _ in range(2):
        torch.testing.assert_close(found["kernel_function"](*inputs), exact(w4a16, inputs))
        inputs[1].copy_(inputs[1].flip(0))
        found["forget"]()


def test_an_opponent_that_keeps_things_is_checked_in_a_form_that_keeps_nothing(opponent, marlin, tmp_path):
    """verify_kernel.py writes other contents into the same memory."""
    command = re.search(r"`(\(cat FILE; .*) > ANEW.py`", (DECK / "README.md").read_text())[1]
    decode, problems = module(BatchDecodeWithPagedKVCacheWrapper=Wrapper), {}
    for name, sizes in {"w4a16": {"m": 3, "n": 128, "k": 256}, "paged_decode": {**SIZES, **PAGED["uneven"]}}.items():
        theirs = task(DECK / name)
        problems[name] = theirs, theirs["get_inputs"](**sizes)
    problems["moe_up"] = few_experts(uneven=True)
    keeping = [path for path in LIBRARY_OF if "def forget" in path.read_text()]
    assert len(keeping) == 5
    for path in keeping:
        anew = tmp_path / "anew.py"
        anew.write_text(subprocess.check_output(["bash", "-c", command.replace("FILE", str(path))], text=True))
        kernel = opponent(anew, flashinfer=decode, **GEMLITE, **QUACK)["kernel_function"]
        theirs, inputs = problems[path.parts[-3]]
        for _ in range(2):
            found = kernel(*inputs)
            close(found, exact(theirs, inputs).to(found.dtype))
            for one in inputs[:3] if path.stem == "quack_gated" else inputs:  # its offsets must rise
                one.copy_(one.flip(0))


# fp8


def add_rms_norm(x, residual, weight, epsilon):
    """(the sum, its norm), in float64."""
    added = (residual + x).double()
    return added, added * torch.rsqrt(added.square().mean(-1, keepdim=True) + epsilon) * weight.double()


def fp8_norm_agrees(kernel_function):
    fp8_norm = task(FP8_NORM)
    x, residual, weight = fp8_norm["get_inputs"](tokens=5, hidden=64)
    theirs, ours = residual.clone(), residual.clone()
    before = x.clone()
    values, scales = kernel_function(x, theirs, weight)
    wanted_values, wanted_scales = fp8_norm["Model"]()(x, ours, weight)
    assert torch.equal(x, before) and torch.equal(theirs, ours)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.shape == (5, 1)
    torch.testing.assert_close(scales, wanted_scales, rtol=0.01, atol=0)
    torch.testing.assert_close(values.float() * scales, wanted_values.float() * wanted_scales, rtol=0.13, atol=0.01)


def test_vllms_norm_fills_values_scales_and_the_residual(opponent, vllm_operators):
    def rms_norm_dynamic_per_token_quant(out, x, weight, scales, epsilon, largest_scale, residual):
        assert largest_scale is None
        added, normed = add_rms_norm(x, residual, weight, epsilon)
        residual.copy_(added)
        scales.copy_(normed.abs().amax(-1, keepdim=True) / 448)
        out.copy_(normed / scales)

    operators = SimpleNamespace(rms_norm_dynamic_per_token_quant=rms_norm_dynamic_per_token_quant)
    vllm_operators(operators)
    fp8_norm_agrees(opponent(FP8_NORM / "opponents/vllm_dynamic_per_token.py")["kernel_function"])


def test_flashinfers_norm_gets_a_copy_of_x(opponent, monkeypatch):
    def fused_add_rmsnorm(x, residual, weight, epsilon):
        added, normed = add_rms_norm(x, residual, weight, epsilon)
        residual.copy_(added)
        x.copy_(normed)

    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM", raising=False)
    library = module(fused_add_rmsnorm=fused_add_rmsnorm)
    found = opponent(FP8_NORM / "opponents/flashinfer_and_torch_compile.py", flashinfer=library)
    fp8_norm_agrees(found["kernel_function"])


# Experts


class Tuner:
    """Stands in for quack.autotuner.Autotuner: the last configuration is the quickest."""

    def __init__(self, fn, key, configs):
        assert key == []
        self.fn, self.best_config = fn, configs[-1]

    def __call__(self, *arguments, **others):
        tuned.append(self.best_config)
        self.fn(*arguments, **others, config=self.best_config.kwargs["config"])


def gated_product(x, weight, before, y, cu_seqlens_m, config):
    """Stands in for quack.gemm_interface.gemm_gated_tuned.fn, in float64: of two columns the first is the gate's."""
    assert before is None and weight.mT.is_contiguous() and cu_seqlens_m.dtype == torch.int32
    assert config is tuned[-1].kwargs["config"]
    for expert, (first, last) in enumerate(itertools.pairwise(cu_seqlens_m.tolist())):
        sums = x[first:last].double() @ weight[expert].double()
        y[first:last] = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]


def configuration(card, tile_m, tile_n, cluster_m, cluster_n, pingpong):
    names = ("device_capacity", "tile_m", "tile_n", "cluster_m", "cluster_n", "pingpong")
    values = (card, tile_m, tile_n, cluster_m, cluster_n, pingpong)
    return SimpleNamespace(kwargs={"config": SimpleNamespace(**dict(zip(names, values, strict=True)))})


TILES = [(256, 128), (256, 160), (256, 192), (128, 224), (128, 256)]
PINGPONG = [(128, 128), (128, 160), (128, 192), (192, 128)]
CONFIGURATIONS = [  # as QuACK 0.4.1 lists them for 9.0, and others beside them
    configuration(card, *tile, *cluster, pingpong)
    for card in (9, 10)
    for pingpong, tiles in ((False, TILES), (True, PINGPONG))
    for tile in tiles
    for cluster in ((1, 2), (2, 1))
]
tuned: list[SimpleNamespace] = []
QUACK = {
    "quack": module(),
    "quack__autotuner": module(Autotuner=Tuner),
    "quack__gemm_interface": module(gemm_gated_tuned=SimpleNamespace(fn=gated_product, configs=CONFIGURATIONS)),
}


def few_experts(uneven):
    """(task, inputs): small, with results far from zero."""
    moe = task(DECK / "moe_up")
    inputs = moe["get_inputs"](tokens=20, hidden=16, inner=8, experts=3, chosen=2, uneven=uneven)
    inputs[0] *= 1000
    return moe, inputs


@pytest.mark.parametrize("uneven", [False, True])
def test_quack_gets_the_columns_of_gate_and_up_in_turn(opponent, uneven):
    moe, inputs = few_experts(uneven)
    found, before = opponent("moe_up/opponents/quack_gated.py", **QUACK), len(tuned)
    for _ in range(2):
        torch.testing.assert_close(found["kernel_function"](*inputs), exact(moe, inputs).bfloat16())
    assert len(tuned) == before + 1
    for one in inputs[:3]:
        one.copy_(one.flip(0))
    found["forget"]()
    torch.testing.assert_close(found["kernel_function"](*inputs), exact(moe, inputs).bfloat16())


def test_quacks_tuner_chooses_among_six_of_its_configurations_for_each_memory_of_offsets(opponent):
    (_, even), (_, uneven) = few_experts(uneven=False), few_experts(uneven=True)
    found, before = opponent("moe_up/opponents/quack_gated.py", **QUACK), len(tuned)
    for offsets in (even[3], uneven[3], even[3]):
        found["kernel_function"](*even[:3], offsets)
        assert tuned[-1] in CONFIGURATIONS
    assert len(tuned) == before + 2
    taken = [one for one in CONFIGURATIONS if found["taken"](one.kwargs["config"])]
    assert len(taken) == len(found["QUICK"]) == 6


# Cross-entropy


def test_quacks_gradient_lies_in_the_logits(opponent):
    class InPlace(torch.autograd.Function):
        """Stands in for quack.cross_entropy, in float64; the gradient overwrites the logits. Like QuACK's kernel it
        refuses gradients of the losses with a stride of 0."""

        @staticmethod
        def forward(ctx, x, target):
            ctx.save_for_backward(x, target)
            return torch.nn.functional.cross_entropy(x.double(), target, reduction="none").float()

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.stride() == (1,)
            x, target = ctx.saved_tensors
            with torch.enable_grad():
                wide = x.detach().double().requires_grad_()
                losses = torch.nn.functional.cross_entropy(wide, target, reduction="none")
                (own,) = torch.autograd.grad(losses, wide, gradient.double())
            x.detach().copy_(own)
            return x, None

    def cross_entropy(x, target, ignore_index, reduction, inplace_backward):
        assert (ignore_index, reduction, inplace_backward) == (-100, "none", True)
        return InPlace.apply(x, target)

    losses = task(DECK / "cross_entropy_backward")
    found = opponent("cross_entropy_backward/opponents/quack_in_place.py", quack=module(cross_entropy=cross_entropy))
    ours, target = losses["get_inputs"](tokens=70, vocabulary=33)
    theirs = ours.clone()
    with torch.no_grad():
        loss = found["kernel_function"](theirs, target)
        torch.testing.assert_close(loss.float(), losses["Model"]()(ours, target))
    torch.testing.assert_close(theirs, ours)


# The folder that travels


@pytest.fixture(scope="module")
def tool() -> dict:
    return runpy.run_path(str(DECK / "opponents.py"))


def test_the_files_say_the_versions_that_the_folder_holds(tool):
    table = (DECK / "README.md").read_text().split("## Opponents")[1]
    for name, library in tool["LIBRARIES"].items():
        assert f"| {name} |" in table
        for requirement in (library.requirement, *library.beside):
            assert f"`{requirement}`" in table, requirement
    for path in LIBRARY_OF:
        requirement = tool["LIBRARIES"][LIBRARY_OF[path]].requirement
        assert requirement in path.read_text().replace("pip install\n", "pip install "), path
        assert path.stem in table, path


def elf(sections: dict[str, bytes]) -> bytes:
    """An ELF file of 64 bits with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    parts, offset, headers = [], 64, [bytes(64)]
    for name, content in {**sections, ".shstrtab": names}.items():
        at = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, len(content), 0, 0, 0, 0))
        parts.append(content)
        offset += len(content)
    head = (
        b"\x7fELF"
        + bytes(36)
        + struct.pack("<Q", offset)
        + bytes(10)
        + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    )
    return head + b"".join(parts) + b"".join(headers)


def test_code_for_other_cards_is_zeros_and_the_rest_of_the_library_stays(tool):
    def entry(kind, card, content):
        return struct.pack("<HHIQIIHHI", kind, 0, 32, len(content), 0, 0, 0, 0, card) + content

    old, own = entry(2, 80, b"a" * 24), entry(2, 90, b"b" * 40)
    small, large = entry(1, 80, b"c" * 8), entry(1, 80, b"d" * tool["SMALL_BYTES"])
    entries = old + own + small + large
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    library = elf({".text": b"a" * 64, ".nv_fatbin": fat + bytes(8) + fat})
    without = entries.replace(b"a" * 24, bytes(24)).replace(b"d" * tool["SMALL_BYTES"], bytes(tool["SMALL_BYTES"]))
    assert tool["for_one_card"](library, 90) == library.replace(entries, without)


def test_of_vllms_wheel_two_kernels_an_enumeration_and_the_operators_travel(tool, tmp_path, monkeypatch):
    """A stand-in for pip, which lays a small wheel down."""
    enumeration = "class KVQuantMode(IntEnum):\n    NONE = 0\n"
    inside = {
        f"vllm/v1/attention/ops/triton_{name}.py": "" for name in ("unified_attention", "attention_helpers", "other")
    }
    inside |= {"vllm/__init__.py": "import everything\n", "vllm/_C_stable_libtorch.abi3.so": elf({".text": b"a"})}
    inside |= {"vllm/v1/kv_cache_interface.py": f"import everything\nfrom enum import IntEnum\n\n\n{enumeration}"}

    def pip(command, check):
        assert command[1:4] == ["-m", "pip", "wheel"] and command[-1] == "vllm==0.33.0" and check
        wheel = Path(command[command.index("--wheel-dir") + 1]) / "vllm-0.33.0-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in inside.items():
                archive.writestr(name, content)

    monkeypatch.setattr(tool["subprocess"], "run", pip)
    tool["prepare"]("vllm", tmp_path)
    tool["install"]("vllm", tmp_path, tmp_path / "site")
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {*inside, *tool["STAND_INS"]} - {"vllm/v1/attention/ops/triton_other.py"}
    texts = [path.read_text() for path in (tmp_path / "site").rglob("*.py")]
    assert not any("everything" in text for text in texts)
    monkeypatch.syspath_prepend(tmp_path / "site")
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVQuantMode

    assert KVQuantMode.NONE == 0 and current_platform.fp8_dtype() == torch.float8_e4m3fn
    init_logger("a").debug_once("said")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_a_prepared_folder_installs_without_a_network(tool, tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("1")
    with tarfile.open(tmp_path / "gemlite.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "package", "gemlite")
    for names in ([], ["gemlite"]):
        monkeypatch.setattr(sys, "argv", ["opponents.py", "install", str(tmp_path), str(tmp_path / "site"), *names])
        tool["main"]()
        assert (tmp_path / "site" / "gemlite" / "a.py").read_text() == "1"
    monkeypatch.setattr(sys, "argv", ["opponents.py", "prepare", str(tmp_path), "nobody"])
    with pytest.raises(SystemExit):
        tool["main"]()
    assert "nobody is none of flashinfer, gemlite" in capsys.readouterr().err
    for text in tool["STAND_INS"].values():
        ast.parse(text)
