"""The wiki's baselines: what the finder prints, and that each file is what it says."""

import importlib.util
import json

import pytest
import torch
from conftest import BUNDLE, tool_json
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import wiki_baselines
from torch.nn import functional

WIKI = BUNDLE / "gpu-wiki"
BASELINES = wiki_baselines.all_of(WIKI)
RUN_HERE = [baseline for baseline in BASELINES if not baseline.needs_gpu and not baseline.package]


def name(baseline) -> str:
    return f"{baseline.operator}/{baseline.file.stem}"


def loaded(baseline):
    spec = importlib.util.spec_from_file_location(baseline.file.stem, baseline.file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normed(x):
    return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()


def layer_norm_backward():
    x, dy, weight, bias = torch.randn(4, 9), torch.randn(4, 9), torch.randn(9), torch.randn(9)
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    y = normed(leaves[0]) * leaves[1] + leaves[2]
    return (dy, x, mean, rstd, weight, bias), torch.autograd.grad(y, leaves, dy)


def attention(q, k, v):
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, float("-inf")).softmax(-1) @ v


def attention_backward():
    q, k, v, dout = (torch.randn(2, 2, 6, 4) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    return (q, k, v, dout), torch.autograd.grad(attention(*leaves), leaves, dout)


def paged_decode():
    lengths, table = torch.tensor([5, 3]), torch.tensor([[3, 1], [0, 2]])
    q, keys, values = torch.randn(2, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    out = torch.empty_like(q)
    for request, length in enumerate(lengths.tolist()):
        for head in range(4):
            k, v = (cache[table[request]].flatten(0, 1)[:length, head // 2] for cache in (keys, values))
            out[request, head] = (q[request, head] @ k.t() / 8**0.5).softmax(-1) @ v
    return (q, keys, values, table, lengths), out


def grouped(dtype=torch.float32):
    x, weight, ends = (
        torch.randn(6, 16).to(dtype),
        torch.randn(2, 8, 16).to(dtype),
        torch.tensor([4, 6], dtype=torch.int32),
    )
    return (x, weight, ends), torch.cat([x[:4] @ weight[0].t(), x[4:] @ weight[1].t()])


def block_sparse() -> tuple:
    """(x, blocks, columns, offsets, shape) of a weight with three blocks of 4 x 4, and the same weight whole."""
    x, blocks, weight = torch.randn(5, 12), torch.randn(3, 4, 4), torch.zeros(8, 12)
    for block, (row, column) in zip(blocks, [(0, 0), (0, 8), (4, 4)], strict=True):
        weight[row : row + 4, column : column + 4] = block
    columns, offsets = (torch.tensor(one, dtype=torch.int32) for one in ([0, 2, 1], [0, 2, 3]))
    return (x, blocks, columns, offsets, weight.shape), weight


def adamw():
    p, g, m, v = torch.randn(9), torch.randn(9), torch.randn(9), torch.rand(9)
    first, second = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    change = first / (1 - 0.9**10) / ((second / (1 - 0.999**10)).sqrt() + 1e-8)
    return (p.clone(), g, m.clone(), v.clone()), (p * (1 - 1e-5) - 1e-3 * change, first, second)


def turns(angles):
    """The matrix of each row that turns the pairs (i, i + half) of a head by its angles."""
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat([torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1)


def routed(logits, k):
    best = logits.sort(descending=True)
    weights = best.values[:, :k].exp()
    return weights / weights.sum(1, keepdim=True), best.indices[:, :k]


def cases() -> dict:
    """{operator/name: (arguments, expected)}, written out and not by the call that the baseline makes."""
    x, weight, bias = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    sparse, whole = block_sparse()
    wide, target = torch.randn(7, 12), torch.tensor([0, 6, 3, 3, 1])
    logits = x @ wide.t()
    losses = logits.exp().sum(1).log() - logits[torch.arange(5), target]
    image, taps = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 2, 2)
    convolved = torch.einsum("nchwij,ocij->nohw", image.unfold(2, 2, 1).unfold(3, 2, 1), taps)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    one, cache_k, cache_v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    wide_k, wide_v = cache_k.repeat_interleave(2, 1), cache_v.repeat_interleave(2, 1)
    decoded = (one @ wide_k.transpose(2, 3) / 8**0.5).softmax(-1) @ wide_v
    table, index = torch.randn(6, 4), torch.tensor([5, 0, 5])
    rows, hit = torch.randn(3, 4), torch.nn.functional.one_hot(index, 6).float().t()
    slots = torch.tensor([2, -1, 0])
    written = torch.stack([rows[2], table[1], rows[0], *table[3:]])
    certain = torch.full((4, 6), -1e9).scatter(1, torch.tensor([[1], [5], [0], [2]]), 0.0)
    angles = torch.randn(5, 4)
    turned, kept = turns(angles), torch.randn(5, 2, 8)
    heads, keys = torch.randn(5, 3, 8), torch.randn(5, 2, 8)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions, places = torch.tensor([4, 0, 2, 2, 1]), torch.tensor([5, -1, 0, 3, 1])
    q_turned, k_turned = (torch.einsum("tij,thj->thi", turned[positions], one) for one in (heads, keys))
    pages = [torch.zeros(3, 2, 2, 8) for _ in range(2)]
    k_pages, v_pages = (
        torch.zeros(6, 2, 8).index_copy(0, places[places >= 0], one[places >= 0]).view(3, 2, 2, 8)
        for one in (k_turned, kept)
    )
    padded = functional.pad(image, (1, 1, 1, 1), value=float("-inf"))
    return {
        "elementwise/swiglu_torch": ((x,), x[:, :6] * torch.sigmoid(x[:, :6]) * x[:, 6:]),
        "elementwise/gelu_torch": ((x,), x * (1 + torch.erf(x / 2**0.5)) / 2),
        "elementwise/rotary_torch": (
            (heads, keys, angles.cos(), angles.sin()),
            tuple(torch.einsum("tij,thj->thi", turned, one) for one in (heads, keys)),
        ),
        "elementwise/rotary_cache_write_torch": (
            (positions, heads.clone(), keys.clone(), kept, cos_sin, *pages, places), (q_turned, k_turned, k_pages, v_pages),
        ),
        "norms/rms_norm_torch": ((x, weight), x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight),
        "norms/layer_norm_torch": ((x, weight, bias), normed(x) * weight + bias),
        "norms/layer_norm_backward_torch": layer_norm_backward(),
        "softmax-losses/softmax_torch": ((x,), x.exp() / x.exp().sum(1, keepdim=True)),
        "softmax-losses/cross_entropy_torch": ((logits, target), losses),
        "softmax-losses/linear_cross_entropy_torch": ((x, wide, target), losses),
        "dense-products/matmul_torch": ((x, wide), torch.einsum("mk,nk->mn", x, wide)),
        "dense-products/linear_gelu_torch": (
            (x, wide, bias[:7]), functional.gelu(torch.einsum("mk,nk->mn", x, wide) + bias[:7]),
        ),
        "attention/attention_torch": ((q, k, v), attention(q, k, v)),
        "attention/attention_backward_torch": attention_backward(),
        "attention-decode/decode_torch": ((one, cache_k, cache_v), decoded),
        "attention-decode/paged_decode_torch": paged_decode(),
        "grouped-products/loop_torch": grouped(),
        "grouped-products/grouped_mm_torch": grouped(torch.bfloat16),
        "block-sparse/bsr_linear_torch": (sparse, torch.einsum("mk,nk->mn", sparse[0], whole)),
        "block-sparse/dense_linear_torch": ((x, whole), torch.einsum("mk,nk->mn", x, whole)),
        "scans/cumsum_torch": ((x,), x @ torch.ones(12, 12).triu()),
        "convolution-pooling/conv2d_torch": ((image, taps), convolved),
        "convolution-pooling/conv2d_channels_last_torch": ((image, taps), convolved),
        "convolution-pooling/max_pool2d_torch": ((image,), padded.unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5))),
        "selection-sampling/topk_torch": ((x,), (x.sort(descending=True).values[:, :8], x.sort(descending=True).indices[:, :8])),
        "selection-sampling/moe_router_torch": ((x,), routed(x, 8)),
        "selection-sampling/sample_torch": ((certain, 3), torch.tensor([1, 5, 0, 2])),
        "gather-scatter/embedding_torch": ((index, table), table[index]),
        "gather-scatter/embedding_backward_torch": ((rows, index, table), hit @ rows),
        "gather-scatter/scatter_add_torch": ((table.clone(), index, rows), table + hit @ rows),
        "gather-scatter/cache_write_torch": ((table.clone(), rows, slots), written),
        "optimizers/adamw_fused_torch": adamw(),
        "optimizers/adamw_foreach_torch": adamw(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def case_of() -> dict:
    torch.manual_seed(0)
    return cases()


@pytest.mark.parametrize("baseline", RUN_HERE, ids=name)
def test_a_baseline_of_torch_computes_what_it_says(baseline, case_of):
    if baseline.file.stem == "grouped_mm_torch" and not hasattr(functional, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    arguments, expected = case_of[name(baseline)]
    result = loaded(baseline).kernel_function(*arguments)
    loose = {"rtol": 2e-2, "atol": 2e-2} if arguments[0].dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(result, expected, **loose)


@pytest.mark.parametrize("baseline", [one for one in BASELINES if one not in RUN_HERE], ids=name)
def test_a_baseline_of_a_library_says_which_package_is_missing(baseline):
    assert baseline.interface
    if baseline.package is None or wiki_baselines.installed_version(baseline.package):
        assert callable(loaded(baseline).kernel_function)
        return
    with pytest.raises(ImportError, match=f"{baseline.package} is not installed in this environment; "):
        loaded(baseline)


def gpu_cases() -> dict:
    """As cases, for the baselines of torch that need a GPU; in bf16 and fp8."""
    x, weight = torch.randn(128, 256, device="cuda") / 8, torch.randn(256, 256, device="cuda") / 8
    x8, w8, one = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    product = x8.double() @ w8.double().t()
    blocks = (torch.rand(128, 4, device="cuda") + 0.5, torch.rand(2, 4, device="cuda") + 0.5)
    x_long, w_long = (torch.randn(rows, 512, device="cuda").to(torch.float8_e4m3fn) for rows in (128, 256))
    scaled_x = x_long.double() * blocks[0].repeat_interleave(128, 1)
    scaled_w = w_long.double() * blocks[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    whole = torch.randint(0, 16, (256, 256), device="cuda", dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack((whole[:, ::2] << 4 | whole[:, 1::2]).to(torch.uint8), 8)
    scales = torch.stack([torch.full((2, 256), 0.1), torch.zeros(2, 256)], -1).cuda().bfloat16()
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda").bfloat16() for _ in range(3))
    above = torch.ones(64, 64, dtype=torch.bool, device="cuda").triu(1)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = (leaves[0] @ leaves[1].transpose(2, 3) / 8).masked_fill(above, float("-inf"))
    out, dout = scores.softmax(-1) @ leaves[2], torch.randn(2, 4, 64, 64, device="cuda").bfloat16()
    saved = (q, k, v, out.detach().bfloat16(), scores.detach().logsumexp(-1).float(), dout)
    gradients = torch.stack(torch.autograd.grad(out, leaves, dout.double()))
    return {
        "dense-products/fp8_matmul_torch": ((x8, w8, one, one), product),
        "dense-products/fp8_block_matmul_torch": ((x_long, w_long, *blocks), scaled_x @ scaled_w.t()),
        "dense-products/int4_matmul_torch": (
            (x.bfloat16(), packed, scales),
            x.double() @ ((whole - 8) * 0.1).double().t(),
        ),
        "attention/attention_cudnn": ((q, k, v), out.detach()),
        "attention/attention_flash": ((q, k, v), out.detach()),
        "attention/attention_backward_alone_cudnn": (saved, gradients),
        "attention/attention_backward_alone_flash": (saved, gradients),
    }


@pytest.mark.gpu
def test_the_baselines_of_torch_that_need_a_gpu_compute_what_they_say():
    torch.manual_seed(0)
    known = gpu_cases()
    needed = {name(baseline): baseline for baseline in BASELINES if baseline.needs_gpu and not baseline.package}
    assert set(known) == set(needed)
    for key, (arguments, expected) in known.items():
        result = loaded(needed[key]).kernel_function(*arguments)
        result = torch.stack(result).double() if isinstance(result, tuple) else result.double()
        off = (result - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert off < 0.02, f"{key}: the error's rms is {off:.3f} of the result's"


def test_every_operator_page_has_baselines_and_each_baseline_a_page():
    assert {baseline.operator for baseline in BASELINES} == {
        page.stem for page in (WIKI / "docs/operators").glob("*.md")
    }


def test_the_finder_prints_files_by_operator_and_by_words(run_here):
    norms = tool_json("find_baselines.py", "norms", run=run_here)["baselines"]
    assert {row["operator"] for row in norms} == {"norms"} and all((BUNDLE / row["file"]).is_file() for row in norms)
    words = tool_json("find_baselines.py", "RMS", "norm", run=run_here)["baselines"]
    assert len(words) >= 4 and all("rms_norm" in row["file"] for row in words)
    everything = tool_json("find_baselines.py", "--list", run=run_here)["baselines"]
    assert len(everything) == len(BASELINES)
    lines = run_here("find_baselines.py", "norms").stdout
    assert "liger-kernel, " in lines and "--against" in lines


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("rotary", "rotary_torch.py"),
        ("RoPE KV cache", "rotary_cache_write_torch.py"),
        ("moe router", "moe_router_torch.py"),
        ("MoE routing", "moe_router_torch.py"),
    ],
)
def test_an_operator_is_found_by_the_words_of_a_user(run_here, words, file):
    assert f"/{file}\n" in run_here("find_baselines.py", words).stdout


def test_an_unknown_operator_is_refused_with_those_that_there_are(run_here):
    done = run_here("find_baselines.py", "ray tracing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no baseline for 'ray tracing'" in done.stderr and "softmax-losses" in done.stderr
    assert run_here("find_baselines.py").returncode == 2


def test_a_file_without_its_docstring_is_refused(tmp_path):
    (tmp_path / "baselines/norms").mkdir(parents=True)
    (tmp_path / "baselines/norms/new.py").write_text('"""A norm."""\n')
    with pytest.raises(UsageError, match="Arguments"):
        wiki_baselines.all_of(tmp_path)
    with pytest.raises(Refused):
        wiki_baselines.for_operator([], "norms")


def test_explore_takes_a_baseline_as_its_opponent(tmp_path, run_here):
    kernel, reference = tmp_path / "kernel.py", tmp_path / "reference.py"
    kernel.write_text("def kernel_function(x):\n    return x.exp() / x.exp().sum(-1, keepdim=True)\n")
    reference.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.softmax(-1)\n"
        "def get_inputs():\n    return [torch.randn(4, 8)]\n"
    )
    opponent = WIKI / "baselines/softmax-losses/softmax_torch.py"
    done = run_here(
        "explore_kernels.py", kernel, "--reference", reference, "--against", opponent, "--device", "cpu-interpreter",
        "--json",
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert "softmax_torch" in rows, done.stderr
