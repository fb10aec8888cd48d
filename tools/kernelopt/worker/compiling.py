"""The job that compiles a kernel for a card that need not be here. No kernel is launched.

Triton compiles what a call would launch, for a driver that stands in for the card's. CUDA C++ goes to nvcc. What a
call computes is meaningless, so it may stop early; the kernels that it would launch after that are not compiled.
"""

import contextlib
import inspect
import re
import subprocess
import sysconfig
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypedDict

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.errors import OutOfResources

from ..hardware.card import CompileTarget
from ..statuses import Status
from . import compiler_errors, problem
from .context import Candidate, Context, load_reference
from .faults import OracleError, blaming, describe
from .interpreter import HostDriver

WARP = 32  # threads
GPU = torch.device("cuda", 0)
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
LIBRARIES = re.compile(r"\bcu(blas|blasLt|sparse|solver|dnn|rand|fft)", re.IGNORECASE)
NO_LIBRARY = "this machine's CUDA toolkit may lack a library's headers that it uses: "
NO_NVCC = "nvcc is not here: install the CUDA toolkit, or put its nvcc on the PATH, to compile CUDA C++"
STANDARD = re.compile(r"cuda_flags \+ \['(-std=[^']+)'\]")


class Stop(BaseException):
    """The call needs a result that no GPU computes. No candidate's `except Exception` catches it."""


def compile_only(context: Context, kernel: str, case: dict, card: dict, nvcc: str | None, folder: str) -> None:
    """One answer: {status, message, kernels, cuda, lacking}.

    case: {inputs: file of a case}, or {reference, workload, dtype}: then the inputs have their shapes and no values.
    card: the fields of hardware.card.CompileTarget.
    nvcc: its path, None where there is none. folder: for compiled files. status: OK, or of what went wrong. kernels:
    [{name, file, shared_bytes, threads}] of Triton, each with its cubin. cuda: files with the compiled code of CUDA
    C++. lacking: what this machine lacks to compile the rest, or null.
    """
    target = CompileTarget.from_json(card)
    triton, cuda = TritonKernels(target, Path(folder)), Extensions(target, nvcc, Path(folder))
    install(target, triton)
    if compiler_errors.uses_extensions(Path(kernel)):
        cuda.install()
    status, message = Status.OK, ""
    with AsOnGpu():
        candidate = Candidate(context, kernel)
        try:
            made = candidate.load_case(case["inputs"]) if "inputs" in case else case_without_values(**case)
            problem.call(candidate.load(made), made.placed_inputs(context.device))
        except Stop:
            pass
        except Exception as error:
            traceback.print_exc()
            status, message = describe(error)["status"], describe(error)["message"]
    made = {"kernels": triton.kernels, "cuda": cuda.files, "lacking": cuda.lacking}
    context.answer({"status": status, "message": message, **made})


def case_without_values(reference: str, workload: str, dtype: str | None) -> problem.Case:
    """A case of the reference. What it would draw at random is zero, so that gigabytes of inputs take no time."""
    loaded = load_reference(reference)
    if workload not in loaded.workloads:
        raise problem.UnknownWorkload(f"the reference has no workload '{workload}'")
    with blaming(OracleError), NothingDrawn():
        model, inputs, init = loaded.build(workload, 0, dtype, "cpu")
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return problem.Case(inputs, init, state, dtype)


class NothingDrawn(TorchFunctionMode):
    """Inside it floating tensors that would be drawn at random are zero, or what the memory holds."""

    ZERO: ClassVar = {
        torch.randn: torch.zeros,
        torch.rand: torch.zeros,
        torch.randn_like: torch.zeros_like,
        torch.rand_like: torch.zeros_like,
    }
    LEFT: ClassVar = (torch.Tensor.normal_, torch.Tensor.uniform_)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.LEFT:
            return args[0]
        return self.ZERO.get(function, function)(*args, **(kwargs or {}))


class CardDriver(HostDriver):
    """Triton's driver for a card that is not here."""

    def __init__(self, card: CompileTarget):
        major, minor = card.capability
        self._capability, self._target = (major, minor), GPUTarget("cuda", 10 * major + minor, WARP)
        known = {"multiprocessor_count": card.sm_count, "max_shared_mem": card.shared_bytes, "warpSize": WARP}
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: known)

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"  # of a launcher that is never built

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self._capability

    def get_device_interface(self):
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


def install(card: CompileTarget, triton: "TritonKernels") -> None:
    """Have Triton compile for the card where it would launch, and torch.cuda answer for the card."""
    driver.set_active(CardDriver(card))
    JITFunction.run = triton.in_place_of(JITFunction.run)
    major, minor = card.capability
    about = types.SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        multi_processor_count=card.sm_count,
        shared_memory_per_block_optin=card.shared_bytes,
        warp_size=WARP,
    )
    answers = {
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_name": card.name,
        "get_device_properties": about,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "synchronize": None,
        "set_device": None,
        "device": contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


class AsOnGpu(TorchFunctionMode):
    """Inside it tensors say that they are on the GPU, because kernels ask, and lie on the CPU."""

    def __enter__(self):
        torch.Tensor.is_cuda = property(lambda tensor: True)
        torch.Tensor.device = property(lambda tensor: GPU)
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})


def on_cpu(argument):
    """The argument of a function of torch, or the CPU in place of a GPU."""
    named = isinstance(argument, torch.device) and argument.type == "cuda"
    spelt = isinstance(argument, str) and re.fullmatch(r"cuda(:\d+)?", argument)
    return torch.device("cpu") if named or spelt else argument


class TritonCubinJson(TypedDict):
    """A kernel of Triton's in a cubin. shared_bytes, threads: of a block."""

    name: str
    file: str
    shared_bytes: int
    threads: int


class TritonKernels:
    """Triton's kernels that were compiled, each once."""

    def __init__(self, card: CompileTarget, folder: Path):
        self._card, self._folder = card, folder
        self._seen: set[str] = set()
        self.kernels: list[TritonCubinJson] = []

    def in_place_of(self, run: Callable) -> Callable:
        """JITFunction.run that compiles and does not launch. OutOfResources where a launch would raise it."""

        def compiled(function, *arguments, grid=None, warmup=True, **options):
            kernel = run(function, *arguments, grid=grid, warmup=True, **options)
            if kernel is not None and kernel.hash not in self._seen:
                self._seen.add(kernel.hash)
                self._note(kernel)
            limit = self._card.shared_bytes
            if kernel is not None and limit and kernel.metadata.shared > limit:
                raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
            return kernel

        return compiled

    def _note(self, kernel) -> None:
        path = self._folder / f"triton-{len(self.kernels)}.cubin"
        path.write_bytes(kernel.asm["cubin"])
        about = kernel.metadata
        made: TritonCubinJson = {
            "name": about.name,
            "file": path.name,
            "shared_bytes": about.shared,
            "threads": WARP * about.num_warps,
        }
        self.kernels.append(made)


class Extensions:
    """CUDA C++ that torch's load and load_inline would build; `files` hold what nvcc made of it."""

    def __init__(self, card: CompileTarget, nvcc: str | None, folder: Path):
        self._target, self._nvcc, self._folder = card.target, nvcc, folder
        self.files: list[str] = []
        self.lacking: str | None = None

    def install(self) -> None:
        """Take the place of what load and load_inline call."""
        from torch.utils import cpp_extension

        build = cpp_extension._jit_compile
        names = inspect.signature(build)

        def compiled(*arguments, **options):
            return self._compile(build, names.bind(*arguments, **options).arguments)

        cpp_extension._jit_compile = compiled

    def _compile(self, build: Callable, given: dict):
        """What stands in for the extension. Raises as the build does, and Stop where nvcc is lacking."""
        sources = given["sources"] if isinstance(given["sources"], list | tuple) else [given["sources"]]
        sources = [str(source) for source in sources]
        if not any(source.endswith((".cu", ".cuh")) for source in sources):
            return build(**given)
        if self._nvcc is None:
            self.lacking = NO_NVCC
            raise Stop(NO_NVCC)
        if torch.version.cuda:
            build(**given)  # for TORCH_CUDA_ARCH_LIST, which the parent sets
            built = Path(given["build_directory"]).glob("*.so")
            self.files += [str(path.relative_to(self._folder)) for path in built]
        else:
            for source in sources:
                if source.endswith(".cu"):
                    self._device_code(source, given)
        return Built(given["name"])

    def _device_code(self, source: str, given: dict) -> None:
        """The code for the GPU alone: this torch has no CUDA libraries to link with."""
        path = self._folder / f"cuda-{len(self.files)}.cubin"
        command = [self._nvcc, "-cubin", f"-arch={self._target}", *self._flags(given), "-o", str(path), source]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode and LIBRARIES.search(compiler_errors.errors_of(done.stdout)):
            self.lacking = NO_LIBRARY + compiler_errors.errors_of(done.stdout)
            raise Stop(self.lacking)
        if done.returncode:
            raise RuntimeError(f"Error building extension '{given['name']}':\n{done.stdout}")
        self.files.append(path.name)

    def _flags(self, given: dict) -> list[str]:
        """The flags that torch would pass, without those that name a card."""
        from torch.utils import cpp_extension

        for name, text in MISSING_HEADERS.items():
            header = self._folder / "include" / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(f"#pragma once\n{text}")
        standard = STANDARD.search(Path(cpp_extension.__file__).read_text(encoding="utf-8"))
        own = without_card(list(given.get("extra_cuda_cflags") or []))
        folders = [*(given.get("extra_include_paths") or []), *cpp_extension.include_paths()]
        folders += [sysconfig.get_path("include", scheme="posix_prefix"), self._folder / "include"]
        flags = [f"-DTORCH_EXTENSION_NAME={given['name']}", *cpp_extension.COMMON_NVCC_FLAGS, *own]
        if standard and not any(flag.startswith(("-std=", "--std")) for flag in own):
            flags.append(standard[1])
        return flags + [part for folder in folders for part in ("-isystem", str(folder))]


def without_card(flags: list[str]) -> list[str]:
    """nvcc's flags without those that choose the card: -gencode X, -gencode=X, -arch=X, --gpu-architecture X."""
    kept, skip = [], False
    for flag in flags:
        name = flag.split("=")[0].lstrip("-")
        chooses = name in ("gencode", "generate-code", "arch", "gpu-architecture", "code", "gpu-code")
        if not skip and not chooses:
            kept.append(flag)
        skip = chooses and "=" not in flag
    return kept


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
