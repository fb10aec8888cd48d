"""The profile is of three kernels that kernel.py does not have, so it carries no decision about kernel.py."""

from pathlib import Path

from judging import failures, json_object, says


def check(folder: Path, answer: str) -> list[str]:
    decision = json_object(folder / "next.json")
    because = decision.get("because")
    return failures(
        (f"next is profile_again (found {decision.get('next')})", decision.get("next") == "profile_again"),
        ("no change rests on this profile", decision.get("change") in (None, "", "null")),
        (
            "the reason names what was profiled instead",
            says(because, r"row_max|row_sum|normalise|three.{0,20}kernels|sha-?256|40533aed"),
        ),
    )
