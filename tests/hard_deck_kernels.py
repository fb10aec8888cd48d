"""Run candidates of the hard deck in Triton's CPU interpreter: python hard_deck_kernels.py DECK FOLDER, TRITON_INTERPRET=1.

Each is called twice, with other tensors of the same sizes, so that what the first call leaves behind is used again, and
compared with its reference in float64. Where the kernel is written for bf16 its text is changed to fp16, and written to
FOLDER: the interpreter multiplies bf16 wrongly. Exits with 1 at the first one that is wrong."""

import importlib.util
import sys
from pathlib import Path

HALF = {"bfloat16": "float16", ".float16()": ".half()"}
CASES = [  # problem, candidate, constants, sizes, changes of the text
    ("fp8_product", "tma", "BM = 16, BN = 32, BK = 32", {"m": 70, "n": 40, "k": 48}, {}),
    ("fp8_product", "tma", "SKINNY_BK = 32", {"m": 5, "n": 70, "k": 48}, {}),
    ("fp8_block_product", "tma", "BM = 16, TALL = 1", {"m": 70, "n": 136, "k": 144}, {}),
    ("fp8_block_product", "tma", "BM = 16, TALL = 0, AHEAD = 0", {"m": 70, "n": 129, "k": 144}, {}),
    ("fp8_block_product", "tma", "", {"m": 3, "n": 20, "k": 131}, {}),
    ("attention_backward", "split", "QUERIES = 32, KEYS = 16", {"heads": 3, "length": 70, "width": 16}, HALF),
    ("attention_backward", "split", "ROWS = 16, COLUMNS = 32", {"heads": 5, "length": 33, "width": 16}, HALF),
    ("attention_backward", "atomic", "QUERIES = 16, KEYS = 32", {"heads": 3, "length": 70, "width": 16}, HALF),
    ("attention_backward", "atomic", "TURNED = 0", {"heads": 1, "length": 130, "width": 16}, HALF),
    ("gated_delta_rule", "two_products", "", {"sequences": 3, "tokens": 200, "heads": 1}, HALF),
    ("gated_delta_rule", "two_products", "PART = 32", {"sequences": 2, "tokens": 20, "heads": 1}, HALF),
]


def loaded(path: Path, folder: Path, changes: dict[str, str], constants: str):
    """The module of a file, its text changed, with these constants."""
    text = path.read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    copy = folder / f"{path.parents[1].name}_{path.stem}.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in (pair.split(" = ") for pair in constants.split(", ") if pair):
        assert hasattr(module, name), name
        setattr(module, name, int(value))
    return module


def worst_error(module, task, sizes: dict[str, int]) -> float:
    """The largest rms of an output's error over two calls, as a share of the rms of the output."""
    worst, held = 0.0, []
    for _ in range(2):
        inputs = task.get_inputs(**sizes)
        held.append(inputs)  # so that the second call's tensors lie elsewhere
        outputs = module.kernel_function(*inputs)
        exact = task.Model()(*(one.double() if one.is_floating_point() else one for one in inputs))
        pairs = zip(outputs, exact, strict=True) if isinstance(outputs, tuple) else [(outputs, exact)]
        for output, wanted in pairs:
            error = (output.double() - wanted.double()).square().mean().sqrt() / wanted.double().square().mean().sqrt()
            worst = max(worst, float(error) if error.isfinite() else float("inf"))
    return worst


def main() -> int:
    deck, folder = map(Path, sys.argv[1:])
    for problem, candidate, constants, sizes, changes in CASES:
        task = loaded(deck / problem / "reference.py", folder, changes, "")
        module = loaded(deck / problem / "candidates" / f"{candidate}.py", folder, changes, constants)
        error = worst_error(module, task, sizes)
        print(problem, candidate, constants, sizes, error, flush=True)
        if error > 0.006:  # the interpreter cuts bf16 off, 0.4 %
            return 1
    return 0


sys.exit(main())
