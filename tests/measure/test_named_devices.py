"""Tasks that name a GPU run away from it like their twins that name none, and on the same other inputs."""

import re

import pytest
import torch
from kernelopt.device.sandbox import Sandbox
from kernelopt.measure import cases
from kernelopt.worker import blank, named_devices, preparing, problem, variants, work
from kernelopt.worker.context import load_reference
from written_tasks import HEAD, judge, written

TASKS = {
    "draws by a generator": """
class Model(nn.Module):
    def forward(self, x, y): return x + y
def get_inputs(*, size=64):
    generator = torch.Generator(device="cuda").manual_seed(torch.initial_seed() % 2**31)
    return [torch.randn(size, 8, generator=generator, device="cuda") for _ in range(2)]
""",
    "moves to it": """
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 5).cuda()
        self.scale = nn.Parameter(torch.rand(5).cuda())
    def forward(self, x): return self.linear(x.cuda()) * self.scale
def get_inputs(): return [torch.randn(16, 24).to("cuda:0")]
def get_init_inputs(): return [24]
""",
    "a constant of the module": """
DEVICE = torch.device("cuda")
TABLE = torch.linspace(0, 1, 40, device=DEVICE)
class Model(nn.Module):
    def forward(self, x, at): return x * TABLE[at]
def get_inputs(): return [torch.randn(12, 40, device=DEVICE), torch.arange(40, device=DEVICE)]
""",
    "buffers and arguments of the constructor": """
class Model(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("angles", torch.arange(24, device="cuda") / 24)
    def forward(self, x): return x * self.weight + self.angles.cos()
def get_inputs(*, rows=9): return [torch.randn(rows, 24, device="cuda")]
def get_init_inputs(): return [torch.rand(24, device="cuda")]
""",
    "in place": """
class Model(nn.Module):
    def forward(self, key, cache, slots): cache[slots] = key
def get_inputs(*, tokens=7, blocks=50):
    slots = torch.randperm(blocks, device="cuda")[:tokens]
    if len(slots) < tokens: raise ValueError
    return [torch.randn(tokens, 8, device="cuda"), torch.zeros(blocks, 8, device="cuda"), slots]
MUTATES = ("cache",)
""",
    "makes tensors in forward": """
class Model(nn.Module):
    def forward(self, scores, lengths):
        mask = torch.arange(scores.shape[1], device="cuda") < lengths[:, None]
        out = scores.new_zeros(scores.shape, device="cuda")
        out.copy_(torch.softmax(scores.masked_fill(~mask, -1e30), -1))
        torch.cuda.synchronize()
        return out
def get_inputs(*, rows=12, longest=33):
    return [torch.randn(rows, longest, device="cuda"), torch.randint(1, longest + 1, (rows,), device="cuda")]
def real(scores, lengths): return torch.arange(scores.shape[1], device="cuda") < lengths[:, None]
COMPARE = {0: {"valid": real}}
""",
    "loops over offsets": """
class Model(nn.Module):
    def forward(self, x, offsets):
        out, ends = torch.empty(len(offsets) - 1, x.shape[1], device="cuda"), offsets.tolist()
        for at, (first, last) in enumerate(zip(ends, ends[1:])): out[at] = x[first:last].sum(0)
        return out
def get_inputs(*, segments=5, tokens=23):
    inner = torch.randint(0, tokens + 1, (segments - 1,), device="cuda").sort().values
    ends = [torch.tensor([end], device="cuda") for end in (0, tokens)]
    return [torch.randn(tokens, 16, device="cuda"), torch.cat([ends[0], inner, ends[1]])]
""",
}


def twin(text: str) -> str:
    """The task without the name of a device."""
    text = re.sub(r', device=("cuda"|DEVICE)|device="cuda"|\.cuda\(\)|\.to\("cuda:0"\)', "", text)
    return text.replace("torch.cuda.synchronize()", "pass")


@pytest.fixture
def loaded(tmp_path):
    def of(text: str, device: str = "cpu") -> problem.Reference:
        path = tmp_path / f"reference{len(list(tmp_path.iterdir()))}.py"
        path.write_text(HEAD + text)
        return load_reference(str(path), device)

    return of


def stated(sandbox: Sandbox, tmp_path, text: str) -> list[tuple]:
    """(name of the variant, shapes) of each case, but for sizes that are drawn."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
    path.write_text(HEAD + text)
    with sandbox.folder("inputs") as folder:
        prepared = cases.prepare_task(sandbox, path, None, None, [0, 1], 300, True, folder)
    named = [(one.variant.name if one.variant else "own", one.shapes) for one in prepared.cases]
    return [one for one in named if not one[0].startswith("drawn sizes")]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_names_a_gpu_gets_the_variants_of_its_twin(interpreter, tmp_path, name):
    named, plain = (stated(interpreter, tmp_path, text) for text in (TASKS[name], twin(TASKS[name])))
    assert named == plain and len(named) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_on_a_gpu_it_gets_at_least_the_variants_of_the_interpreter(interpreter, tmp_path, name):
    with Sandbox("cuda") as sandbox:
        on_gpu = stated(sandbox, tmp_path, TASKS[name])
    assert {name for name, _ in stated(interpreter, tmp_path, TASKS[name])} <= {name for name, _ in on_gpu}


@pytest.mark.parametrize("name", TASKS)
def test_it_has_the_work_of_its_twin(loaded, name):
    named, plain = (work.estimate(loaded(text), "default", None, "cpu") for text in (TASKS[name], twin(TASKS[name])))
    assert named == plain


def test_it_is_tried_on_shapes_alone(loaded):
    def devices(model, inputs) -> list[str]:
        return [one.device.type for one in (*inputs, *model.state_dict().values(), problem.call(model, inputs))]

    reference = loaded(TASKS["buffers and arguments of the constructor"])
    assert blank.on_meta(reference, "default", None, devices) == ["meta"] * 4


def test_what_the_file_made_on_the_gpu_keeps_no_trial_from_the_cpu(loaded):
    text = TASKS["a constant of the module"]
    on_gpu, on_cpu = loaded(text, "meta"), loaded(text)  # the device meta stands in for the GPU
    case = on_cpu.case("default", 0, None, "cpu")
    assert preparing.runs(on_gpu, case)
    groups = [variants.Shapes(reference, "default", case).groups() for reference in (on_gpu, on_cpu)]
    assert groups[0] == groups[1] != []


def made(expression: str, device: str):
    with named_devices.reading(torch.device(device)):
        return eval(expression, {"torch": torch})


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "expression",
    [
        'torch.zeros(3, device="cuda")',
        'torch.full((3,), 1.0, device=torch.device("cuda", 1))',
        'torch.tensor([1.0]).to("cuda:1", torch.float16)',
        'torch.tensor([1.0]).to(device="cuda", non_blocking=True)',
        "torch.tensor([1.0]).cuda(non_blocking=True)",
        'torch.ones(2).new_zeros(3, device="cuda")',
        'torch.zeros_like(torch.ones(2), device=f"cuda:{torch.cuda.current_device()}")',
        "torch.nn.Linear(3, 2).cuda().weight",
        'torch.nn.Linear(3, 2).to("cuda", torch.bfloat16).bias',
        'torch.nn.Linear(3, 2, device="cuda").weight',
        'torch.set_default_device("cuda") or torch.zeros(3)',
        'torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))',
    ],
)
def test_a_named_gpu_is_the_device_at_hand(expression, device):
    assert made(expression, device).device.type == device


def test_blocks_on_a_gpu_are_blocks_at_hand():
    with named_devices.reading(torch.device("cpu")):
        with torch.device("cuda"), torch.cuda.device(0):
            x = torch.ones(2, 2)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
        with torch.amp.autocast("cuda"):
            assert (x @ x).dtype == torch.float16
        torch.cuda.set_device(0)
        assert isinstance(torch.Generator(device="cuda"), torch.Generator) and x.device.type == "cpu"


def test_nothing_changes_on_the_gpu_itself_without_its_name_and_afterwards(tmp_path):
    named, plain = tmp_path / "named.py", tmp_path / "plain.py"
    named.write_text('DEVICE = "cuda"')
    plain.write_text("DEVICE = None")
    before = [getattr(owner, name) for owner, name, _ in named_devices.STAND_INS]
    for files in (("cuda", named), ("cpu", plain), ("meta", plain)):
        with named_devices.read_as(*files):
            assert torch._C._len_torch_function_stack() == 0 and torch.Generator is before[0]
    with pytest.raises(ZeroDivisionError), named_devices.read_as("cpu", plain, named):
        assert torch._C._len_torch_function_stack() == 2 and torch.Generator is not before[0]
        raise ZeroDivisionError
    assert torch._C._len_torch_function_stack() == 0
    assert before == [getattr(owner, name) for owner, name, _ in named_devices.STAND_INS]


KERNEL = """
import triton
import triton.language as tl
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)
def kernel_function(x, y):
    out = torch.empty(x.shape, device="cuda")
    with torch.cuda.device(0):
        add[(triton.cdiv(x.numel(), 256),)](x.contiguous(), y.contiguous(), out, x.numel(), BLOCK=256)
    return out
"""


@pytest.mark.parametrize(("wrong", "status"), [("+ tl.load", "OK"), ("- tl.load", "WRONG_VALUES")])
def test_a_kernel_that_names_the_gpu_is_judged_in_the_interpreter(interpreter, tmp_path, wrong, status):
    task, kernel = TASKS["draws by a generator"], KERNEL.replace("+ tl.load", wrong)
    found = judge(interpreter, tmp_path, task, kernel)
    assert found["status"] == status, found["summary"]


RAMP = """
class Model(nn.Module):
    def forward(self, x): return x * torch.arange(8, device="cuda")
def get_inputs(): return [torch.randn(4, 8)]
"""


def test_a_kernel_and_its_opponent_that_name_it_are_timed(run_here, tmp_path):
    kernel = "def kernel_function(x): return torch.arange(8, device='cuda') * x\n"
    kernel, reference = written(tmp_path, RAMP, kernel)
    subject = "--kernel", kernel, "--reference", reference, "--against", reference
    done = run_here("measure_kernel_time.py", *subject, "--device", "cpu-interpreter", "--rep-ms", 1)
    assert done.returncode in (0, 1) and f"against {reference}" in done.stdout, done.stderr


def test_a_function_of_compare_may_name_it(interpreter, tmp_path):
    kernel = """
def kernel_function(scores, lengths):
    mask = torch.arange(scores.shape[1]) < lengths[:, None]
    return torch.softmax(scores.masked_fill(~mask, -1e30), -1) + 7 * ~mask
"""
    found = judge(interpreter, tmp_path, TASKS["makes tensors in forward"], kernel, libraries=True)
    assert found["status"] == "OK", found["summary"]
