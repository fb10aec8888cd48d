"""Start a GPU node on this machine, and check one at an address."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from .. import bundle
from ..device import processes
from ..device.pipes import last_line
from ..errors import EnvironmentLacks, UsageError
from . import connection, hand_over, mirrors
from .connection import Address
from .self_check import Report

START_S, END_S = 120, 15  # seconds for Ray to start and to end
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray then binds all its ports to 127.0.0.1, as it does on macOS
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing here can move to another node
    "RAY_enable_worker_prestart": "0",  # such workers lack the bundle, so none would be used
    # Ray starts a process for each client by fork, among gRPC's threads: with gRPC's handlers of fork some of these
    # processes die, and connections of other clients break.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": connection.SETTINGS["RAY_CLIENT_RECONNECT_GRACE_PERIOD"],
}


def check(text: str) -> Report:
    """What the node at an address has. EnvironmentLacks when it cannot be reached."""
    with connection.connected(text) as node:
        done = hand_over.run(node, hand_over.Call(["-m", "kernelopt.remote.self_check"]), lambda _: None)
    try:
        return replace(Report(**bundle.loads(done.out)), gpus=node.gpus)
    except (ValueError, TypeError):
        raise EnvironmentLacks(f"{text} cannot run this bundle: {done.err or f'exit {done.code}'}") from None


def serve(address: Address, gpus: int | None, ready: Callable[[Path | None], None]) -> NoReturn:
    """Run a node until this process is told to end; EnvironmentLacks when Ray ends before. gpus: how many; None: those
    that Ray finds.

    ready: called once, when the node answers, with the file of its token, None where the user gave one.
    """
    bundle.require("ray", "grpc", group="distributed")
    check_free(address)
    environment, token = environment_of(address)
    shutil.rmtree(folder_of(address), ignore_errors=True)  # what a former node left
    log = tempfile.TemporaryFile()  # noqa: SIM115 (read when Ray does not start)
    process = subprocess.Popen(
        command(address, gpus),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),
    )
    try:
        wait_until_it_answers(process, address, log)
        ready(token)
        code = process.wait()
        raise EnvironmentLacks(f"Ray has ended by itself, exit code {code}: {said(log)}")
    finally:
        end(process)


def folder_of(address: Address) -> Path:
    """Ray's folder of a node: its sockets and logs."""
    return mirrors.node_folder() / f"ray-{address.port}"


def command(address: Address, gpus: int | None) -> list[str]:
    """Ray's command line of a node."""
    options = {
        "--node-ip-address": address.host,
        "--ray-client-server-port": str(address.port),
        "--port": "0",  # any that is free
        "--min-worker-port": "0",  # these too: Ray's own range, 10002 to 19999, would take the node's port
        "--max-worker-port": "0",
        "--include-dashboard": "false",
        "--temp-dir": str(folder_of(address)),
    } | ({} if gpus is None else {"--num-gpus": str(gpus)})
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    return [*start, *(f"{name}={value}" for name, value in options.items())]


def environment_of(address: Address) -> tuple[dict[str, str], Path | None]:
    """(the environment of a node, the file of its token: None where the user gave one)."""
    environment = {**os.environ, **SETTINGS, **(LOOPBACK if address.is_loopback() else {})}
    environment.pop("KERNELOPT_ON", None)
    if connection.has_token():
        return environment, None
    file = mirrors.node_folder() / mirrors.TOKEN_FILE
    if not file.exists():
        bundle.write_text(file, secrets.token_hex(32))
    file.chmod(0o600)
    return {**environment, "RAY_AUTH_TOKEN_PATH": str(file)}, file


def check_free(address: Address) -> None:
    """UsageError when the port is in use, or the address is not this machine's."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise UsageError(
            f"no node can listen at {address} ({error.strerror}); name another --port, or this machine's --host"
        ) from None


def wait_until_it_answers(process: subprocess.Popen, address: Address, log) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((address.host, address.port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise EnvironmentLacks(f"Ray does not start here: {said(log)}")


def said(log) -> str:
    """The last line that Ray printed."""
    log.seek(0)
    return last_line(log.read())


def end(process: subprocess.Popen) -> None:
    """End the node with all its processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
