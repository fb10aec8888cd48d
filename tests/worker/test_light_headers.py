"""worker.light_headers: extensions are compiled without torch's C++ frontend first, and with all of torch where that
fails. torch's compilation is stood in for, but in the tests of the headers themselves."""

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
    import os, sys
    from pathlib import Path
    sys.path.insert(0, {str(BUNDLE / "tools")!r})
    from torch.utils import cpp_extension
    from kernelopt.worker import builds, compiler_errors, light_headers
    attempts = []
    refusal = None  # of a build with the light headers
    def compile(name, extra_include_paths, extra_cuda_cflags, verbose, **options):
        light = str(light_headers.FOLDER) in (extra_include_paths or [])
        attempts.append([name, extra_include_paths or [], extra_cuda_cflags or [], verbose])
        if light and refusal:
            raise RuntimeError(refusal)
    cpp_extension._write_ninja_file_and_build_library = compile
    cpp_extension._import_module_from_library = lambda name, folder, _: name
    kernel = Path(os.environ["TORCH_EXTENSIONS_DIR"], "kernel.py")
    kernel.write_text("cpp_extension")
    light_headers.install()
    compiler_errors.watch(kernel)
    builds.keep_apart()
    light_headers.install()  # of the second kernel
"""


def answer(tmp_path, code: str):
    """What the code puts into `answer`."""
    return forks_with_torch.answer(HEAD + code, TORCH_EXTENSIONS_DIR=str(tmp_path))


def test_the_light_headers_are_looked_in_first(tmp_path):
    code = """
    cpp_extension.load_inline("ext", "int a;", extra_include_paths=["/mine"])
    answer = attempts
    """
    assert answer(tmp_path, code) == [["ext", [str(FOLDER), "/mine"], [], False]]


@pytest.mark.parametrize(
    "refusal",
    [
        'cuda.cu(2): error: name followed by "::" must be a class or namespace name',
        "main.cpp:3:16: error: 'nn' is not a namespace-name",
        'cuda.cu(3): catastrophic error: cannot open source file "x.h"',
        "main.cpp:1:10: fatal error: x.h: No such file or directory",
    ],
)
def test_what_does_not_compile_so_is_compiled_with_torchs_own_headers(tmp_path, refusal):
    """And another process begins with them; nobody is told of the first attempt. Of a verbose build torch's error would
    not hold what the compiler said."""
    code = f"""
    refusal = "Error building extension 'ext': nvcc -c cuda.cu " + {refusal!r}
    name = cpp_extension.load_inline("ext", "int a;", verbose=True)
    answer = [name, attempts, compiler_errors.noted(), compiler_errors.passed_over()]
    """
    light, own = ["ext", [str(FOLDER)], [], False], ["ext", [], [], True]
    assert answer(tmp_path, code) == ["ext", [light, own], None, None]
    assert answer(tmp_path, code) == ["ext", [own], None, None]


@pytest.mark.parametrize(
    "refusal",
    [
        "ptxas error   : Entry function '_Z1kPf' uses too much shared data (0x61a80 bytes, 0xc000 max)",
        "ptxas /tmp/tmpxft_1-6_cuda.ptx, line 26; error   : Unknown symbol 'foo'",
        "/usr/bin/ld: cannot find -lcublas: No such file or directory",
        "main.o: in function `f(at::Tensor)': main.cpp:(.text+0x13): undefined reference to `g(at::Tensor)'",
        "nvcc fatal   : Unsupported gpu architecture 'compute_20'",
        "Ninja is required to load C++ extensions",
    ],
)
def test_what_no_header_mends_is_tried_once(tmp_path, refusal):
    code = f"""
    refusal = {refusal!r}
    try:
        cpp_extension.load_inline("ext", "int a")
    except RuntimeError as error:
        answer = [str(error), len(attempts), compiler_errors.noted()]
    """
    message, attempts, noted = answer(tmp_path, code)
    assert message == refusal and attempts == 1 and refusal in noted


@pytest.mark.parametrize(
    "text", ["PYBIND11_MODULE(a, m) {}", "py::object a;", "PyObject* a;", "#include <pybind11/numpy.h>"]
)
def test_nvcc_reads_pythons_headers_where_the_source_names_python(tmp_path, text):
    code = f"""
    cpp_extension.load_inline("one", "", cuda_sources={text!r}, with_cuda=True, extra_cuda_cflags=["-O3"])
    cpp_extension.load_inline("two", {text!r}, cuda_sources="int happy;", with_cuda=True)
    answer = [flags for _, _, flags, _ in attempts]
    """
    assert answer(tmp_path, code) == [["-O3", "-DLIGHT_HEADERS_WITH_PYTHON"], []]


def test_a_kernel_with_a_folder_or_headers_of_its_own_has_torchs_headers(tmp_path):
    """Also where its folder lies among those of the tools."""
    folders = [tmp_path / "elsewhere" / "own", tmp_path / "own"]
    mine = tmp_path / "mine"
    for folder in (*folders, mine / "torch"):
        folder.mkdir(parents=True)
    (mine / "torch" / "all.h").touch()
    code = f"""
    for folder in {list(map(str, folders))!r}:
        cpp_extension.load_inline("ext", "int a;", build_directory=folder)
    cpp_extension.load_inline("other", "int a;", extra_include_paths=[{str(mine)!r}])
    answer = [paths for _, paths, _, _ in attempts]
    """
    assert answer(tmp_path, code) == [[], [], [str(mine)]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("options", [["-D__CUDACC__"], ["-D__CUDACC__", "-DLIGHT_HEADERS_WITH_PYTHON"], []])
def test_nvcc_never_reads_pybind11_without_torchs_conversions(tmp_path, options):
    """A header of the kernel's may include it, where the source does not name it: calls would fail, not the build."""
    (tmp_path / "found" / "pybind11").mkdir(parents=True)
    (tmp_path / "found" / "pybind11" / "pybind11.h").write_text("int bound;\n")
    (tmp_path / "k.cpp").write_text("#include <pybind11/pybind11.h>\n")
    command = ["g++", "-E", *options, "-I", FOLDER, "-isystem", tmp_path / "found", tmp_path / "k.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    is_refused = options == ["-D__CUDACC__"]
    assert (done.returncode != 0) == is_refused == (".h:4:2: error: #error" in done.stderr)
    assert is_refused or "int bound;" in done.stdout


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
