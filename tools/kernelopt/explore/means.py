"""The candidates of several workloads, and their order by all of them: pure functions of rows as they are stored."""

import statistics

from ..statuses import Status

CELL = ("status", "latency_us", "against_best", "error", "dropped")  # of a row, at another workload


def cell(row: dict, was_stopped: bool) -> dict:
    """What a row says of its candidate at another workload. status None: nobody knows, as there was no time."""
    is_unknown = not row["started"] or (was_stopped and row["status"] == Status.TIMEOUT)
    return {name: row[name] for name in CELL} | ({"status": None} if is_unknown else {})


def merged(rows: list[dict], elsewhere: dict[str, dict[str, dict]]) -> list[dict]:
    """The rows of the first workload, each with `others` and `mean`: those that were timed on all workloads first, by
    their mean, then the rest as they are. elsewhere: workload -> name -> cell."""
    rows = [
        {**row, "others": {at: cells[row["name"]] for at, cells in elsewhere.items() if row["name"] in cells}}
        for row in rows
    ]
    timed = [row for row in rows if elsewhere and is_timed(row, len(elsewhere))]
    scores = dict(zip([row["name"] for row in timed], scores_of([cells_of(row) for row in timed]), strict=True))
    rows = [{**row, "mean": scores.get(row["name"]) if all(map(speed_up, cells_of(row))) else None} for row in rows]
    return sorted(rows, key=lambda row: (row["name"] not in scores, -scores.get(row["name"], 0.0)))


def cells_of(row: dict) -> list[dict]:
    """Of all its workloads, the first one first."""
    return [row, *row["others"].values()]


def is_timed(row: dict, others: int) -> bool:
    """Is it a candidate that is right, and has a time, on the first workload and on so many others?"""
    right = [one for one in cells_of(row) if one["status"] == Status.OK and one["latency_us"]]
    return not row["opponent"] and len(right) == 1 + others


def speed_up(one: dict) -> float | None:
    return one["against_best"] and one["against_best"]["point"]


def scores_of(rows: list[list[dict]]) -> list[float]:
    """The geometric mean of each row's speed-ups; at a workload where one lacks it, of the best time over its own."""
    columns = [speed_ups(column) for column in zip(*rows, strict=True)]
    return [statistics.geometric_mean(speeds) for speeds in zip(*columns, strict=True)]


def speed_ups(column: tuple[dict, ...]) -> list[float]:
    """Of all candidates at one workload."""
    speeds = [speed_up(one) for one in column]
    if None not in speeds:
        return speeds
    times = [one["latency_us"]["median"] for one in column]
    return [min(times) / time for time in times]
