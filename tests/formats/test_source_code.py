"""What of a source's code a task needs, and how that is changed: text in, text out."""

import pytest
from kernelopt.errors import UsageError
from kernelopt.formats import edits, files
from kernelopt.formats.source_code import Source, assembled

UTILS = Source(
    "import os\nimport torch\n\n\ndef near(a, b):\n    return abs(a - b) < limit\n\n\nlimit = 2\n\n\ndef unused():\n    os.abort()\n",
    "utils.py",
)


def test_only_what_is_needed_is_taken_in_the_order_of_the_imports():
    main = Source(
        '"""A task."""\nfrom __future__ import annotations\nimport torch\nfrom utils import near as close, unused\n\n\n'
        "# of the source\n@torch.no_grad()\ndef run(x):\n    return close(x, 1)  # near\n\n\ndef other():\n    return unused()\n\n\n"
        "if __name__ == '__main__':\n    other()\n",
        "reference.py",
    )
    text = assembled(main, {"utils": UTILS}, {"run"})
    assert "# of the source\n@torch.no_grad()\ndef run(x):\n    return close(x, 1)  # near" in text
    assert "limit = 2" in text and text.index("def near") < text.index("close = near") < text.index("def run")
    assert not any(word in text for word in ("unused", "other", "abort", "__future__", "A task", "import torch"))
    made: dict = {}
    exec("import torch\n" + text, made)
    assert made["run"](2) is True


def test_of_a_star_what_is_used_is_taken():
    text = assembled(Source("from utils import *\ndef run(x): return near(x, 1)\n", "a.py"), {"utils": UTILS}, {"run"})
    assert "def near" in text and "limit = 2" in text and "unused" not in text and "import" not in text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import utils\ndef run(x): return utils.near(x, 1)\n", "imports utils as a whole"),
        ("from utils import far\ndef run(x): return far(x, 1)\n", "imports far, which utils.py does not define"),
        ("from utils import near\nlimit = 3\ndef run(x): return near(x, limit)\n", "both define limit"),
    ],
)
def test_imports_that_cannot_be_carried_over(code, message):
    with pytest.raises(UsageError, match=message):
        assembled(Source(code, "reference.py"), {"utils": UTILS}, {"run"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.manual_seed(0)", "pass"),
        ("torch.cuda.manual_seed_all(SEED)", "pass"),
        ("np.random.seed(7 * n)", "pass"),
        ("torch.manual_seed(seed + n)", "torch.manual_seed(seed + n)"),
        ("row_seed = seed + 1; g.manual_seed(row_seed)", "row_seed = seed + 1; g.manual_seed(row_seed)"),
        ("g = torch.Generator().manual_seed(0)", "g = torch.Generator().manual_seed(torch.initial_seed())"),
    ],
)
def test_fixed_seeds_are_left_out_of_what_makes_inputs(before, after):
    text = f"SEED = 3\n\n\ndef make(n, seed):\n    {before}\n\n\ndef forward(n):\n    torch.manual_seed(0)\n"
    source = Source(text, "a.py")
    edits.with_every_seed(source)
    assert source.piece(0, len(source.bytes)) == text.replace(before, after, 1)


def test_names_that_a_reference_needs_are_given_up():
    source = Source("class Model(Base):\n    Model = 1\n\n\ndef f(x):\n    return Model(x), x.Model\n", "a.py")
    assert edits.renamed(source, {"Model", "get_inputs"}) == ["Model"]
    text = source.piece(0, len(source.bytes))
    assert text.startswith("class Model_of_source(Base):") and "return Model_of_source(x), x.Model\n" in text


@pytest.mark.parametrize(
    ("head", "made"),
    [
        ("def f():", "def f(*, n=2, m=3):"),
        ("def f(a, b=(1),) -> int:", "def f(a, b=(1), *, n=2, m=3,) -> int:"),
        ("def f(a=1, *, b=2):", "def f(a=1, *, b=2, n=2, m=3):"),
    ],
)
def test_sizes_become_keywords(head, made):
    source = Source(f"{head}\n    return n * m\n", "a.py")
    edits.with_sizes(source, "f", {"n": 2, "m": 3})
    assert source.piece(0, len(source.bytes)).startswith(made)


def test_who_reads_a_size_of_the_module_is_known():
    source = Source(
        "n = 1\ndef f(): return n\ndef g(n): return [n for _ in range(3)]\nclass C:\n    def h(self): return n\n",
        "a.py",
    )
    assert edits.readers(source, {"n"}) == {"f": {"n"}, "C": {"n"}}


def test_a_name_has_the_value_that_is_assigned_last():
    tree = files.python_tree("N = M = 4\nN: int\nN = 8\nSHAPES: list = [(N, M)]\nfor one in SHAPES: N = 3\n", "k.py")
    assert files.literal(tree, "SHAPES", "k.py") == [(8, 4)]
