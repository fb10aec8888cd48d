"""CUDA C++ that torch's load and load_inline would build: compiled for a GPU that need not be here, and not run."""

import inspect
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..hardware.card import CompileTarget
from . import compiler_errors

# What torch's headers include and this machine may lack: two that only a torch with CUDA has, and the types of
# libraries that a toolkit may come without. They are looked for last.
MISSING_HEADERS = {
    "c10/cuda/impl/cuda_cmake_macros.h": "",
    "ATen/cuda/CUDAConfig.h": "".join(
        f"#define AT_{name}_ENABLED() 0\n" for name in ("CUDNN", "CUSPARSELT", "HIPSPARSELT", "MAGMA", "ROCM")
    ),
    "cusparse.h": "typedef struct cusparseContext* cusparseHandle_t;\ntypedef int cusparseStatus_t;\n",
    "cublas_v2.h": "typedef struct cublasContext* cublasHandle_t;\ntypedef int cublasStatus_t;\n",
    "cublasLt.h": "typedef struct cublasLtContext* cublasLtHandle_t;\n",
    "cusolver_common.h": "typedef int cusolverStatus_t;\n",
    "cusolverDn.h": "typedef struct cusolverDnContext* cusolverDnHandle_t;\n",
}
HOST_SUFFIXES = (".cpp", ".cc", ".cxx")
LIBRARIES = re.compile(r"\bcu(blas|blasLt|sparse|solver|dnn|rand|fft)", re.IGNORECASE)
NO_LIBRARY = "this machine's CUDA toolkit may lack a library's headers that it uses: "
NOT_LINKED = re.compile(r"\bld\S*: cannot find -lcu|\bcuda_runtime(_api)?\.h: No such file")
NO_NVCC = "nvcc is not here: run `bash scripts/setup.sh nvcc`, or install the CUDA toolkit, to compile CUDA C++"
NO_HIPCC = "hipcc is not here: install ROCm, or put its hipcc on the PATH, to compile CUDA C++ for AMD"
STANDARD = re.compile(r"cuda_flags \+ \['(-std=[^']+)'\]")


class Stop(BaseException):
    """The call needs a result that no GPU computes. No candidate's `except Exception` catches it."""


class Extensions:
    """CUDA C++ that torch's load and load_inline would build. `files`: what the compiler made of it, cubins or listings
    of AMD's code; `log`: what it printed."""

    def __init__(self, target: CompileTarget, compiler: str | None, folder: Path):
        """compiler: the path of nvcc, for AMD of hipcc; None where there is none. Made before torch answers for the
        target: whether it can link with CUDA is asked of torch itself."""
        self._target, self._compiler, self._folder = target, compiler, folder
        self._links_with_cuda = torch.version.cuda is not None
        self.files: list[str] = []
        self.log = ""
        self.lacking: str | None = None

    def install(self) -> None:
        """Take the place of what load and load_inline call."""
        from torch.utils import cpp_extension

        build = cpp_extension._jit_compile
        names = inspect.signature(build)

        def compiled(*arguments, **options):
            return self._compile(build, names.bind(*arguments, **options).arguments)

        compiled.__signature__ = names
        cpp_extension._jit_compile = compiled

    def _compile(self, build: Callable, given: dict):
        """What stands in for the extension. Raises as the build does, and Stop where the compiler is lacking."""
        sources = given["sources"] if isinstance(given["sources"], list | tuple) else [given["sources"]]
        sources = [str(source) for source in sources]
        if not any(source.endswith((".cu", ".cuh")) for source in sources):
            return build(**given)
        if self._compiler is None:
            self.lacking = NO_NVCC if self._target.is_nvidia else NO_HIPCC
            raise Stop(self.lacking)
        if self._target.is_nvidia and self._links_with_cuda and linked(build, given):
            built = Path(given["build_directory"]).glob("*.so")  # which may lie elsewhere
            self.files += [os.path.relpath(path, self._folder) for path in built]
        else:
            self._compile_apart(sources, given)
        return Built(given["name"])

    def _compile_apart(self, sources: list[str], given: dict) -> None:
        """Each file by itself, where there are no libraries of that vendor to link with. The part for the host is
        compiled for its errors alone, and not for AMD, whose torch would first translate it."""
        device = [source for source in sources if source.endswith(".cu")]
        host = [source for source in sources if source.endswith(HOST_SUFFIXES) and self._target.is_nvidia]
        with ThreadPoolExecutor() as pool:
            checked = [pool.submit(self._host_code, source, given) for source in host]
            parts = [*pool.map(lambda at: self._device_code(at, device[at], given), range(len(device)))]
            for one in checked:
                one.result()
        self.files += [name for name, _ in parts]
        self.log += "".join(log for _, log in parts)

    def _host_code(self, source: str, given: dict) -> None:
        """The part for the host, through nvcc, which knows where CUDA's headers are."""
        own = [part for flag in given.get("extra_cflags") or [] for part in ("-Xcompiler", flag)]
        with tempfile.NamedTemporaryFile(suffix=".o", dir=self._folder) as unused:
            self._run([self._compiler, "-c", *self._flags(given, own), source, "-o", unused.name], given)

    def _device_code(self, at: int, source: str, given: dict) -> tuple[str, str]:
        """The code for the GPU: the name of its file, and what the compiler printed. at: the source's number in its
        extension."""
        command = self._nvcc if self._target.is_nvidia else self._hipcc
        suffix = "cubin" if self._target.is_nvidia else "amdgcn"
        path = self._folder / f"cuda-{len(self.files) + at}.{suffix}"
        return path.name, self._run([*command(source, given), "-o", str(path)], given)

    def _run(self, command: list[str], given: dict) -> str:
        """What the compiler printed. Raises as torch's build does, and Stop where a library's headers are lacking."""
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
        if done.returncode and LIBRARIES.search(compiler_errors.errors_of(done.stdout)):
            self.lacking = NO_LIBRARY + compiler_errors.errors_of(done.stdout)
            raise Stop(self.lacking)
        if done.returncode:
            raise RuntimeError(f"Error building extension '{given['name']}':\n{done.stdout}")
        return done.stdout

    def _nvcc(self, source: str, given: dict) -> list[str]:
        from torch.utils import cpp_extension

        options = ["-cubin", f"-arch={self._target.arch}", "-Xptxas", "-v"]
        return [self._compiler, *options, *cpp_extension.COMMON_NVCC_FLAGS, *self._cuda_flags(given), source]

    def _hipcc(self, source: str, given: dict) -> list[str]:
        """The listing of AMD's code, of the source as torch translates it to HIP."""
        from torch.utils import cpp_extension
        from torch.utils.hipify import hipify_python

        folder = Path(tempfile.mkdtemp(prefix="hip-", dir=self._folder))
        copy = folder / Path(source).name
        copy.write_bytes(Path(source).read_bytes())
        result = hipify_python.hipify(
            str(folder),
            output_directory=str(folder),
            extra_files=[str(copy)],
            is_pytorch_extension=True,
            show_progress=False,
        )
        translated = result[str(copy)].hipified_path or str(copy)
        options = ["-S", "--cuda-device-only", f"--offload-arch={self._target.arch}", "-O3"]
        flags = [*cpp_extension.COMMON_HIP_FLAGS, *cpp_extension.COMMON_HIPCC_FLAGS, *self._cuda_flags(given)]
        beside = ["-I", str(Path(source).parent)]  # headers that the source includes
        return [self._compiler, *options, *flags, *beside, translated]

    def _cuda_flags(self, given: dict) -> list[str]:
        """Without those that name a card."""
        return self._flags(given, without_card(list(given.get("extra_cuda_cflags") or [])))

    def _flags(self, given: dict, own: list[str]) -> list[str]:
        """The flags that torch would pass. own: those that the kernel gives."""
        from torch.utils import cpp_extension

        for name, text in MISSING_HEADERS.items():
            header = self._folder / "include" / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(f"#pragma once\n{text}")
        standard = STANDARD.search(Path(cpp_extension.__file__).read_text(encoding="utf-8"))
        folders = [*(given.get("extra_include_paths") or []), *cpp_extension.include_paths()]
        folders += [sysconfig.get_path("include", scheme="posix_prefix"), self._folder / "include"]
        flags = [f"-DTORCH_EXTENSION_NAME={given['name']}", *own]
        if standard and not any(flag.startswith(("-std=", "--std")) for flag in own):
            flags.append(standard[1])
        return flags + [part for folder in folders for part in ("-isystem", str(folder))]


def linked(build: Callable, given: dict) -> bool:
    """Did torch build the extension, for TORCH_CUDA_ARCH_LIST, which the parent sets? False: all was compiled, and the
    linker lacks one of CUDA's libraries; or torch looked for CUDA's headers beside an nvcc that only leads to another
    place. Raises what the build raises for any other reason."""
    try:
        build(**given)
    except RuntimeError as error:
        if not NOT_LINKED.search(str(error)):
            raise
        return False
    return True


def without_card(flags: list[str]) -> list[str]:
    """The flags without those that choose the card: nvcc's -gencode X, -gencode=X, -arch=X, --gpu-architecture X, and
    hipcc's --offload-arch=X."""
    others, skip = [], False
    for flag in flags:
        name = flag.split("=")[0].lstrip("-")
        chooses = name in ("gencode", "generate-code", "arch", "gpu-architecture", "code", "gpu-code", "offload-arch")
        if not skip and not chooses:
            others.append(flag)
        skip = chooses and "=" not in flag
    return others


class Built:
    """Stands in for an extension that was compiled and cannot run here."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def stop(*_, **__):
            raise Stop(f"{self.__name__}.{name} was called")

        return stop
