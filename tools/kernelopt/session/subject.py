"""What a command works on: a workspace, or a kernel and its reference."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .task import Task, dtype_name
from .workspace import Workspace


@dataclass(frozen=True)
class KernelUnderTest:
    """A kernel, its reference and the rules for a correct result. dtype, tolerance: None derives them from the
    inputs and the dtype. libraries: whether torch and vendor libraries may do the core work. only_these_shapes:
    whether the checks use no other shapes."""

    kernel: Path
    reference: Path
    dtype: str | None = None
    tolerance: float | None = None
    workspace: Workspace | None = None
    libraries: bool = False
    only_these_shapes: bool = False

    @property
    def cache(self) -> Path | None:
        """The folder for compiled kernels, or None for no cache."""
        return self.workspace.cache if self.workspace else None


def resolve(args) -> KernelUnderTest:
    """Return the kernel that --workspace, or --kernel with --reference, names. Raise UsageError for any other
    combination."""
    if args.workspace:
        if args.kernel or args.reference or args.dtype:
            raise UsageError("--workspace says everything; leave out --kernel, --reference and --dtype")
        workspace = Workspace(args.workspace)
        subject = of_workspace(workspace, workspace.task())
        if not subject.kernel.is_file():
            root = args.workspace
            raise UsageError(
                f"{subject.kernel} does not exist; the last accepted one: git -C {root} checkout -- kernel.py"
            )
        return subject
    if not args.kernel or not args.reference:
        raise UsageError("pass --workspace W, or --kernel FILE with --reference FILE")
    for path in (args.kernel, args.reference):
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
    return KernelUnderTest(args.kernel, args.reference, dtype_name(args.dtype) if args.dtype else None)


def of_reference(args) -> KernelUnderTest:
    """Return the subject of a command that needs no kernel: the workspace's, or the file that --reference names as both
    kernel and reference. Raise UsageError for any other combination."""
    if args.workspace:
        if args.reference or args.dtype:
            raise UsageError("--workspace says everything; leave out --reference and --dtype")
        workspace = Workspace(args.workspace)
        return of_workspace(workspace, workspace.task())
    if not args.reference:
        raise UsageError("pass --workspace W, or --reference FILE with Model and get_inputs")
    if not args.reference.is_file():
        raise UsageError(f"{args.reference} is not a file")
    return KernelUnderTest(args.reference, args.reference, dtype_name(args.dtype) if args.dtype else None)


def of_workspace(workspace: Workspace, task: Task) -> KernelUnderTest:
    """Return the workspace's kernel and reference, with the dtype, the tolerance and the rules of its Task block."""
    return KernelUnderTest(
        workspace.kernel,
        workspace.reference,
        task.dtype,
        task.tolerance,
        workspace,
        libraries=bool(task.libraries),
        only_these_shapes=bool(task.only_these_shapes),
    )
