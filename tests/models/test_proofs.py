"""benchmarks/models.py: its kernels compute what the modules of its models do, and the page shows what was measured."""

import subprocess
import sys

import forks_with_torch
import pytest
from conftest import BUNDLE

BENCHMARK = BUNDLE / "benchmarks" / "models.py"
RESULTS = {"models": "model-results.json", "models h100": "model-results-h100.json"}
HEAD = f"""if True:
    import importlib.util, os, sys
    os.environ["MODELS_SMALL"] = "1"
    sys.path.insert(0, {str(BENCHMARK.with_suffix(""))!r})
    import torch
    from kernelopt.worker import model_swap
    torch.manual_seed(0)
    def kernel(name, of):
        file = model_swap.load_file(model_swap.Path({str(BENCHMARK.with_suffix(""))!r}, "kernels", name + ".py"))
        file.SHAPES = {{key: one.shape for key, one in of.state_dict().items() if key in file.SHAPES}}
        made = file.ModelNew().to(next(of.parameters()).dtype)
        made.load_state_dict({{key: of.state_dict()[key].clone() for key in file.SHAPES}})
        return made
    def close(one, other):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
"""


def run(code: str) -> None:
    with_torch = forks_with_torch.run(HEAD + code, TRITON_INTERPRET="1")
    assert with_torch.returncode == 0, with_torch.stdout


def test_the_kernels_of_a_norm_a_scan_and_a_convolution_are_right():
    run("""
    import convnext, decoder, mamba
    with torch.no_grad():
        norm = decoder.Norm()
        x = torch.randn(2, 3, decoder.WIDTH)
        close(kernel("norm", norm)(x), norm(x))
        scan = mamba.Scan().bfloat16()
        u, delta = torch.randn(2, 2, 3, mamba.INNER).bfloat16().unbind(0)
        b, c = torch.randn(2, 3, 2 * mamba.STATES).bfloat16().chunk(2, -1)
        close(kernel("scan", scan)(u, delta.abs(), b, c), scan(u, delta.abs(), b, c))
        convolution = convnext.Block(16).bfloat16().depthwise
        x = torch.randn(1, 3, 5, 16).bfloat16().permute(0, 3, 1, 2)
        close(kernel("depthwise", convolution)(x), convolution(x))
    """)


def test_attention_over_the_cache_is_right_and_writes_to_it():
    run("""
    import decoder
    with torch.no_grad():
        attention = decoder.Attention(cached=True)
        for position in (0, 101):
            x, at = torch.randn(decoder.REQUESTS, 1, decoder.WIDTH), torch.tensor([position])
            cos, sin = torch.rand(2, 1, decoder.HEAD // 2).unbind(0)
            mask = torch.arange(decoder.LONGEST)[None] <= at[:, None]
            made = kernel("attention", attention)
            split = lambda y: y.view(decoder.REQUESTS, 1, -1, decoder.HEAD).transpose(1, 2)
            q, k, v = (split(one(x)) for one in (attention.q, attention.k, attention.v))
            close(attention.out(made(cos, sin, at, mask, q, k, v)), attention(x, cos, sin, at, mask))
            assert made.values.equal(attention.values)
            close(made.keys, attention.keys)
    """)


def test_each_kernel_has_a_place_in_its_model():
    run(f"""
    models = model_swap.load_file(model_swap.Path({str(BENCHMARK)!r}))
    for proof in models.PROOFS.values():
        assert model_swap.paths(model_swap.load_file(model_swap.Path(models.model_file(proof))).load(), proof.at)
    """)


@pytest.mark.parametrize("part", RESULTS)
def test_the_tables_of_whole_models_are_what_was_measured(part):
    measured = BUNDLE / "docs" / RESULTS[part]
    printed = subprocess.run([sys.executable, BENCHMARK, "--table", measured], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    page = (BUNDLE / "docs" / "model-results.md").read_text()
    assert printed.stdout.strip() == page.split(f"<!-- {part} -->")[1].split(f"<!-- /{part} -->")[0].strip()
