"""The least work of each module in a step, counted on blank tensors."""

from pathlib import Path

import pytest
import torch
from conftest import BUNDLE
from kernelopt.hardware.work import ModuleWork
from kernelopt.worker import model_work
from kernelopt.worker.model_file import ModelFile

MODELS = BUNDLE / "tests" / "models"
TOKENS, WIDTH, FP32 = 14, 32, 4


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, bool], ModuleWork]:
    file = ModelFile(MODELS / "decoder.py", "cpu")
    return {(one.path, one.whole): one for one in model_work.of_step(file, "default")}


def test_a_whole_module_reads_its_inputs_and_weights_once_and_writes_its_outputs(counted):
    mlp = counted["layers.0.mlp", True]
    rows = TOKENS * WIDTH * FP32
    assert (mlp.bytes_in, mlp.bytes_out, mlp.bytes_state) == (rows, rows, 3 * 2 * WIDTH * WIDTH * FP32)
    assert mlp.flops == 3 * 2 * TOKENS * WIDTH * 2 * WIDTH and mlp.dtype == "fp32"


def test_own_operators_do_not_count_those_of_submodules(counted):
    own = counted["layers.0.mlp", False]  # silu(gate) * up
    hidden = TOKENS * 2 * WIDTH * FP32
    assert (own.flops, own.bytes_in, own.bytes_out, own.bytes_state) == (0, 2 * hidden, hidden, 0)


def test_what_only_a_module_itself_uses_counts_nothing(counted):
    norm = counted["layers.0.before", True]
    rows = TOKENS * WIDTH * FP32
    assert (norm.bytes_in, norm.bytes_out, norm.bytes_state) == (rows, rows, WIDTH * FP32)
    whole = counted["", True]
    assert (whole.bytes_in, whole.bytes_out) == (TOKENS * 8, TOKENS * 64 * FP32)


def test_attention_counts_without_the_half_that_the_mask_spares(counted):
    pairs = 2 * 4 * sum(range(1, 8))  # requests, heads, keys that each of 7 queries sees
    assert counted["layers.0.attention", False].flops == pairs * 2 * (8 + 8)


def test_attention_counts_in_the_dtype_that_it_is_called_with(tmp_path):
    """torch's plain attention widens bf16 to fp32, where the card is much slower."""
    (tmp_path / "model.py").write_text(
        "import torch, torch.nn as nn\n"
        "class Top(nn.Module):\n"
        "    def forward(self, q): return nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "def load(): return Top()\n"
        "def inputs(): return [torch.randn(1, 2, 5, 16).bfloat16()]\n"
    )
    (whole,) = [one for one in model_work.of_step(ModelFile(tmp_path / "model.py", "cpu"), "default") if one.whole]
    assert (whole.dtype, whole.flops) == ("bf16", 2 * 5 * 5 * 2 * (16 + 16))


def test_a_write_in_place_goes_out_and_a_look_at_values_leaves_the_work_unknown(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch, torch.nn as nn\n"
        "class Write(nn.Module):\n    def forward(self, cache, keys, slots): cache[slots] = keys\n"
        "class Top(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.write = Write()\n"
        "        self.register_buffer('cache', torch.zeros(100, 8))\n"
        "    def forward(self, keys, slots):\n        self.write(self.cache, keys, slots); return keys * LOOK\n"
        "def load(): return Top()\n"
        "def inputs(): return [torch.randn(3, 8), torch.tensor([1, 2, 3])]\n".replace("LOOK", "2")
    )
    file = ModelFile(tmp_path / "model.py", "cpu")
    own = {one.path: one for one in model_work.of_step(file, "default") if not one.whole}
    assert own["write"].bytes_out == 3 * 8 * FP32 and own["write"].bytes_in == 3 * 8 * FP32 + 3 * 8
    looking = Path(tmp_path / "looking.py")
    looking.write_text((tmp_path / "model.py").read_text().replace("* 2", "* int(slots.sum())"))
    assert model_work.of_step(ModelFile(looking, "cpu"), "default") is None
    assert torch.equal(file.module.cache, torch.zeros(100, 8))


def test_a_scripted_module_counts_as_operators_of_the_one_around_it():
    model = torch.nn.Sequential(torch.jit.script(torch.nn.ReLU()), torch.nn.Tanh())
    entered = []
    with model_work.watched(model, lambda path, kind: entered.append(path), lambda: None):
        model(torch.ones(2))
    assert entered == ["1"]
