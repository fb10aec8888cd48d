"""What SASS of compute capability 9.0 waits for: its control codes, as nvdisasm prints them in hexadecimal.

An instruction that takes a while sets one of six scoreboards; a later one waits for those in its mask. A load from shared
memory behind which an arrival at an mbarrier stands, and no wait for its scoreboard between them, may read what the next
copy writes there: the arrival says that the memory is free."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kernelopt.device import programs

LOAD, ARRIVAL = re.compile(r"\bLDSM?\b"), re.compile(r"\bSYNCS\.ARRIVE\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/")


@dataclass
class Instruction:
    """text: as nvdisasm prints it. sets: the scoreboard that tells when its result is there, 7 for none. waits: mask of
    those that it waits for. after: places of what may run next."""

    text: str
    sets: int
    waits: int
    after: list[int] = field(default_factory=list)


def early_arrivals(cubin: Path) -> list[tuple[str, str]]:
    """(load from shared memory, arrival at an mbarrier) of all kernels, where the arrival does not wait for the load."""
    if programs.find("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    code = [programs.find("nvdisasm"), "-hex", "-c", cubin]
    listing = subprocess.run(code, check=True, capture_output=True, text=True).stdout
    parts = re.split(r"^\s*\.section\s+\.text\.\S+?,.*$", listing, flags=re.M)[1:]
    return [pair for part in parts for pair in pairs_of(instructions(part))]


def instructions(text: str) -> list[Instruction]:
    """Of one kernel, each with what may follow it."""
    found, places = [], {}
    for part in re.split(r"^(\.L_\w+):", text, flags=re.M):
        if re.fullmatch(r"\.L_\w+", part):
            places[part] = len(found)
            continue
        for line, control in INSTRUCTION.findall(part):
            bits = int(control, 16) >> 41
            found.append(Instruction(line, bits >> 5 & 7, bits >> 11 & 63))
    for place, one in enumerate(found):
        jump = re.search(r"\bBRA\b.*?(\.L_\w+)", one.text)
        if jump and jump[1] in places:
            one.after.append(places[jump[1]])
        if not re.match(r"(BRA|EXIT|RET|BRX)\b", one.text) and place + 1 < len(found):
            one.after.append(place + 1)
    return found


def pairs_of(code: list[Instruction]) -> Iterator[tuple[str, str]]:
    for load in code:
        if not LOAD.search(load.text) or load.sets == 7:
            continue
        seen, left = set(), list(load.after)
        while left:
            place = left.pop()
            if place in seen or code[place].waits >> load.sets & 1:
                continue
            seen.add(place)
            if ARRIVAL.search(code[place].text):
                yield load.text, code[place].text
            left += code[place].after
