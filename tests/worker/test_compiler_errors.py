"""Errors of compilers: the first one is reported whole, whatever follows it in the process."""

import shutil
import subprocess

import forks_with_torch
import pytest
from conftest import BUNDLE
from kernelopt.worker import compiler_errors, faults

NINJA = """\
Error building extension 'k': [1/3] /usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -c k.cu -o k.o
FAILED: [code=2] k.o
/usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -std=c++20 -c k.cu -o k.o
k.cu(4): warning #177-D: variable "spare" was declared but never referenced
      int spare;
          ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

k.cu(5): error: identifier "foo" is undefined
      out[i] = foo(x[i]);
               ^

k.cu(9): error: expected a ";"
  }
  ^

2 errors detected in the compilation of "k.cu".
[2/3] c++ -MMD -MF main.o.d -c main.cpp -o main.o
ninja: build stopped: subcommand failed.
"""
ERRORS = """\
k.cu(5): error: identifier "foo" is undefined
      out[i] = foo(x[i]);
               ^
k.cu(9): error: expected a ";"
  }
  ^
2 errors detected in the compilation of "k.cu"."""


class CompilationError(Exception):
    """Has the name of Triton's."""


def raised(function) -> dict:
    """The description of what `function` raises."""
    with pytest.raises(Exception) as caught:
        function()
    return faults.describe(caught.value)


@pytest.fixture(autouse=True)
def _nothing_noted():
    held = compiler_errors._noted, compiler_errors._passed_over, compiler_errors._kernels
    for one in held:
        one.clear()
    yield
    for one in held:
        one.clear()


def test_what_ptxas_tells_of_resources_is_no_part_of_an_error():
    told = "error: could not allocate output register for constraint 'v'\n    in f"
    log = "ptxas-blackwell info    : Compiling entry function 'f' for 'sm_90a'\n    0 bytes stack frame\nptxas info : Used 9"
    assert compiler_errors.errors_of(f"{told}\n{log}") == told


def test_tritons_representation_is_no_part_of_an_error():
    """Triton 3.9 for sm_75, a product of int8, shortened."""
    told = "k.py:19:15: error: 'arith.extf' op operand #0 must be floating-point-like\n    acc = tl.dot(x, y)\n      ^"
    assert compiler_errors.errors_of(f"{told}\n#blocked = #ttg.blocked<{{}}>\nmodule {{\n  tt.func public @mm(") == told


def test_all_errors_of_nvcc_are_kept_and_the_rest_is_dropped():
    assert faults.describe(RuntimeError(NINJA)) == {
        "status": "COMPILE_ERROR",
        "type": "RuntimeError",
        "message": ERRORS,
    }


def test_a_first_error_is_whole_however_long_it_is_and_the_others_are_counted():
    first = "k.cu(5): error: no instance matches\n" + "\n".join(f"    detected during {n:060}" for n in range(60))
    others = [f'k.cu({n}): error: identifier "foo{n}" is undefined' for n in range(100)]
    message = compiler_errors.errors_of("\n".join([first, *others]))
    assert message == f"{first}\n(100 more errors)"
    message = compiler_errors.errors_of("\n".join(others))
    shown = message.splitlines()
    assert shown[:-1] == others[: len(shown) - 1] and shown[-1] == f"({101 - len(shown)} more errors)"


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("nvcc fatal   : Unsupported gpu architecture 'compute_999'", True),
        ("ptxas error   : Entry function 'k' uses too much shared data", True),
        ("ptxas fatal   : Unresolved extern function 'f'", True),
        ("/usr/bin/ld: k.o: in function `f': k.cpp:3: undefined reference to `g'", True),
        ("/usr/bin/ld: cannot find -lcudart: No such file or directory", True),
        ("/usr/bin/ld: warning: k.o: missing .note.GNU-stack section", False),
        ("main.cpp:3:9: fatal error: nowhere.h: No such file or directory", True),
        ("main.cpp:3:9: warning: unused variable 'error' [-Wunused]", False),
        ("collect2: note: nothing", False),
    ],
)
def test_lines_that_begin_an_error(line, is_error):
    assert bool(compiler_errors.ERROR_LINE.search(line)) == is_error


def test_an_error_during_the_handling_of_a_compile_error_does_not_hide_it():
    def fallback():
        try:
            raise RuntimeError(NINJA)
        except RuntimeError:
            raise ImportError("no fallback either") from None

    told = raised(fallback)
    assert told["status"] == "COMPILE_ERROR"
    assert told["message"] == f"{ERRORS}\nthen ImportError: no fallback either"


def test_of_two_compile_errors_the_first_is_told():
    def second():
        try:
            raise RuntimeError(NINJA)
        except RuntimeError as error:
            raise RuntimeError("Error building extension 'l': l.cu(1): error: no bar") from error

    assert raised(second)["message"].startswith(ERRORS)


def test_of_nested_triton_errors_the_innermost_is_told():
    def nested():
        try:
            try:
                raise NameError("foo is not defined")
            except NameError as error:
                raise CompilationError("at 2:4:\n    foo(x)\n    ^") from error
        except CompilationError as error:
            raise CompilationError("at 9:4:\n    helper(x)\n    ^") from error

    told = raised(nested)
    assert told["status"] == "COMPILE_ERROR" and told["message"].startswith("CompilationError: at 2:4:\n    foo(x)")


def test_an_error_after_a_swallowed_compile_error_tells_it():
    def compiled(source):
        raise RuntimeError(NINJA)

    with pytest.raises(RuntimeError):
        compiler_errors.noting(compiled)("source")
    told = faults.describe(AttributeError("'NoneType' object has no attribute 'forward'"))
    assert told["status"] == "COMPILE_ERROR" and told["message"].startswith(ERRORS)
    assert told["message"].endswith("then AttributeError: 'NoneType' object has no attribute 'forward'")
    assert faults.describe(faults.CheatError("it cheats"))["status"] == "CHEAT_SUSPECT"


def test_a_compilation_that_succeeds_after_one_that_failed_is_a_fallback():
    def compiled(source):
        if source == "bad":
            raise RuntimeError(NINJA)

    noting = compiler_errors.noting(compiled)
    with pytest.raises(RuntimeError):
        noting("bad")
    noting("good")
    assert faults.describe(ValueError("later"))["status"] == "RUNTIME_ERROR"


def test_an_error_after_a_fallback_tells_what_the_fallback_was_for():
    """Of two extensions the first fails and the second succeeds; nvcc's message was lost. What an autotuner tries of
    Triton and drops is no such fallback."""

    def compiled(source):
        if source == "bad":
            raise RuntimeError(NINJA)

    tried, built = compiler_errors.noting(compiled), compiler_errors.noting(compiled, is_extension=True)
    for noting, said in ((tried, "ValueError: later"), (built, f"ValueError: later\n{faults.PASSED_OVER}\n{ERRORS}")):
        with pytest.raises(RuntimeError):
            noting("bad")
        noting("good")
        assert faults.describe(ValueError("later")) == {
            "status": "RUNTIME_ERROR",
            "type": "ValueError",
            "message": said,
        }
    assert faults.describe(faults.CheatError("it cheats"))["message"] == "it cheats"


def test_what_a_compiler_prints_belongs_to_its_error():
    """load_inline(verbose=True) prints the compiler's output, and MLIR prints why a pass failed."""

    def compiled():
        subprocess.run(["echo", "k.cu(5): error: no foo"], check=True)
        raise RuntimeError("Error building extension 'k'")

    assert raised(compiler_errors.noting(compiled))["message"] == "k.cu(5): error: no foo"


KERNEL = """
from torch.utils.cpp_extension import load
try:
    extension = load("k", [__file__.replace(".py", ".cpp")], verbose={verbose})
except Exception:
    extension = None


def kernel_function(x):
    return extension.add(x)
"""


@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("c++")), reason="needs ninja and c++")
@pytest.mark.parametrize("verbose", [False, True])
def test_a_kernel_that_swallows_its_compile_error_is_told_it(tmp_path, run_here, verbose):
    (tmp_path / "reference.py").write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x\n"
        "def get_inputs(): return [torch.randn(4)]\n"
    )
    (tmp_path / "kernel.py").write_text(KERNEL.format(verbose=verbose))
    (tmp_path / "kernel.cpp").write_text("int one = undeclared;\nint two = undeclared_too;\n")
    done = run_here(
        "verify_kernel.py",
        *("--kernel", tmp_path / "kernel.py", "--reference", tmp_path / "reference.py"),
        *("--device", "cpu-interpreter", "--quick"),
    )
    assert done.returncode == 1 and "COMPILE_ERROR" in done.stdout
    for line, name in ((1, "undeclared"), (2, "undeclared_too")):
        assert f"kernel.cpp:{line}:11: error: " in done.stdout and name in done.stdout
    assert "ninja: build stopped" not in done.stdout and "has no attribute 'add'" in done.stdout


ALOUD = """
#include <Python.h>
#warning this one is slow
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "k", "", -1, nullptr};
PyMODINIT_FUNC PyInit_k() { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("c++")), reason="needs ninja and c++")
def test_what_the_compiler_says_of_a_build_that_succeeds_is_known(tmp_path):
    """torch drops it, unless the call is verbose. ptxas names there what makes a kernel slow."""
    (tmp_path / "kernel.py").write_text("cpp_extension")
    (tmp_path / "kernel.cpp").write_text(ALOUD)
    done = forks_with_torch.run(
        f"""if True:
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(BUNDLE / "tools")!r})
        from torch.utils import cpp_extension
        from kernelopt.worker import compiler_errors
        compiler_errors.watch(Path({str(tmp_path / "kernel.py")!r}))
        cpp_extension.load("k", [{str(tmp_path / "kernel.cpp")!r}])
        print("known:", "this one is slow" in compiler_errors.printed())""",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    assert "known: True" in done.stdout, done.stdout


INLINE = """\
from torch.utils.cpp_extension import load_inline
SOURCE = r'''
#include <cuda_runtime.h>
__global__ void k(float* x) {
  x[0] = foo;
}
__global__ void other(float* x) {
  x[0] = foo;
}
'''
HOST = "int f() { return bar; }"
"""


@pytest.mark.parametrize(
    ("error", "named"),
    [
        ("/build/cuda.cu(5): error: identifier", "kernel.py(5): error: identifier"),
        ("/build/cuda.cu(9): error: identifier", "kernel.py(8): error: identifier"),
        ("/build/main.cpp:2:3: error: ‘bar’", "main.cpp:2:3: error: ‘bar’"),
        ("/build/cuda.cu(1): error: no line of the kernel", "cuda.cu(1): error: no line of the kernel"),
        ("/build/cuda.cu(99): error: past the end", "cuda.cu(99): error: past the end"),
        ("/gone/cuda.cu(5): error: cannot be read", "cuda.cu(5): error: cannot be read"),
        (
            '/build/cuda.cu(5): error: x\n  detected during instantiation of "T" at line 9\n',
            'kernel.py(5): error: x\n  detected during instantiation of "T" of kernel.py(8)',
        ),
        (
            '/build/main.cpp:2:3: error: y\n/build/cuda.cu(5): error: x\n  detected during "T" at line 9\n',
            'main.cpp:2:3: error: y\nkernel.py(5): error: x\n  detected during "T" of kernel.py(8)',
        ),
        ('/build/cuda.cu(5): error: a\n1 error in "/build/cuda.cu"', 'kernel.py(5): error: a\n1 error in "cuda.cu"'),
        ("/own/k.cu(5): error: a file of the kernel's own", "/own/k.cu(5): error: a file of the kernel's own"),
    ],
)
def test_an_error_in_a_source_that_load_inline_wrote_names_the_kernels_file(tmp_path, error, named):
    """Line 8 of what torch wrote is the kernel's line 7, since torch puts lines of its own before and between."""
    kernel, build = tmp_path / "kernel.py", tmp_path / "build"
    kernel.write_text(INLINE)
    build.mkdir()
    own = INLINE.splitlines()
    (build / "cuda.cu").write_text("\n".join(["#include <torch/types.h>", "", *own[2:6], "", *own[6:9], ""]))
    (build / "main.cpp").write_text("#include <torch/extension.h>\nint f() { return bar; }\n")
    compiler_errors._kernels.append(kernel)
    text = compiler_errors.errors_of(error.replace("/build", str(build)))
    assert text == named.replace("/build", str(build))
