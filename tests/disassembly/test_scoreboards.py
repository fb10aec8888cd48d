"""Which arrivals at an mbarrier pass a load from shared memory, in small listings."""

import pytest
from kernelopt.disassembly import analysis, listings, scoreboards

NONE = 7


def listing(*lines: tuple[str, int, int] | str) -> str:
    """Instructions (text, the scoreboard that they set, mask of those that they wait for) and labels, as cuobjdump -sass
    prints them."""
    text, place = "\tcode for sm_90a\n\t\tFunction : walk\n", 0
    for line in lines:
        if isinstance(line, str):
            text += f"{line}:\n"
            continue
        control = (line[2] << 11 | line[1] << 5) << 41
        text += f"        /*{place:04x}*/   {line[0]} ;   /* 0x{place:016x} */\n   /* 0x{control:016x} */\n"
        place += 16
    return text


LOAD, ARRIVAL = ("LDSM.16.M88.4 R56, [R9]", 1, 0), ("@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5+0x10], RZ", NONE, 0)
SILENT = (LOAD[0], NONE, 0)
OTHER, WAIT, END = ("IMAD R1, R2, R3, R4", NONE, 0), ("HGMMA R24, R56, gdesc[UR12], R24", NONE, 2), ("EXIT", NONE, 0)
LISTINGS = {
    "right behind it": ((LOAD, OTHER, ARRIVAL, END), 1),
    "behind a wait for another scoreboard": ((LOAD, ("FADD R1, R2, R3", NONE, 1), ARRIVAL, END), 1),
    "behind the wait": ((LOAD, WAIT, ARRIVAL, END), 0),
    "an arrival that waits": ((LOAD, (ARRIVAL[0], NONE, 2), END), 0),
    "before it": ((ARRIVAL, LOAD, WAIT, END), 0),
    "before it, in a loop": ((".L_x_1", ARRIVAL, LOAD, ("@P0 BRA `(.L_x_1)", NONE, 0), END), 1),
    "in a loop that waits": ((".L_x_1", ARRIVAL, LOAD, WAIT, ("@P0 BRA `(.L_x_1)", NONE, 0), END), 0),
    "on one of two ways": ((LOAD, ("@P0 BRA `(.L_x_2)", NONE, 0), WAIT, ".L_x_2", ARRIVAL, END), 1),
    "jumped over": ((LOAD, ("BRA `(.L_x_3)", NONE, 0), ARRIVAL, ".L_x_3", WAIT, END), 0),
    "another kernel's way out": ((LOAD, END, ARRIVAL, END), 0),
    "an arrival that counts bytes to come": ((LOAD, ("SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x20], R3", NONE, 0), END), 0),
    "a load without a scoreboard": ((SILENT, LOAD, ARRIVAL, END), 2),
    "a load without a scoreboard, before the next one": ((SILENT, ARRIVAL, LOAD, WAIT, END), 1),
    "a load without a scoreboard, behind the wait for the next one": ((SILENT, LOAD, WAIT, ARRIVAL, END), 0),
    "a load of nothing": ((("@!PT LDS RZ, [RZ]", NONE, 0), ARRIVAL, END), 0),
    "a store": ((("STSM.16.M88.4 [R9], R56", NONE, 0), ARRIVAL, END), 0),
}


@pytest.mark.parametrize(("lines", "early"), LISTINGS.values(), ids=LISTINGS)
def test_an_arrival_is_early_where_a_way_leads_to_it_without_a_wait_for_the_load(lines, early):
    (kernel,) = listings.parse_sass(listing(*lines))
    assert list(scoreboards.early_arrivals(kernel)) == [(LOAD[0], ARRIVAL[0])] * early
    remarks = [remark.message for remark in analysis.summary(kernel).remarks() if remark.id == "early_arrival"]
    assert len(remarks) == min(early, 1) and all(f"({LOAD[0]}; {ARRIVAL[0]})" in one for one in remarks)


def test_a_listing_without_encodings_says_nothing():
    text = "\n".join(line for line in listing(LOAD, ARRIVAL, END).splitlines() if not line.startswith("   /* 0x"))
    (kernel,) = listings.parse_sass(text)
    assert len(kernel.instructions) == 3 and list(scoreboards.early_arrivals(kernel)) == []
