"""Write tests/fixtures/clients/CLIENT_TROUBLE.txt: what each client prints when it gets no answer of its model.

unshare --net python tests/clients/isolated.py python tests/clients/capture.py   (after bash scripts/test.sh --clients)
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "tools")]
from kernelopt.loop.clients import CLIENTS

from clients.bench import bench_of
from clients.real_clients import REAL_CLIENTS, REFUSING
from clients.scripted_model import step

UNKNOWN = "scripted/unknown"
TROUBLES = {
    "key": step("fail", 401, "authentication_error", "invalid x-api-key"),
    "quota": step("fail", 429, "rate_limit_error", "You exceeded your current quota"),
    "model": step("fail", 404, "not_found_error", f"The model `{UNKNOWN}` does not exist"),
    "unreachable": None,
}
SECONDS, LONGEST = 20, 4000
NOISE = re.compile(r"^\s+at |^\s*[\]})]|^\s*$|^\s+\w+: ")  # of stack traces and dumped objects


def main() -> None:
    target = TESTS / "fixtures" / "clients"
    target.mkdir(exist_ok=True)
    for client in REAL_CLIENTS:
        for name, wanted in TROUBLES.items():
            with tempfile.TemporaryDirectory() as folder:
                for bench in bench_of(client, Path(folder) / "home", Path(folder) / "project"):
                    if wanted is None:
                        bench.url = REFUSING
                    bench.model.follow(wanted or step("say", ""))
                    model = UNKNOWN if name == "model" else None
                    command = f"timeout {SECONDS} {CLIENTS[client].command_line(model)}"
                    said = bench.try_to(command, prompt="Follow the script.").stdout
            lines = [line[:LONGEST] for line in said.replace(folder, "/F").splitlines() if not NOISE.search(line)]
            (target / f"{client}_{name}.txt").write_text("\n".join(lines) + "\n")
            print(client, name, len(lines), file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(f"capture.py: {error.cmd} did not end")
