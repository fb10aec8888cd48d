"""The findings of the wiki's cases are those that the rules find today in the profile that the round started from."""

import functools
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.diagnosis import analysis, profile_folder
from kernelopt.hardware import wiki_cases

CASES = wiki_cases.all_of(BUNDLE / "gpu-wiki")


@functools.cache
def findings_of(example: str, version: str) -> list[str]:
    profile = profile_folder.read(BUNDLE / example / "profiles" / version / "annotation")
    return [finding.id for finding in analysis.diagnose(profile).findings]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{Path(case.page).stem}-{case.line}")
def test_a_case_has_findings_of_the_profiles_that_its_rounds_started_from_and_the_leading_one(case):
    profiled = [findings_of(found.example, found.against) for found in case.rounds]
    assert set(case.findings) <= {finding for findings in profiled for finding in findings}
    assert {findings[0] for findings in profiled} <= set(case.findings)
