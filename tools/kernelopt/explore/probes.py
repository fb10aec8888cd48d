"""Probes that leave out more than they say: the compiler drops a product whose results nobody reads."""

import contextlib
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from ..disassembly import analysis, listing_files, listings
from ..errors import EnvironmentLacks
from .entrants import Entrant
from .resources import CompiledCall

NOWHERE = "RZ"  # ptxas leaves `HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ` where it drops a wgmma


def left_out(ranked: list[Entrant], calls: dict[str, CompiledCall | None]) -> dict[str, str]:
    """By the name of a probe: which products it lacks of the candidate of its file with the nearest constants. ranked:
    best first. calls: the compiled code of those that still run, by name."""
    known = [one for one in ranked if calls.get(one.name)]
    pairs = {}  # a probe -> what it is held against
    for probe in (one for one in known if one.is_probe):
        if others := [one for one in known if is_whole(one, probe)]:
            pairs[probe.name] = min(others, key=lambda one: differing(one, probe)).name
    names = list({*pairs, *pairs.values()})
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        used = dict(zip(names, pool.map(lambda name: products(calls[name]), names), strict=True))
    said = {probe: words(used[probe], used[whole], whole) for probe, whole in pairs.items()}
    return {probe: text for probe, text in said.items() if text}


def is_whole(entrant: Entrant, probe: Entrant) -> bool:
    """Is it a candidate that leaves out nothing, of the probe's file?"""
    return entrant.origin == probe.origin and not (entrant.is_probe or entrant.is_opponent)


def differing(entrant: Entrant, probe: Entrant) -> int:
    """Number of constants that differ."""
    ours, its = entrant.config, probe.config
    return sum(ours.get(name) != its.get(name) for name in ours.keys() | its.keys())


def products(call: CompiledCall) -> dict[str, set[str]]:
    """The tensor instructions of each kernel in the CUDA C++ of a call, kernels of one name together; empty where
    nobody can read it."""
    opcodes: dict[str, set[str]] = defaultdict(set)
    for file in call.extensions:
        with contextlib.suppress(EnvironmentLacks, listing_files.Unreadable):
            for kernel in listings.parse_sass(listing_files.dump(file, ["-sass"], listing_files.USAGE_S)):
                used = [one for one in kernel.instructions if analysis.meaning_of("sass", one) == "tensor"]
                opcodes[listings.plain_name(kernel.name)] |= {
                    one.opcode for one in used if not one.operands.startswith(NOWHERE)
                }
    return opcodes


def words(probe: dict[str, set[str]], whole: dict[str, set[str]], name: str) -> str | None:
    """ "product_kernel lacks QGMMA.64x192x32.F32.E4M3.E4M3 of cuda's"; None where nothing is missing."""
    missing = {kernel: sorted(whole[kernel] - probe[kernel]) for kernel in whole if kernel in probe}
    said = [f"{kernel} lacks {', '.join(opcodes)} of {name}'s" for kernel, opcodes in missing.items() if opcodes]
    return "; ".join(said) or None
