"""The data of a case on their way from the tools to the worker (case_types)."""

import json
from dataclasses import replace

from kernelopt.case_types import CandidateCase, Draws, StoredCall, StoredCase, Variant
from kernelopt.measure.cases import Case

SECRET = 123456789
DRAWN = Case(
    "default", SECRET, None, "0.pt", "fp32", [[4]], samples=[Draws(0, 2, 3)], contents=[(1.0, 2.0)], first=True
)
ANOTHER = replace(DRAWN, path="1.pt", variant=Variant("2 rows", [[0, 0, 2]], keywords={"rows": 2}))


def test_the_candidates_data_come_back_as_they_were_and_hold_no_seed_of_inputs():
    for case in (replace(DRAWN, other=ANOTHER), ANOTHER, replace(DRAWN, first=False)):
        given = case.for_candidate()
        sent = json.dumps(given.to_json())
        assert CandidateCase.from_json(json.loads(sent)) == given and str(SECRET) not in sent
        assert [len(set(one.seeds)) for one in given.samples] == [3] * case.draws


def test_the_oracles_data_come_back_as_they_were():
    for case, draws in ((DRAWN, "draws.pt"), (ANOTHER, None)):
        stored = replace(case, contents=[[1.0, 2.0]]).for_oracle([StoredCall(SECRET, "0-0.pt")], draws)
        assert StoredCase.from_json(json.loads(json.dumps(stored.to_json()))) == stored
