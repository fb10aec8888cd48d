"""worker.light_headers: extensions are compiled without torch's C++ frontend first, with all of torch where a name is
missing. torch's compilation is stood in for, but in the test of the headers themselves."""

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import forks_with_torch
import pytest
from conftest import BUNDLE

FOLDER = BUNDLE / "tools/kernelopt/worker/light_headers"
HEAD = f"""if True:
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, {str(BUNDLE / "tools")!r})
    from torch.utils import cpp_extension
    from kernelopt.worker import builds, compiler_errors, light_headers
    attempts = []
    refusal = None  # of a build with the light headers
    def compile(name, extra_include_paths, extra_cuda_cflags, **options):
        light = str(light_headers.FOLDER) in (extra_include_paths or [])
        attempts.append([name, extra_include_paths or [], extra_cuda_cflags or []])
        if light and refusal or refusal == "whatever":
            raise RuntimeError(f"main.cpp:2:5: error: {{refusal}}")
    cpp_extension._write_ninja_file_and_build_library = compile
    cpp_extension._import_module_from_library = lambda name, folder, _: name
    cpp_extension._write_ninja_file = lambda **_: None
    kernel = Path(os.environ["TORCH_EXTENSIONS_DIR"], "kernel.py")
    kernel.write_text("cpp_extension")
    light_headers.install()
    compiler_errors.watch(kernel)
    builds.keep_apart()
    light_headers.install()  # of the second kernel
"""


def answer(tmp_path, code: str):
    """What the code puts into `answer`."""
    whole = HEAD + code + "\n    print('answer', json.dumps(answer))"
    done = forks_with_torch.run(whole, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.rsplit("answer ", 1)[1])


def test_the_light_headers_are_looked_in_first(tmp_path):
    code = """
    cpp_extension.load_inline("ext", "int a;", extra_include_paths=["/mine"])
    answer = attempts
    """
    assert answer(tmp_path, code) == [["ext", [str(FOLDER), "/mine"], []]]


@pytest.mark.parametrize(
    "refusal",
    [
        'namespace "torch" has no member "save"',
        'name followed by "::" must be a class or namespace name',
        "this declaration has no storage class or type specifier",
        'identifier "foo" is undefined',
        "'nn' is not a member of 'torch'",
        "'torch::nn' has not been declared",
        "'foo' was not declared in this scope",
        "invalid use of incomplete type 'class std::thread'",
    ],
)
def test_where_a_name_is_missing_torchs_own_headers_follow(tmp_path, refusal):
    """And another process begins with them; nobody is told of the first attempt."""
    code = f"""
    refusal = {refusal!r}
    name = cpp_extension.load_inline("ext", "int a;")
    answer = [name, attempts, compiler_errors.noted(), compiler_errors.passed_over()]
    """
    light, own = ["ext", [str(FOLDER)], []], ["ext", [], []]
    assert answer(tmp_path, code) == ["ext", [light, own], None, None]
    assert answer(tmp_path, code) == ["ext", [own], None, None]


def test_an_error_that_no_header_mends_is_the_kernels(tmp_path):
    code = """
    refusal = 'expected a ";"'
    try:
        cpp_extension.load_inline("ext", "int a")
    except RuntimeError as error:
        answer = [str(error), len(attempts), compiler_errors.noted()]
    """
    message, attempts, noted = answer(tmp_path, code)
    assert 'expected a ";"' in message and attempts == 1 and 'expected a ";"' in noted


@pytest.mark.parametrize(
    "text", ["PYBIND11_MODULE(a, m) {}", "py::object a;", "PyObject* a;", "#include <pybind11/numpy.h>"]
)
def test_nvcc_reads_pythons_headers_where_the_source_names_python(tmp_path, text):
    code = f"""
    cpp_extension.load_inline("one", "", cuda_sources={text!r}, with_cuda=True, extra_cuda_cflags=["-O3"])
    cpp_extension.load_inline("two", {text!r}, cuda_sources="int happy;", with_cuda=True)
    answer = [flags for _, _, flags in attempts]
    """
    assert answer(tmp_path, code) == [["-O3", "-DLIGHT_HEADERS_WITH_PYTHON"], []]


def test_a_folder_that_the_kernel_names_has_torchs_own_headers(tmp_path):
    own = tmp_path / "elsewhere" / "own"
    own.mkdir(parents=True)
    code = f"""
    cpp_extension.load_inline("ext", "int a;", build_directory={str(own)!r})
    answer = attempts
    """
    assert answer(tmp_path, code) == [["ext", [], []]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_conversion_between_python_and_cpp_is_lost(tmp_path):
    """One that is missing would not fail to compile: the call would fail."""
    done = forks_with_torch.run(
        "from torch.utils import cpp_extension; print('\\n'.join(cpp_extension.include_paths()))"
    )
    folders = [*done.stdout.split(), sysconfig.get_path("include", scheme="posix_prefix")]
    source = tmp_path / "main.cpp"
    source.write_text("#include <torch/extension.h>\n")

    def read(*options: str) -> set[str]:
        flags = [*options, *(part for folder in folders for part in ("-isystem", folder))]
        command = ["g++", "-M", "-std=c++20", *flags, source]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return set(re.findall(r"\S+\.h\b", listed))

    whole, light = read(), read("-I", str(FOLDER))
    converts = {path for path in whole if "type_caster" in Path(path).read_text(errors="replace")}
    assert len(converts) > 5 and converts <= light
    assert sum("/nn/" in path for path in whole) > 50 and not any("/nn/" in path for path in light)
