"""Which versions of the packages that the tools stand on are too old, read from their files: importing torch takes
seconds."""

import importlib.util
import re
from pathlib import Path

# torch 2.6 can write tensors without checksums and came with Triton 3.2, whose do_bench returns single times.
LEAST = {"torch": (2, 6), "triton": (3, 2)}
NVML_NEEDED = "nvmlDeviceGetCurrentClocksEventReasons"  # nvidia-ml-py has it since 12.535; pynvml 11 has it not
VERSION = re.compile(r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"]((\d+)\.(\d+)[^'\"]*)['\"]", re.MULTILINE)


def unfit(name: str) -> str | None:
    """Why an importable package cannot serve, as a sentence with the mend; None where it can, or nothing is known of
    it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return hidden_nvml(Path(spec.origin)) if name == "pynvml" else too_old(name, Path(spec.origin))


def too_old(name: str, file: Path) -> str | None:
    """unfit() of the package whose __init__.py is `file`; of a package that is not in LEAST any version will do."""
    installed = version(file) if name in LEAST else None
    if installed is None or installed[1] >= LEAST[name]:
        return None
    least = ".".join(map(str, LEAST[name]))
    return (
        f"{name} {installed[0]} in {file.parent} is too old, these tools need {least} or newer: upgrade it there, or "
        "remove the environment that scripts/python.sh names and run PYTHON=ANOTHER_PYTHON bash scripts/setup.sh"
    )


def version(file: Path) -> tuple[str, tuple[int, int]] | None:
    """("2.6.0+cu124", (2, 6)) of the package whose __init__.py is `file`; None where its files do not tell."""
    for place in (file.with_name("version.py"), file):
        if place.is_file() and (match := VERSION.search(place.read_text(encoding="utf-8", errors="replace"))):
            return match[1], (int(match[2]), int(match[3]))
    return None


def hidden_nvml(file: Path) -> str | None:
    """unfit() of the module pynvml at `file`. nvidia-ml-py is the one file pynvml.py; the package of the folder pynvml,
    of another maintainer, is imported in its place where both are installed."""
    if file.name != "__init__.py" or any(NVML_NEEDED in text for text in map(Path.read_text, file.parent.glob("*.py"))):
        return None
    return (
        f"the outdated package pynvml in {file.parent} is imported in place of NVIDIA's nvidia-ml-py; "
        "run: pip uninstall pynvml; pip install 'nvidia-ml-py>=12'"
    )
