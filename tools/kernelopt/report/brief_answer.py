"""The check of a model's answer to a brief: it fits the schema, and cites what the profile holds. Pure.

A metric that was not collected, or a value that is not the report's, is a problem.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from operator import getitem

from .. import bundle
from ..profilers.profile import Metrics

RESPONSE_SCHEMA = "diagnosis_response.schema.json"
ANSWERS = {"bottlenecks", "abstain"}  # an object with one of these keys is meant as the answer
NOT_COLLECTED = "not collected"


def response_schema() -> dict:
    return bundle.read_json(bundle.REFERENCE / RESPONSE_SCHEMA)


@dataclass(frozen=True)
class CheckedResponse:
    """A model's answer and its problems. response: its JSON object; None without one."""

    problems: list[str]
    response: dict | None

    @property
    def valid(self) -> bool:
        return not self.problems

    def to_json(self) -> dict:
        """The output of analyze_profile.py --check-response --json."""
        return {"valid": self.valid, **vars(self)}


def check_response(text: str, report: Metrics) -> CheckedResponse:
    """Check a model's answer; abstaining is valid. report: the metrics of the profile."""
    response = last_answer(text)
    if response is None:
        problems = [f"the answer holds no complete JSON object with {' or '.join(sorted(ANSWERS))}"]
    else:
        problems = schema_problems(response) or content_problems(response.get("bottlenecks", []), report)
    return CheckedResponse(problems, response)


def last_answer(text: str) -> dict | None:
    """The last complete JSON object in a text that is an answer: models think aloud and draft first."""
    decoder = json.JSONDecoder(parse_float=finite, parse_int=finite, parse_constant=finite)
    answer, at = None, text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = {}, at + 1
        if ANSWERS & value.keys():
            answer = value
        at = text.find("{", end)
    return answer


def finite(text: str) -> float:
    """A number of JSON; ValueError for NaN, Infinity and what is too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return int(text) if text.lstrip("-").isdigit() else value


def schema_problems(response: dict) -> list[str]:
    """Where the answer does not fit the schema, in the order of the answer."""
    errors = bundle.validator(RESPONSE_SCHEMA).iter_errors(response)
    return [
        f"{place(error.instance_path)}: {described(error)}"
        for error in sorted(errors, key=lambda e: list(map(str, e.instance_path)))
    ]


def place(path: list[str | int]) -> str:
    """ "bottlenecks[0].evidence[1].value" """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "the object"


def described(error) -> str:
    """The validator's message; for a pattern, the schema's description of it."""
    if error.kind.name != "pattern":
        return bundle.schema_message(error)
    rule = reduce(getitem, error.schema_path[:-1], response_schema())
    return f"must be {rule['description']}"


def content_problems(bottlenecks: list[dict], report: Metrics) -> list[str]:
    """Problems that no schema sees: one category twice, and evidence that is not the report's."""
    categories = [bottleneck["category"] for bottleneck in bottlenecks]
    twice = len(set(categories)) < len(categories)
    problems = [f"bottlenecks: both are in the category {categories[0]}; name two, or one alone"] if twice else []
    for number, bottleneck in enumerate(bottlenecks):
        for index, cited in enumerate(bottleneck["evidence"]):
            if problem := evidence_problem(cited["metric"], cited["value"], report):
                problems.append(f"bottlenecks[{number}].evidence[{index}]: {problem}")
    return problems


def evidence_problem(metric: str, value: float, report: Metrics) -> str | None:
    if metric not in report:
        return f"'{metric}' is not a metric of the report; cite its keys, for example: {', '.join(sorted(report)[:3])}"
    if report[metric] is None:
        return f"{metric} was not collected"
    if not agrees(value, report[metric]):
        return f"{metric} is {figure(report[metric])}, not {figure(value)}"
    return None


def agrees(cited: float, actual: float) -> bool:
    """Is a cited value the report's, rounded to the cited decimals? For 91.17, 91.2 and 91 agree; 91.1 and 90 do not.

    From 1000 on three digits are enough (1.05e9 for 1049584640). It is never more than 5 % off: for 0.4, 0 does not
    agree.
    """
    decimals = max(0, -Decimal(repr(cited)).as_tuple().exponent)
    off, size = abs(cited - actual), abs(actual)
    # 0.51, not 0.5: the brief shows five digits, and rounding those may land on the other side of a half
    rounded = off <= 0.51 * 10.0**-decimals or (size >= 1000 and off <= 0.005 * size)
    return rounded and off <= 0.05 * size


def figure(value: float | None) -> str:
    """A value to copy into JSON: five significant digits, no separators; None is "not collected"."""
    if value is None:
        return NOT_COLLECTED
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    rounded = float(f"{value:.5g}")
    return str(int(rounded)) if rounded.is_integer() else repr(rounded)
