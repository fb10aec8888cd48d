#!/usr/bin/env python3
"""Does the bundle help an agent? Runs any agent's command on cases, with the bundle and without it, and counts what
passes.

The command gets the prompt on stdin and a fresh folder as working directory; its answer is its stdout and the files it
leaves.

examples:
  run.py list
  run.py run --client claude --repeats 5
  run.py run --agent './my_agent -' --case noise
  run.py run --client codex --case gated_scan paged_decode --arm with no-wiki without
  run.py table run1/results.json run2/results.json
  run.py prepare noise /tmp/noise --with-bundle       # by hand: prints the prompt
  run.py check noise /tmp/noise --answer answer.txt   # by hand: exit 0 is a pass
  run.py triggers --agent 'claude -p' --repeats 3
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cases
import experiment
import tables
import triggers
from judging import text
from kernelopt import bundle, cli
from kernelopt.device import gpu
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.loop import clients


def main() -> int:
    args = arguments()
    return args.verb(args)


def show_list(args) -> int:
    found = [cases.load(name) for name in cases.names()]
    listed = [{"case": case.name, "kind": case.kind, "title": case.title} for case in found]
    cli.emit({"cases": listed}, args.json, [f"{case.name:20} {case.kind:10} {case.title}" for case in found])
    return 0


def prepare(args) -> int:
    case = cases.load(args.case)
    cases.prepare(case, args.folder)
    cases.commit(args.folder)
    prompt = case.prompt
    if args.with_bundle or args.no_wiki:
        skill = cases.install_bundle(args.folder, args.client)
        if args.no_wiki:
            cases.remove_wiki(skill)
        prompt += cases.pointer(skill, args.folder) if args.point else ""
    folder = str(args.folder.resolve())
    cli.emit({"case": case.name, "folder": folder, "prompt": prompt}, args.json, [prompt.rstrip()])
    return 0


def check(args) -> int:
    if not args.answer.is_file() or not args.folder.is_dir():
        raise UsageError(f"{args.folder} must be the agent's folder, and {args.answer} a file with its answer")
    failures = cases.judge(cases.load(args.case), args.folder, text(args.answer))
    lines = [f"does not hold: {failure}" for failure in failures] or ["passed"]
    cli.emit({"case": args.case, "passed": not failures, "failures": failures}, args.json, lines)
    return 1 if failures else 0


def run(args) -> int:
    chosen, left_out = choose(args.case or cases.names())
    if set(args.arm) != {"with"} and (found := cases.installed_for_all()):
        raise UsageError(f"{found[0]} gives the bundle to every run; uninstall it, or pass --arm with")
    out = fresh(args.out)
    agent = experiment.Agent(command(args), args.client, args.point, args.timeout)
    head = {
        "agent": agent.command,
        "client": args.client,
        "client_version": experiment.version(args.client),
        "plumbing": args.plumbing,
        "pointed_at_skill": args.point,
        "bundle_commit": experiment.commit(),
        "seed": args.seed,
        "repeats": args.repeats,
        "timeout_s": args.timeout,
        "left_out": left_out,
    }
    runs: list[dict] = []
    plan = experiment.schedule(chosen, args.arm, args.repeats, args.seed)
    for result in experiment.perform(agent, plan, out):
        tell(result)
        runs.append(result)
        experiment.write(out, head, runs)  # after each, so that a killed experiment keeps what it has
    result = experiment.write(out, head, runs)
    cli.emit(result, args.json, [*tables.table([result]), *tables.notes(result), f"{out / 'results.json'}"])
    return 0 if any(run["outcome"] in ("passed", "failed") for run in runs) else 1


def command(args) -> str:
    """The agent's command, as given or as the client's is known."""
    if args.agent:
        return args.agent
    if args.client not in experiment.COMMANDS:
        known = ", ".join(experiment.COMMANDS)
        raise UsageError(f"name the agent's command with --agent, or with --client one of {known}")
    chosen = experiment.COMMANDS[args.client]
    program = chosen.split()[0]
    clients.require_installed(program)
    clients.require_sandbox(program, "name a command without it with --agent")
    return chosen


def show_table(args) -> int:
    results = [bundle.read_json(file) for file in args.results]
    if bad := [file for file, result in zip(args.results, results, strict=True) if "plumbing" not in result]:
        raise UsageError(f"{bad[0]} is no results.json of run.py run")
    cli.emit({"results": results}, args.json, tables.table(results))
    return 0


def choose(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """(cases that can run here, case -> why it cannot); EnvironmentLacks when none can."""
    lacking = None
    try:
        gpu.identify()
    except EnvironmentLacks as error:
        lacking = str(error)
    tasks = [name for name in names if cases.load(name).kind == "task"]
    left_out = dict.fromkeys(tasks, lacking) if lacking else {}
    chosen = [name for name in names if name not in left_out]
    if not chosen:
        raise EnvironmentLacks(f"task cases are judged on a GPU: {lacking}")
    return chosen, left_out


def fresh(out: Path | None) -> Path:
    """The folder for results, new or empty."""
    if out is None:
        return Path(tempfile.mkdtemp(prefix="kernelopt_evals_"))
    cases.make_fresh(out)
    return out.resolve()


def tell(result: dict) -> None:
    why = f": {result['failures'][0]}" if result["failures"] else ""
    cli.say(f"{result['case']} {result['arm']} {result['repeat']}: {result['outcome']}{why} ({result['wall_s']:.0f} s)")


def judge_triggers(args) -> int:
    queries = triggers.load()["queries"]
    if args.agent:
        found = asked(args, queries)
    elif args.answer:
        if not args.answer.is_file():
            raise UsageError(f"{args.answer} is no file")
        found = [triggers.score(queries, triggers.choices(text(args.answer)))]
    else:
        cli.emit({"prompt": triggers.prompt(queries)}, args.json, [triggers.prompt(queries).rstrip()])
        return 0
    passed = all(one["passed"] for one in found)
    lines = [f"recall {one['recall']:.2f}, false {one['false_rate']:.2f}" for one in found]
    lines += [f"{q['id']}: chose {q['chosen']}, expected {q['expected'] or 'none'}" for o in found for q in o["wrong"]]
    cli.emit({"passed": passed, "repeats": found}, args.json, lines)
    return 0 if passed else 1


def asked(args, queries: list[dict]) -> list[dict]:
    """The scores of so many repeats, each message asked by itself."""
    found = []
    for _ in range(args.repeats):
        chosen: dict[str, str] = {}
        for query in queries:
            with tempfile.TemporaryDirectory(prefix="project_") as home, tempfile.TemporaryDirectory() as kept:
                cases.commit(Path(home))
                (Path(kept) / "prompt.md").write_text(triggers.prompt([query]), encoding="utf-8")
                env = experiment.environment("discipline")
                code, _ = experiment.ask(args.agent, Path(home), Path(kept), args.timeout, env)
                answer = text(Path(kept) / "answer.txt") if code == 0 else ""
            chosen |= {name: skill for name, skill in triggers.choices(answer).items() if name == query["id"]}
        found.append(triggers.score(queries, chosen))
    return found


def arguments():
    parser = cli.parser(__doc__)
    verbs = parser.add_subparsers(required=True, metavar="list|prepare|check|run|table|triggers")

    verb = verbs.add_parser("list", help="the cases", allow_abbrev=False)
    finish(verb, show_list)

    verb = verbs.add_parser("prepare", help="make the folder of a case and print its prompt", allow_abbrev=False)
    verb.add_argument("case", metavar="CASE")
    verb.add_argument("folder", type=cli.path, metavar="DIR", help="new or empty, outside the bundle")
    arm = verb.add_mutually_exclusive_group(required=True)
    arm.add_argument("--with-bundle", action="store_true", help="with the bundle in the project's skills folder")
    arm.add_argument("--no-wiki", action="store_true", help="the same, of the wiki the hardware values alone")
    arm.add_argument("--without", action="store_true", help="with the case's files alone")
    add_client(verb)
    finish(verb, prepare)

    verb = verbs.add_parser("check", help="judge what an agent left", allow_abbrev=False)
    verb.add_argument("case", metavar="CASE")
    verb.add_argument("folder", type=cli.path, metavar="DIR", help="where the agent worked")
    verb.add_argument("--answer", type=cli.path, required=True, metavar="FILE", help="what it answered at last")
    finish(verb, check)

    verb = verbs.add_parser("run", help="run an agent's command on cases, and count", allow_abbrev=False)
    verb.add_argument(
        "--agent", type=cli.filled, metavar="COMMAND", help="gets the prompt on stdin (default: --client's)"
    )
    verb.add_argument("--case", nargs="+", metavar="CASE", help="only these (default: all that can run here)")
    verb.add_argument(
        "--arm", nargs="+", choices=experiment.ARMS, default=list(experiment.BOTH), help="default: with without"
    )
    verb.add_argument("--repeats", type=cli.positive_int, default=3, help="so many of each (default 3)")
    verb.add_argument("--timeout", type=cli.positive_float, help="seconds a run (default: each case's own)")
    verb.add_argument("--seed", type=cli.natural, default=0, help="of the order of runs (default 0)")
    verb.add_argument("--out", type=cli.path, metavar="DIR", help="new or empty (default: a new one in /tmp)")
    verb.add_argument("--plumbing", action="store_true", help="a scripted model answers the client: note it as such")
    add_client(verb)
    finish(verb, run)

    verb = verbs.add_parser("table", help="the results of several runs side by side", allow_abbrev=False)
    verb.add_argument("results", nargs="+", type=cli.path, metavar="FILE", help="results.json of run")
    finish(verb, show_table)

    verb = verbs.add_parser("triggers", help="which skill would be read? prints the question", allow_abbrev=False)
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--answer", type=cli.path, metavar="FILE", help="judge an answer to the printed question")
    how.add_argument("--agent", type=cli.filled, metavar="COMMAND", help="ask it, one message a call")
    verb.add_argument("--repeats", type=cli.positive_int, default=3, help="with --agent (default 3)")
    verb.add_argument("--timeout", type=cli.positive_float, default=120, help="seconds a call (default 120)")
    finish(verb, judge_triggers)
    return parser.parse_args()


def add_client(verb) -> None:
    verb.add_argument(
        "--client", choices=cases.install.CLIENTS, default="agents", help="whose skills folder (default agents)"
    )
    verb.add_argument("--point", action="store_true", help="the prompt with the bundle says where the skill lies")


def finish(verb, function) -> None:
    cli.add_json(verb)
    verb.set_defaults(verb=function)


if __name__ == "__main__":
    cli.run(main)
