"""What this machine has for a node's work: `python -m kernelopt.remote.self_check` prints one JSON object."""

import importlib.metadata
import platform
from dataclasses import asdict, dataclass

from .. import bundle
from ..device import gpu, isolation, programs, sandbox
from ..errors import EnvironmentLacks

PACKAGES = {"torch": "torch", "triton": "triton", "numpy": "numpy", "jsonschema_rs": "jsonschema-rs", "ray": "ray"}


@dataclass(frozen=True)
class Report:
    """packages: {import name: version, None where it is absent}. gpu: its name, with its driver. gpus: how many Ray
    counts. lacks: sentences on what is missing, with the way to get it; without counters and confinement a node works
    too."""

    machine: str
    python: str
    packages: dict[str, str | None]
    gpu: str | None
    counters: bool
    isolation: str
    lacks: list[str]
    gpus: int = 0

    @classmethod
    def of_this_machine(cls) -> "Report":
        lacks, card = [], None
        for check in (lambda: bundle.require(*sandbox.WORKER_PACKAGES, "jsonschema_rs", "pynvml"), gpu.identify):
            try:
                card = check()
            except EnvironmentLacks as error:
                lacks.append(str(error))
        return cls(
            machine=platform.node(),
            python=platform.python_version(),
            packages={name: version(distribution) for name, distribution in PACKAGES.items()},
            gpu=card and f"{card.name}, driver {card.driver}",
            counters=programs.find("ncu") is not None,
            isolation=isolation.isolation("auto"),
            lacks=lacks,
        )

    def lines(self) -> list[str]:
        """The report for people."""
        packages = ", ".join(f"{name} {version or 'absent'}" for name, version in self.packages.items())
        rest = f"Nsight Compute: {'yes' if self.counters else 'no'}; confinement of kernels: {self.isolation}"
        return [
            f"{self.machine}: Python {self.python}, {packages}",
            f"GPU: {self.gpu or 'none'}; Ray counts {self.gpus}",
            rest,
            *self.lacks,
        ]


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(bundle.dumps(asdict(Report.of_this_machine())))
