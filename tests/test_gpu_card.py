"""What the tests on a GPU expect of each card, asked without one."""

from types import SimpleNamespace

import conftest
import gpu_card
import pytest


@pytest.mark.parametrize(
    ("name", "capability", "l2", "dtypes", "half", "buffer"),
    [
        ("Tesla V100-SXM2-16GB", "7.0", 6.0, "fp16", "fp16", None),
        ("Tesla T4", "7.5", 4.0, "fp16 int8", "fp16", None),
        ("NVIDIA A100-SXM4-80GB", "8.0", 40.0, "tf32 bf16 fp16 int8", "bf16", 8),
        ("NVIDIA GeForce RTX 4090", "8.9", 72.0, "tf32 bf16 fp16 fp8 int8", "bf16", 16),
        ("NVIDIA H100 80GB HBM3", "9.0", 50.0, "tf32 bf16 fp16 fp8 int8", "bf16", 8),
        ("NVIDIA H200", "9.0", 60.0, "tf32 bf16 fp16 fp8 int8", "bf16", 8),
        ("NVIDIA B200", "10.0", 126.5, "tf32 bf16 fp16 fp8 int8", "bf16", 16),
        ("NVIDIA GeForce RTX 5090", "12.0", 96.0, "tf32 bf16 fp16 fp8 int8", "bf16", 16),
    ],
)
def test_what_is_expected_follows_the_architecture(name, capability, l2, dtypes, half, buffer):
    card = gpu_card.of(name, {"compute_capability": capability, "l2_capacity": l2, "memory_capacity": 15.9})
    assert card.matmul_dtypes() == {"fp32", *dtypes.split()} and card.half_dtype() == half
    assert card.l2_buffer_mb() == buffer and card.is_hopper == (capability == "9.0")
    assert card.page and card.documented("memory_bandwidth") > 0 and card.documented("no_such_row") is None
    assert card.holds(12) and not card.holds(24)


def test_a_card_of_which_nobody_knows_anything_is_asked_for_little():
    card = gpu_card.of("NVIDIA Z999", {"compute_capability": "99.0"})
    assert card.page is None and card.documented("memory_bandwidth") is None
    assert card.matmul_dtypes() == {"fp32"} and card.l2_buffer_mb() is None and not card.holds(1)


def test_each_test_on_a_gpu_runs_either_at_once_with_others_or_alone():
    items = [SimpleNamespace(keywords={*more}) for more in ([], ["at_once"], ["slow"])]
    chosen, left_out = {}, []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    for part in (None, "at-once", "alone"):
        chosen[part] = list(items)
        asked = SimpleNamespace(getoption={"--on-gpu": part}.get, hook=hook)
        conftest.pytest_collection_modifyitems(asked, chosen[part])
    assert chosen[None] == items and chosen["at-once"] == [items[1]] and chosen["alone"] == [items[0], items[2]]
    assert sorted(map(id, left_out)) == sorted(map(id, items))
