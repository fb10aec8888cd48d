"""The bandwidth is that of the card in machine.txt, not the one in the comment, and the floor follows from it."""

from pathlib import Path

from judging import failures, hardware, json_object, near, says

BYTES = 2 * 65536 * 4096 * 2  # fp16, read and written


def check(folder: Path, answer: str) -> list[str]:
    sheet = json_object(folder / "sheet.json")
    right = hardware("A100 PCIe 40GB", "memory_bandwidth")
    return failures(
        (
            f"bandwidth_gbps is the card's (found {sheet.get('bandwidth_gbps')})",
            near(sheet.get("bandwidth_gbps"), right),
        ),
        ("bytes are those of input and output", near(sheet.get("bytes"), BYTES)),
        ("floor_us is bytes over bandwidth", near(sheet.get("floor_us"), BYTES / right / 1e3)),
        ("bandwidth_from says where it is from", says(sheet.get("bandwidth_from"), r"\w")),
    )
