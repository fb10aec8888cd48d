"""The job that compiles a kernel for a GPU that need not be here. No kernel is launched.

Triton compiles what a call would launch, for a driver that stands in for the GPU's. CUDA C++ goes to nvcc or hipcc.
What a call computes is meaningless, so it may stop early; the kernels that it would launch after that are not compiled.
"""

import contextlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
from triton.runtime import JITFunction
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.errors import OutOfResources

from ..hardware.card import CompileTarget
from ..statuses import Status
from . import blank, compiler_errors, problem, tensor_trees
from .context import Candidate, Context, load_reference
from .elsewhere import AsOnGpu, Elsewhere, NothingDrawn
from .extensions import Extensions, Stop
from .faults import OracleError, blaming, describe, passed_over_errors
from .state import saved

STAGES = ("ptx", "cubin", "amdgcn", "hsaco")
PRINTED_ERROR = re.compile(r"^(\S*: )?(fatal )?error: ", re.MULTILINE)
ROCM_LINKER = re.compile(r"ROCm linker \S+ not found")
NO_ROCM_LINKER = "this version of Triton takes ROCm's linker for AMD: install ROCm, or triton 3.6 or newer"
PTX_ON_AMD = "the file has inline assembly; PTX is for NVIDIA's GPUs alone"
DOT_TYPE = re.compile(r"tt\.dot .*? : tensor<(?:\d+x)+(\w+)")
REFUSED = (Status.COMPILE_ERROR, Status.LAUNCH_ERROR)
META = "meta"
LARGE_BYTES = 1 << 30
CONSTANT_CHARACTERS = 60
LOG_CHARACTERS = 4000


class CompilationError(Exception):
    """Triton's compiler printed an error and went on."""


class TritonKernelJson(TypedDict):
    """A kernel that Triton compiled. hash: Triton's, of what was compiled. configuration: that of an autotuner, None
    for a kernel without one. constants: its compile-time arguments, as text. files: stage -> name of a file.
    shared_bytes, warps, threads: of a block. tensor_memory: columns, None where it has none. stages: of the software
    pipeline. has_dot: the source asks for a product of matrices. dot_types: of the operands of its products, as
    Triton's representation has them: "f16", "f8E4M3FN". log: what the compiler printed."""

    name: str
    hash: str
    configuration: str | None
    constants: dict[str, str]
    files: dict[str, str]
    shared_bytes: int
    tensor_memory: int | None
    warps: int
    threads: int
    stages: int | None
    has_dot: bool
    dot_types: list[str]
    log: str


class FailedJson(TypedDict):
    """The configuration of a kernel that the compiler or the GPU refuses."""

    name: str
    configuration: str


@dataclass(frozen=True)
class CompileAnswer:
    """What came of a kernel on one target. status: OK, or of what went wrong. kernels: those of Triton. failed: None
    where no autotuner is to blame. configurations: {kernel: their number}, of the autotuners that were reached.
    has_cuda: the kernel builds CUDA C++. cuda: files with its compiled code. log: what its compiler printed. lacking:
    what this machine lacks to compile the rest, or None. passed_over: the errors of CUDA C++ that was refused before
    other CUDA C++ was compiled, or None. asked: what the kernel asked of the GPU that no page answers."""

    status: Status
    message: str
    kernels: list[TritonKernelJson]
    failed: FailedJson | None
    configurations: dict[str, int]
    has_cuda: bool
    cuda: list[str]
    log: str
    lacking: str | None
    passed_over: str | None
    asked: list[str]


def compile_only(
    context: Context,
    kernel: str,
    case: dict,
    target: dict,
    compiler: str | None,
    folder: str,
    configuration: int,
) -> None:
    """Compile what a call of the kernel on the case would launch, and answer once, a CompileAnswer.

    case: {inputs: file of a case}, or {reference, workload, dtype}: then the inputs have their shapes and no values.
    target: the fields of hardware.card.CompileTarget. compiler: the path of nvcc, or of hipcc for AMD; None where there
    is none. folder: for compiled files. configuration: the number of the one that each autotuner takes; one with fewer
    takes its first.
    """
    torch.set_num_threads(1)  # each core has a kernel of its own to compile
    wanted = CompileTarget.from_json(target)
    gpu = Elsewhere(wanted)
    triton = TritonKernels(gpu, Path(folder))
    extensions, tuning = Extensions(wanted, compiler, Path(folder)), Configurations(configuration)
    gpu.install()
    JITFunction.run = triton.in_place_of(JITFunction.run, tuning)
    Autotuner.run = tuning.in_place_of(Autotuner.run)
    if compiler_errors.uses_extensions(Path(kernel)):
        extensions.install()
    (status, *others), message = called_past_refusals(
        lambda: called(context, kernel, case), lambda: not (tuning.failed or extensions.files) and triton.pass_over()
    )
    if Status.COMPILE_ERROR in (status, *others) and not wanted.is_nvidia:
        message += f"\n{PTX_ON_AMD}" if b"inline_asm" in Path(kernel).read_bytes() else ""
    lacking = NO_ROCM_LINKER if ROCM_LINKER.search(message) else extensions.lacking
    answer = CompileAnswer(
        status=Status.OK if lacking else status,
        message=message,
        kernels=triton.kernels,
        failed=tuning.failed if message else None,
        configurations=tuning.numbers,
        has_cuda=bool(extensions.files or extensions.lacking),
        cuda=extensions.files,
        log=extensions.log,
        lacking=lacking,
        passed_over=passed_over_errors(),
        asked=sorted(gpu.asked),
    )
    context.answer(answer)


def called_past_refusals(
    call: Callable[[], tuple[Status, str]], pass_over: Callable[[], bool]
) -> tuple[list[Status], str]:
    """(the status of each call, their messages): after a refused launch it is called again, as long as its kernel can
    be passed over."""
    status, message = call()
    statuses, messages = [status], [message]
    while statuses[-1] in REFUSED and pass_over():
        status, message = call()
        statuses.append(status)
        messages += [message] if status in REFUSED else []
    return statuses, "\n".join(messages)


def called(context: Context, kernel: str, case: dict) -> tuple[Status, str]:
    """Call the kernel on the case, with tensors that say that they are on the GPU; its status and message."""
    try:
        made, place = (None, context.device) if "inputs" in case else case_without_values(**case)
        with AsOnGpu(place):
            candidate = Candidate(replace(context, device=place), kernel)
            made = made or candidate.load_case(case["inputs"])
            problem.call(candidate.load(made), made.placed_inputs(place))
    except Stop:
        pass
    except Exception as error:
        traceback.print_exc()
        described = describe(error)
        return described["status"], described["message"]
    return Status.OK, ""


def case_without_values(reference: str, workload: str, dtype: str | None) -> tuple[problem.Case, str]:
    """(a case of the reference, where its tensors lie). What it would draw at random is zero. More than LARGE_BYTES are
    on torch's device meta: they take neither memory nor time."""
    loaded = load_reference(reference, "cpu")
    loaded.chosen([workload])

    def built(place: str) -> problem.Case:
        with NothingDrawn():
            model, inputs, init = loaded.build(workload, 0, dtype, place)
        return problem.Case(inputs, init, saved(model), dtype)

    with contextlib.suppress(Exception):  # a reference that reads what it draws needs memory
        try:
            with blank.without_compilers():
                large = built(META)
        except Exception:  # it needs more of torch.compile than a stand-in has
            large = built(META)
        if tensor_trees.held_bytes([*tensor_trees.input_tensors(large.inputs), *large.state.values()]) > LARGE_BYTES:
            return large, META
    with blaming(OracleError):
        return built("cpu"), "cpu"


class Configurations:
    """Takes one configuration of each autotuner where Triton would try them all. `numbers`: of the configurations that
    each has, by the name of its kernel."""

    def __init__(self, number: int):
        self._number = number
        self.numbers: dict[str, int] = {}
        self.taken: str | None = None  # while an autotuner runs: its configuration
        self.failed: FailedJson | None = None

    def in_place_of(self, run: Callable) -> Callable:
        def compiled(tuner, *arguments, **options):
            tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
            every, configs = tuner.configs, left_by_pruning(tuner, options)
            name = tuner.base_fn.__name__
            self.numbers[name] = max(len(configs), self.numbers.get(name, 0))
            one = configs[self._number if self._number < len(configs) else 0]
            tuner.configs, self.taken = [one], text_of(one)
            try:
                return run(tuner, *arguments, **options)
            except Exception:
                self.failed = {"name": name, "configuration": self.taken}
                raise
            finally:
                tuner.configs, self.taken = every, None

        return compiled


def text_of(config: Config) -> str:
    """ "BM=128 BN=64 num_warps=4 num_stages=3": what it sets, without what most leave as it is."""
    own = {name: value for name, value in config.all_kwargs().items() if value is not None}
    return " ".join(f"{name}={value}" for name, value in own.items() if (name, value) != ("num_ctas", 1))


def left_by_pruning(tuner: Autotuner, options: dict) -> list:
    """The configurations that the autotuner would try; all where its own rule fails without a GPU."""
    with contextlib.suppress(Exception):
        return tuner.prune_configs(options) or tuner.configs
    return tuner.configs


class TritonKernels:
    """Triton's kernels that were compiled, each once. A launch that is refused raises, as on the GPU; once its kernel
    is passed over, it does nothing."""

    def __init__(self, gpu: Elsewhere, folder: Path):
        self._gpu, self._target, self._folder = gpu, gpu.target, folder
        self._seen: set[str] = set()
        self._last: str | None = None
        self._passed_over: set[str] = set()
        self.kernels: list[TritonKernelJson] = []

    def in_place_of(self, run: Callable, tuning: Configurations) -> Callable:
        """JITFunction.run that compiles and does not launch. OutOfResources where a launch would raise it."""

        def compiled(function, *arguments, grid=None, warmup=True, **options):
            self._last = function.__name__
            if self._last in self._passed_over:
                return None
            kernel = run(function, *arguments, grid=grid, warmup=True, **options)
            if kernel is None:
                return None
            if kernel.hash not in self._seen:
                self._seen.add(kernel.hash)
                printed = compiler_errors.printed()
                if PRINTED_ERROR.search(printed):
                    errors = dict.fromkeys(compiler_errors.errors_of(printed).splitlines())
                    raise CompilationError(f"{kernel.metadata.name}: " + "\n".join(errors))
                self.kernels.append(self._note(kernel, tuning.taken, printed))
            self._refuse_too_large(kernel.metadata)
            return kernel

        return compiled

    def pass_over(self) -> bool:
        """Leave out the kernel that was launched last, so that a new call reaches the others. False: it is left out."""
        new = self._last is not None and self._last not in self._passed_over
        self._passed_over.add(self._last)
        return new

    def _refuse_too_large(self, about) -> None:
        for name, wanted, most in (
            ("shared memory" if self._target.is_nvidia else "LDS", about.shared, self._target.shared_bytes),
            ("tensor memory", getattr(about, "tmem_size", None), self._target.tensor_memory_columns),
        ):
            if most and wanted and wanted > most:
                raise OutOfResources(wanted, most, name)

    def _note(self, kernel, configuration: str | None, printed: str) -> TritonKernelJson:
        about, files = kernel.metadata, {}
        for stage in STAGES:
            if stage in kernel.asm:
                code, path = kernel.asm[stage], self._folder / f"triton-{len(self.kernels)}.{stage}"
                path.write_bytes(code if isinstance(code, bytes) else code.encode())
                files[stage] = path.name
        return {
            "name": about.name,
            "hash": kernel.hash,
            "configuration": configuration,
            "constants": constants_of(kernel),
            "files": files,
            "shared_bytes": about.shared,
            "tensor_memory": getattr(about, "tmem_size", None) or None,
            "warps": about.num_warps,
            "threads": about.num_warps * self._gpu.threads_of_a_warp,
            "stages": getattr(about, "num_stages", None),
            "has_dot": "tt.dot" in kernel.asm.get("ttir", ""),
            "dot_types": sorted(set(DOT_TYPE.findall(kernel.asm.get("ttir", "")))),
            "log": printed[-LOG_CHARACTERS:],
        }


def constants_of(kernel) -> dict[str, str]:
    """The compile-time arguments of a kernel by name; those of a structure are left out."""
    constants, names = getattr(kernel.src, "constants", {}), kernel.src.fn.arg_names
    values = {}
    for place, value in constants.items():
        first, *rest = place if isinstance(place, tuple) else (place,)  # Triton 3.2 has names
        if not rest:
            values[first if isinstance(first, str) else names[first]] = str(value)[:CONSTANT_CHARACTERS]
    return values
