"""What the wiki has no source for is null or UNKNOWN, and the remarks say so; the count of compute units is known."""

from pathlib import Path

from judging import absent, failures, hardware, json_object, near, says

CARD = "MI308X"
UNKNOWN = ("memory_bandwidth_gbps", "peak_bf16_tflops", "ridge_point")  # tests/test_evals.py holds it against the wiki
SAID = r"unknown|not (?:found|known|published|documented|available)|no (?:source|value|data|public|figure|vendor)|missing|could ?n.t|could not|lack|unpublished"


def check(folder: Path, answer: str) -> list[str]:
    specs = json_object(folder / "specs.json")
    return failures(
        *((f"{key} is null or UNKNOWN (found {specs.get(key)})", absent(specs, key)) for key in UNKNOWN),
        ("cu_count is right", near(specs.get("cu_count"), hardware(CARD, "cu_count"))),
        ("remarks say what is not known", says(specs.get("remarks"), SAID)),
    )
