"""Which torch to install for this machine's NVIDIA GPUs: reference/torch_builds.json lists builds, newest first.

Used where no torch is importable; runs before anything is installed.
"""

import json
import platform
import subprocess
from pathlib import Path

BUILDS = Path(__file__).resolve().parents[1] / "reference" / "torch_builds.json"
QUERY = ["nvidia-smi", "--format=csv,noheader", "--query-gpu"]
ANSWER_S = 60


class NoneFits(Exception):
    """No build runs here: one sentence with the mend."""


def choose(gpus: list[dict], builds: list[dict]) -> dict:
    """The newest build that runs on all GPUs, else the newest that runs on one of them; NoneFits where none does.

    gpus: [{name, driver, capability}], driver the number before the first dot, capability as [9, 0], None where the
    driver does not tell it. Without GPUs the newest.
    """
    if not gpus:
        return builds[0]
    driver = gpus[0]["driver"]  # a machine has one driver
    fitting = [build for build in builds if build["least_driver"] <= driver]
    for enough in (all, any):
        for build in fitting:
            if enough(runs(build, gpu["capability"]) for gpu in gpus):
                return build
    drivers = [build["least_driver"] for build in builds if any(runs(build, gpu["capability"]) for gpu in gpus)]
    mend = f"install driver {min(drivers)} or newer" if drivers else "put a torch built for it into a Python"
    raise NoneFits(
        f"no build of torch 2.6 or newer that set-up knows runs on {describe(gpus[0])} under the NVIDIA driver "
        f"{driver}: {mend}, then run this again (PYTHON=... names another Python)"
    )


def runs(build: dict, capability: list[int] | None) -> bool:
    """Has the build machine code for the capability? Code for 8.0 runs on 8.9 too, and on no 9.0."""
    if capability is None:
        return True
    return any(major == capability[0] and minor <= capability[1] for major, minor in build["capabilities"])


def describe(gpu: dict) -> str:
    capability = gpu["capability"]
    return f"{gpu['name']} (compute capability {'.'.join(map(str, capability))})" if capability else gpu["name"]


def ask() -> list[dict]:
    """The GPUs that nvidia-smi lists; [] where there is none, or no driver."""
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):  # old drivers do not know compute_cap
        try:
            command = [*QUERY[:-1], f"{QUERY[-1]}={fields}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            return [gpu for line in done.stdout.splitlines() if (gpu := read(line))]
    return []


def read(line: str) -> dict | None:
    """One GPU of nvidia-smi's list: "NVIDIA H200, 580.159.04, 9.0"."""
    name, *cells = (cell.strip() for cell in line.split(","))
    if not cells or not cells[0].split(".")[0].isdigit():
        return None
    parts = cells[1].split(".") if len(cells) > 1 else []
    capability = [int(part) for part in parts] if len(parts) == 2 and all(map(str.isdigit, parts)) else None
    return {"name": name, "driver": int(cells[0].split(".")[0]), "capability": capability}


def requirement(default: str) -> str:
    """`default` ("torch==2.13.0"), or the requirement of a build that this machine's GPUs need in its place;
    NoneFits."""
    if platform.machine() != "x86_64":  # the builds were looked at for this one alone
        return default
    return f"torch=={choose(ask(), json.loads(BUILDS.read_text())['builds'])['torch']}"
