"""The results of one or more experiments as text. Runs with a scripted model stand apart: they say nothing about an
agent."""

from collections.abc import Sequence

HEADINGS = {
    False: "agents",
    True: "plumbing: a scripted model answered the client; this says nothing about an agent",
}


def table(results: Sequence[dict]) -> list[str]:
    """Passed of judged runs and the 95 % interval: a row a case, a column a client and arm. results: of
    experiment.write."""
    lines = []
    for plumbing, heading in HEADINGS.items():
        if own := [result for result in results if result["plumbing"] == plumbing]:
            lines += [heading, *rows(own)]
    return lines


def rows(results: Sequence[dict]) -> list[str]:
    """The rows of one kind of experiments, with their head; "total" is the last."""
    columns = [(result, arm) for result in results for arm in result["rates"]["total"]]
    names = dict.fromkeys(name for result in results for name in result["rates"] if name != "total")
    head = f"{'case':20}" + "".join(f"{result['client'] + ' ' + arm:>28}" for result, arm in columns)
    cells = {
        name: [cell(result["rates"].get(name, {}).get(arm)) for result, arm in columns] for name in [*names, "total"]
    }
    return [head, *(f"{name:20}" + "".join(f"{one:>28}" for one in own) for name, own in cells.items())]


def cell(rate: dict | None) -> str:
    if not rate or not rate["judged"]:
        return "not judged"
    low, high = rate["ci95"]
    return f"{rate['passed']}/{rate['judged']} ({100 * low:.0f} to {100 * high:.0f} %)"


def notes(result: dict) -> list[str]:
    """How the runs of an experiment ended, and which cases it left out."""
    outcomes = [run["outcome"] for run in result["runs"]]
    counted = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    return [f"runs: {counted}", *(f"left out: {name}: {why}" for name, why in result["left_out"].items())]
