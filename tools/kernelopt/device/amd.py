"""The AMD GPUs of this machine, as amd-smi or rocm-smi reports them.

This module never ran on AMD hardware. Its readers are tested on published output.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import EnvironmentLacks

ANSWER_S = 30


@dataclass(frozen=True)
class AmdCard:
    """An AMD GPU; None where its program does not report a value. uuid: in hexadecimal, without 0x."""

    name: str | None
    gfx_target: str | None
    uuid: str | None

    def to_json(self) -> dict:
        return {"name": self.name, "gfx_target": self.gfx_target}


def identify() -> AmdCard | None:
    """The GPU that HIP calls device 0, whose name is known; None without an AMD GPU.

    EnvironmentLacks when the environment hides all of them, or the GPU does not report its name.
    """
    cards = ask()
    if not cards:
        return None
    chosen = visible(cards, os.environ)
    if not chosen:
        raise EnvironmentLacks(
            "ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES hides every AMD GPU of this machine; unset it"
        )
    if chosen[0].name is None:
        target = chosen[0].gfx_target or "target unknown"
        raise EnvironmentLacks(
            f"the AMD GPU here ({target}) does not report its name; look for it in: gpu_specs.py list"
        )
    return chosen[0]


def ask() -> list[AmdCard]:
    """All AMD GPUs, in the order of their numbers, from the first program that lists one."""
    for command, read in ASKED:
        if shutil.which(command[0]):
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if cards := read(done.stdout):
                return cards
    return []


def visible(cards: list[AmdCard], environment: Mapping[str, str]) -> list[AmdCard]:
    """The GPUs that HIP shows a process with this environment, in its order: ROCR_VISIBLE_DEVICES takes numbers or
    UUIDs, and HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, takes numbers among the remaining GPUs.

    From: rocm.docs.amd.com, GPU isolation techniques. This assumes that amd-smi numbers the GPUs as HIP does.
    """
    left = selected(cards, environment.get("ROCR_VISIBLE_DEVICES"))
    return selected(left, environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")))


def selected(cards: list[AmdCard], names: str | None) -> list[AmdCard]:
    """The cards that a list of numbers and UUIDs names. Entries after the first that names no card are ignored."""
    if names is None:
        return cards
    chosen: list[AmdCard] = []
    for name in map(str.strip, names.split(",")):
        uuid = name.removeprefix("GPU-").lower()
        fitting = [
            card
            for number, card in enumerate(cards)
            if name == str(number) or (uuid != name.lower() and card.uuid == uuid)
        ]
        if not fitting:
            break
        chosen += fitting
    return chosen


def read_amd_smi(text: str) -> list[AmdCard]:
    """The cards in the output of `amd-smi static --asic --board --json`: a list, which newer versions put under
    "gpu_data"."""
    value = loaded(text)
    entries = value.get("gpu_data") if isinstance(value, dict) else value
    entries = entries if isinstance(entries, list) else []
    entries = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("asic"), dict)]
    cards = []
    for entry in sorted(entries, key=lambda entry: number_of(entry.get("gpu"))):
        asic, board = entry["asic"], entry.get("board") or {}
        names = [asic.get("market_name"), board.get("product_name") if isinstance(board, dict) else None]
        name = next(filter(None, map(reported, names)), None)
        cards.append(card(name, asic.get("target_graphics_version"), asic.get("asic_serial")))
    return cards


def read_rocm_smi(text: str) -> list[AmdCard]:
    """The cards in the output of `rocm-smi --showproductname --showuniqueid --json`: card0, card1, ..."""
    value = loaded(text)
    pairs = value.items() if isinstance(value, dict) else ()
    entries = {key: entry for key, entry in pairs if re.fullmatch(r"card\d+", key)}
    cards = []
    for _, entry in sorted(entries.items(), key=lambda pair: number_of(pair[0][4:])):
        names = ("Card Series", "Card series", "Device Name", "Card Model", "Card model")
        name = next(filter(None, (reported(entry.get(key)) for key in names)), None)
        cards.append(card(name, entry.get("GFX Version"), entry.get("Unique ID")))
    return cards


def card(name: str | None, target, uuid) -> AmdCard:
    """The card of these cells of a program's output. rocm-smi writes gfx90a as gfx9010."""
    known = reported(target)
    if known and (parts := re.fullmatch(r"(gfx9\d)(1[0-5])", known)):
        known = f"{parts[1]}{int(parts[2]):x}"
    number = reported(uuid, hexadecimal=True)
    return AmdCard(name, known, number and number.lower().removeprefix("0x"))


def reported(value, hexadecimal: bool = False) -> str | None:
    """The text of a cell, or None for "N/A". For a name, a PCI number such as 0x738c also counts as missing."""
    text = value.strip() if isinstance(value, str) else ""
    if text.lower() in ("", "n/a", "unknown", "none") or (not hexadecimal and re.fullmatch(r"0x[0-9a-fA-F]+", text)):
        return None
    return text


def number_of(value) -> int:
    return int(value) if str(value).isdigit() else 0


def loaded(text: str):
    """The JSON value in a program's output, which may begin with other text. None when there is no JSON."""
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
    try:
        return json.loads(text[start.start() :]) if start else None
    except ValueError:
        return None


ASKED: tuple[tuple[list[str], Callable], ...] = (
    (["amd-smi", "static", "--asic", "--board", "--json"], read_amd_smi),
    (["rocm-smi", "--showproductname", "--showuniqueid", "--json"], read_rocm_smi),  # older ROCm has only this program
)
