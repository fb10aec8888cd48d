"""Tasks whose outputs are gradients. torch on the CPU stands in for kernels here; tests/kernels has ones in Triton."""

import pytest
from kernelopt.measure import timing
from kernelopt.measure.oracle import Oracle
from kernelopt.worker import problem, work
from written_tasks import judge, written

LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
    def forward(self, x, dy):
        with torch.enable_grad():
            x.requires_grad_()
            y = torch.relu(x @ self.weight.t())
            dx, dw = torch.autograd.grad(y, (x, self.weight), dy)
        return y, dx, dw
def get_inputs(): return [torch.randn(12, 16), torch.randn(12, 8)]
"""
FUNCTION = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = (x @ weight.t()).clamp(min=0)
        ctx.save_for_backward(x, weight, y)
        return y
    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        dy = dy * (y > 0)
        return dy @ weight, dy.t() @ x
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16))
    def forward(self, x, dy):
        with torch.enable_grad():
            x.requires_grad_()
            y = Function.apply(x, self.weight)
            dx, dw = torch.autograd.grad(y, (x, self.weight), dy)
        return y, dx, dw
"""


@pytest.mark.parametrize(
    ("right", "wrong", "status"),
    [
        ("", "", "OK"),
        ("dy = dy * (y > 0)", "dy = dy * (y > -1)", "WRONG_VALUES"),
        ("dy.t() @ x", "dy.t() @ x / len(x)", "WRONG_VALUES"),
        ("return y, dx, dw", "self.weight.grad = dw; return y, dx, self.weight.grad", "OK"),
        ("return y, dx, dw", "x.add_(1); x.sub_(1); return y, dx, dw", "INPUT_MUTATED"),
    ],
)
def test_gradients_are_outputs(interpreter, tmp_path, right, wrong, status):
    wrong = wrong.replace("x.add_(1); x.sub_(1)", "x.detach().mul_(1.1)")
    found = judge(interpreter, tmp_path, LINEAR, FUNCTION.replace(right, wrong), only_these_shapes=bool(right))
    assert found["status"] == status, found["summary"]
    assert found["status"] != "OK" or all(case["oracle"] == "fp64" for case in found["cases"] if "oracle" in case)


@pytest.mark.parametrize("file", [LINEAR, FUNCTION])
def test_whoever_forgets_to_enable_gradients_is_told(interpreter, tmp_path, file):
    forgets = file.replace("with torch.enable_grad():", "if True:")
    reference, kernel = (forgets, FUNCTION) if file is LINEAR else (LINEAR, forgets)
    found = judge(interpreter, tmp_path, reference, kernel, only_these_shapes=True)
    assert found["status"] == ("INVALID_REFERENCE" if file is LINEAR else "RUNTIME_ERROR")
    assert "stands inside `with torch.enable_grad():`" in found["summary"]


def test_a_gradient_that_autograd_happens_to_transpose_is_explained(interpreter, tmp_path):
    product = LINEAR.replace("return y, dx, dw", "return y, dx.t().contiguous().t(), dw")
    found = judge(interpreter, tmp_path, product, FUNCTION, only_these_shapes=True)
    assert found["status"] == "WRONG_STRIDE" and "can return x.contiguous()" in found["summary"]
    dense = product.replace(".t(), dw", ".t().contiguous(), dw")
    assert judge(interpreter, tmp_path, dense, FUNCTION, only_these_shapes=True)["status"] == "OK"


def test_a_kernel_that_asks_its_inputs_for_gradients_is_timed(interpreter, tmp_path):
    kernel, reference = written(tmp_path, LINEAR, FUNCTION)
    cases = timing.inputs(interpreter, reference, None, ["default"])
    timed = timing.measure(interpreter, kernel, reference, cases, warmup_ms=1, rep_ms=1)["default"]
    assert Oracle(interpreter, reference).fault_of_timed([timed.outputs]) is None


def test_products_of_the_backward_pass_are_counted(tmp_path):
    _, reference = written(tmp_path, LINEAR, FUNCTION)
    estimated = work.estimate(problem.Reference(reference), "default", None, "cpu").work
    assert estimated.flops == 3 * 2 * 12 * 8 * 16
    assert estimated.bytes_in == 4 * (12 * 16 + 12 * 8 + 8 * 16)
    assert estimated.bytes_out == 4 * (12 * 8 + 12 * 16 + 8 * 16)
