#!/usr/bin/env python3
"""Hardware values of the wiki, each with the line that holds it."""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import EnvironmentLacks, Refused
from kernelopt.hardware import wiki

EXAMPLES = """examples:
  gpu_specs.py list
  gpu_specs.py show H200
  gpu_specs.py lookup H200 memory_bandwidth --json
  gpu_specs.py detect
  gpu_specs.py check        # after a page was added or changed"""


def main() -> int:
    args = arguments()
    root = wiki.root(args.gpu_wiki)
    if args.verb == "check":
        return check(root, args.json)
    products = wiki.pages(root)
    if args.verb == "list":
        return list_products(products, args.json)
    if args.verb == "detect":
        return detect(products, args.json)
    page = page_of(args, products)
    if args.verb == "show":
        return show(page, args.json)
    return lookup(page, args.metric, products, args.json)


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|show|lookup|detect|check")
    for verb, text in {
        "list": "the products that the wiki has",
        "show": "all values of a product",
        "lookup": "one value of a product",
        "detect": "the product of this machine's GPU, and the values in which the two disagree",
        "check": "check the wiki: rows, units, sources, plausible values, links, index, tags of figures",
    }.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        cli.add_json(sub)
        cli.add_gpu_wiki(sub)
        if verb in ("show", "lookup"):
            sub.add_argument("platform", help="for example H200")
            sub.add_argument("--workspace", type=Path, help="use its calibration (calibrate_gpu.py) before the wiki")
        if verb == "lookup":
            sub.add_argument("metric", help="for example memory_bandwidth")
    return parser.parse_args()


def page_of(args, products: list[wiki.Page]) -> wiki.Page:
    """The requested page, from the workspace when one is named."""
    if args.workspace is None:
        return wiki.find(args.platform, products)
    from kernelopt.session import platforms
    from kernelopt.session.workspace import Workspace

    workspace = Workspace(args.workspace)
    return platforms.of_device(args.platform, workspace, workspace.task())


def list_products(products: list[wiki.Page], as_json: bool) -> int:
    platforms = [{"platform": p.platform, "vendor": p.vendor, "architecture": p.architecture} for p in products]
    lines = [f"{p['platform']:16} {p['vendor']} {p['architecture']}" for p in platforms]
    cli.emit({"platforms": platforms}, as_json, lines)
    return 0


def to_json(page: wiki.Page, row: wiki.Row) -> dict:
    """The JSON object of one value."""
    return {
        "platform": page.platform,
        "metric": row.metric,
        "value": row.value,
        "unit": row.unit,
        "status": "known" if row.known else row.text.lower(),
        "citation": row.citation,
        "source": row.source,
        "source_kind": row.kind,
        "note": row.note,
    }


def show(page: wiki.Page, as_json: bool) -> int:
    rows = page.all_rows().values()
    values = [to_json(page, row) for row in rows]
    cli.emit({"platform": page.platform, "values": values}, as_json, [row.citation for row in rows])
    return 0


def lookup(page: wiki.Page, metric: str, products: list[wiki.Page], as_json: bool) -> int:
    row = page.row(metric)
    if row is None:
        row = wiki.Row(metric, "UNKNOWN", "-", "-", "-", f"{page.platform} has no such row", "", 0)
        known = any(metric in product.all_rows() for product in products)
        odd = "" if known else f"no page has a metric {metric}; "
        cli.say(f"gpu_specs.py: {odd}{page.platform} has: {', '.join(page.all_rows())}")
    cli.emit(to_json(page, row), as_json, [row.citation])
    return 0 if row.known else 1


def detect(products: list[wiki.Page], as_json: bool) -> int:
    from kernelopt.device import amd, gpu

    try:
        device, values = gpu.identify(), gpu.query()
        names = (device.name, device.uuid, device.driver)
    except EnvironmentLacks:
        if (device := amd.identify()) is None:
            raise
        values = {"gfx_target": device.gfx_target} if device.gfx_target else {}
        names = (device.name, *values.values())
    try:
        page = wiki.find(device.name, products)
    except Refused as error:
        reported = ", ".join(f"{metric} {shown(value)}" for metric, value in values.items())
        measure = "" if isinstance(device, amd.AmdCard) else ". Measure it: calibrate_gpu.py --workspace W"
        raise Refused(f"{error}. The device reports: {reported or 'nothing'}{measure}") from None
    differing = wiki.disagreements(page, values)
    result = {"platform": page.platform, **device.to_json(), "device": values}
    result["disagreements"] = [asdict(one) for one in differing]
    lines = [f"{page.platform}: {', '.join(names)}"]
    lines += [f"{metric}: {shown(value)}" for metric, value in values.items()]
    lines += [
        f"DISAGREES: the device reports {one.metric} {one.device}, the wiki has {one.citation}" for one in differing
    ]
    cli.emit(result, as_json, lines)
    return 0


def shown(value: int | float | str) -> str:
    return value if isinstance(value, str) else format(value, ".6g")


def check(root: Path, as_json: bool) -> int:
    from kernelopt.hardware import wiki_checks

    problems = wiki_checks.problems(root)
    count = len(wiki.pages(root))
    cli.emit(
        {"products": count, "problems": problems}, as_json, [*problems, f"{count} products, {len(problems)} problems"]
    )
    return 1 if problems or not count else 0


if __name__ == "__main__":
    cli.run(main)
