"""The least bytes of a call (worker.traffic): a floor may be too low, never too high."""

import pytest
from kernelopt.hardware.work import CountedWorkload
from kernelopt.worker import problem, work

HEAD = "import torch, torch.nn as nn\nf32 = torch.randn\n"
BODY = """
class Model(nn.Module):
    def forward(self, a, b, c):
        {forward}
def get_inputs(): return {inputs}
MUTATES = {mutates}
"""


def counted(tmp_path, forward: str, inputs: str, mutates: str = "()") -> tuple[int, int]:
    """(bytes read, bytes written) of a reference."""
    path = tmp_path / "reference_file.py"
    path.write_text(HEAD + BODY.format(forward=forward, inputs=inputs, mutates=mutates))
    estimated = work.estimate(problem.Reference(path), "default", None, "cpu").work
    assert estimated.bytes_min == estimated.bytes_in + estimated.bytes_out
    return estimated.bytes_in, estimated.bytes_out


CACHE = "[f32(1000, 8), f32(5, 8), torch.randperm(1000)[:5]]"
ROWS, SLOTS = 5 * 8 * 4, 5 * 8
MUTATING = {  # forward, inputs, MUTATES -> bytes read, bytes written
    "a write into a cache": ("a[c] = b", CACHE, "('a',)", ROWS + SLOTS, ROWS),
    "the same, beside a padding slot": (
        "a[c[:3]] = b[:3]",
        CACHE,
        "('a',)",
        3 * 8 * 4 + SLOTS * 3 // 5,
        3 * 8 * 4,
    ),
    "two writes to one slot": ("a[c * 0] = b[:1].expand(5, 8)", CACHE, "('a',)", 8 * 4 + SLOTS, 8 * 4),
    "a sum in place": ("a.add_(b)\n        return a * a.mean()", "[f32(6, 8), f32(6, 8), 1]", "(0,)", 2 * 192, 2 * 192),
    "a result that lies in the input": ("return a.mul_(2)", "[f32(6, 8), 1, 1]", "(0,)", 192, 192),
    "an output that the task allocates": (
        "torch.add(b, 1, out=a)",
        "[torch.empty(6, 8), f32(6, 8), 1]",
        "(0,)",
        192,
        192,
    ),
    "what is written over is not read": (
        "a.copy_(b)\n        a.mul_(2)",
        "[f32(6, 8), f32(6, 8), 1]",
        "(0,)",
        192,
        192,
    ),
    "a tensor that is written over piece by piece": (
        "for part in a.split(2): part.copy_(part.exp())",
        "[f32(6, 8), 1, 1]",
        "(0,)",
        192,
        192,
    ),
    "columns that are written over in turn": (
        "for part in a.view(6, 4, 2).split([2, 1, 1], dim=1): part.copy_(part.exp())",
        "[f32(6, 8), 1, 1]",
        "(0,)",
        192,
        192,
    ),
    "columns that overlap written ones": (
        "a[:, :4].mul_(2)\n        a[:, 3:].mul_(2)",
        "[f32(6, 8), 1, 1]",
        "(0,)",
        6 * 4 * 4,
        192,
    ),
    "columns beside written ones, as another dtype": (
        "a[:, :4].mul_(2)\n        a.view(torch.float16)[:, 8:].neg_()",
        "[f32(6, 8), 1, 1]",
        "(0,)",
        6 * 4 * 4,
        192,
    ),
    "rows that run over into the next": (
        "a.view(-1)[2:42].view(5, 8)[:, :6].mul_(2)\n        a[:, 6:].mul_(2)",
        "[f32(6, 8), 1, 1]",
        "(0,)",
        5 * 6 * 4,
        5 * 6 * 4 + 6 * 2 * 4 - 5 * 2 * 4,
    ),
    "a part that overlaps a written one": (
        "a[:4].copy_(b)\n        a[2:].mul_(2)",
        "[f32(6, 8), f32(4, 8), 1]",
        "(0,)",
        128,
        192,
    ),
    "some elements stay as they were": (
        "a.clamp_(min=0)",
        "[torch.tensor([1.0, -1.0, 2.0, -0.5]), 1, 1]",
        "(0,)",
        16,
        8,
    ),
    "a reference that looks at values": (
        "a[: int(c[0]) * 0 + 2] = b[:2]",
        "[f32(100, 8), f32(5, 8), torch.arange(5)]",
        "(0,)",
        2 * 32 + 8,
        2 * 32,
    ),
}


@pytest.mark.parametrize(("forward", "inputs", "mutates", "read", "written"), MUTATING.values(), ids=MUTATING)
def test_a_declared_input_counts_where_it_is_read_and_where_it_changes(
    tmp_path, forward, inputs, mutates, read, written
):
    assert counted(tmp_path, forward, inputs, mutates) == (read, written)


def test_a_task_too_large_to_be_run_says_that_its_writes_are_not_counted(tmp_path, monkeypatch):
    path = tmp_path / "reference_file.py"
    path.write_text(HEAD + BODY.format(forward="a.add_(b)", inputs="[f32(6, 8), f32(6, 8), 1]", mutates="('a',)"))
    whole = work.estimate(problem.Reference(path), "default", None, "cpu")
    assert whole.uncounted is None and whole.work.bytes_out == 192
    monkeypatch.setattr(work, "REAL_BYTES", 300)
    part = work.estimate(problem.Reference(path), "default", None, "cpu")
    assert part.work.bytes_out == 0 and "writes of inputs that MUTATES names" in part.uncounted
    assert CountedWorkload.from_json(part.to_json()) == part


READING = {  # forward, inputs -> bytes read
    "pages of a cache": ("return a[c] * 2", CACHE, ROWS + SLOTS),
    "an embedding": ("return nn.functional.embedding(c, a)", CACHE, ROWS + SLOTS),
    "sums of rows of a table": (
        "return nn.functional.embedding_bag(c, a, torch.tensor([0, 2]), mode='sum')",
        CACHE,
        ROWS + SLOTS,
    ),
    "both halves of a tensor": ("x, y = a.chunk(2, -1)\n        return x * y", CACHE, 1000 * 8 * 4),
    "one half, and the same transposed": ("x = a[:, :4]\n        return x @ x.t()", CACHE, 1000 * 4 * 4),
    "all of it, often": ("return a.t() @ a + a.sum() + a[3:].sum()", CACHE, 1000 * 8 * 4),
    "its shape alone": ("return torch.zeros_like(a) + b.sum() + torch.empty_like(a)", CACHE, ROWS),
    "a row that is expanded": ("return b[:1].expand(9, 8) * 2", CACHE, 32),
    "three inputs in one storage": ("return a + 1, b * 2, c - 1", "[*f32(512, 24).split(8, -1)]", 512 * 24 * 4),
    "inputs that overlap": ("return a + b[1:] + c", "[(x := f32(12, 8))[:6], x[3:10], x[:6].t().t()]", 10 * 8 * 4),
    "slices that overlap": ("return a[:6] + a[3:9]", "[f32(12, 8), 1, 1]", 9 * 8 * 4),
    "slices without elements": ("return a[5:5] * 2, a[:, 8:].exp(), a[c[:0]]", CACHE, 0),
    "one of two inputs in a storage": ("return a * 2", "[*f32(100, 2, 8).unbind(1), 1]", 100 * 8 * 4),
    "many picks from one of two inputs in a storage": (
        "return a[c]",
        "[*f32(10, 2, 8).unbind(1), torch.arange(60) % 10]",
        10 * 8 * 4 + 60 * 8,
    ),
}


@pytest.mark.parametrize(("forward", "inputs", "read"), READING.values(), ids=READING)
def test_other_inputs_count_where_operations_read_them(tmp_path, forward, inputs, read):
    assert counted(tmp_path, forward, inputs)[0] == read


def test_changes_of_large_tasks_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "REAL_BYTES", 100)
    assert counted(tmp_path, "a[c] = b", CACHE, "(0,)") == (ROWS + SLOTS, 0)
