"""A connection to a GPU node, through Ray's client. Ray brings the bundle there, once per content."""

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import bundle, errors
from ..errors import EnvironmentLacks, ToolError, UsageError, say
from . import mirrors

SHIPPED = {"tools", "reference", "gpu-wiki", "pyproject.toml"}  # of the bundle
PORT = 10001  # of Ray's client server
REACH_S = 5  # seconds for the first answer of an address
ANNOUNCED_S, GIVEN_UP_S = 5, 600  # seconds of waiting for a GPU of the node
ATTEMPTS = 3  # to connect
NOT_STARTED = ("server failed", "psutil.")  # of a node's server that ended while Ray waited for its start, too
STOP_S = 15  # seconds in which the work on the node is ended
WHO = ("The cluster was started with", "This process")  # in Ray's words on versions
SETTINGS = {
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "10",  # seconds after which a lost connection ends the work on the node
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "3",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # without it, a lost connection would start a Ray here
    "GRPC_VERBOSITY": "NONE",
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # as on the node, see nodes.SETTINGS
}
AGAIN = "nothing was changed here; run the command again"


class Node(Protocol):
    """A place that runs commands. gpus: how many it has. name: in messages."""

    name: str
    gpus: int

    def run(self, *arguments) -> contextlib.AbstractContextManager[Callable[..., Any]]:
        """Make there.Run(*arguments) on a GPU of its own: a function that takes the name of a method and its arguments.
        The work is ended with the block."""
        ...

    def disconnect(self) -> None:
        """End all work on the node."""
        ...


@dataclass(frozen=True)
class Address:
    """host, port: of Ray's client server."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The address in ray://HOST:PORT, HOST:PORT or HOST. UsageError for another form."""
        host, _, port = text.removeprefix("ray://").rstrip("/").rpartition(":")
        if not host:
            host, port = port, str(PORT)
        if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(f"{text!r} is no address of a node; write ray://HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"ray://{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.")

    def is_here(self) -> bool:
        """Whether it is an address of this machine: only there can a socket be bound to it."""
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((self.host, 0))
            return True
        return False


@contextlib.contextmanager
def connected(text: str) -> Iterator["RayNode"]:
    """The node at an address. EnvironmentLacks says why it cannot be used."""
    address = Address.parse(text)
    bundle.require("ray", "grpc", group="distributed")
    check_reachable(address)
    set_up(address)
    import ray
    from ray.util.client import logsclient

    warnings.filterwarnings("ignore", module=r"ray\.")  # on large messages, on a connection that breaks
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    logsclient.logger.disabled = True  # Ray gives it a level of its own
    logsclient.LogstreamClient.stdstream = lambda *_, **__: None  # it would print the server's lines on our stdout
    try:
        with reasons() as logged, telling(address, logged), own_end():
            join(address)
            gpus = int(ray.cluster_resources().get("GPU", 0))
        yield RayNode(address, gpus)
    finally:
        RayNode.disconnect()


def join(address: Address) -> None:
    """Connect Ray's client. A node's server for one client, a process of its own, fails to start now and then."""
    import ray

    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            ray.init(str(address), runtime_env=shipped(), log_to_driver=False, logging_level=logging.CRITICAL)
            return
        except ConnectionAbortedError as error:
            if not attempts_left or not any(words in str(error) for words in NOT_STARTED):
                raise
            ray.shutdown()


@contextlib.contextmanager
def own_end() -> Iterator[None]:
    """Keep what this process does on SIGTERM: ray.init has it leave with exit code 15."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class RayNode:
    """A Node at the other end of a Ray client."""

    def __init__(self, address: Address, gpus: int):
        self.address, self.name, self.gpus = address, str(address), gpus
        self._introduced = False

    @contextlib.contextmanager
    def run(self, *arguments) -> Iterator[Callable[..., Any]]:
        import ray

        def call(method: str, *values):
            with telling(self.address):
                return unwrapped(*ray.get(actor.call.remote(method, *values)))

        with telling(self.address):
            actor = ray.remote(num_gpus=min(1, self.gpus), max_restarts=0)(on_the_node()).remote(*arguments)
        try:
            self._await(actor)
            yield call
        finally:
            with contextlib.suppress(Exception):  # the node may be gone
                ray.get(actor.call.remote("stop"), timeout=STOP_S)
            with contextlib.suppress(Exception):
                ray.kill(actor)

    @staticmethod
    def disconnect() -> None:
        import ray

        with contextlib.suppress(Exception):  # the node may be gone
            ray.shutdown()

    def introduction(self, about: str) -> str:
        """Where the work runs; "here" in the messages that follow is there."""
        return f"on {self.name} ({about}{'' if self.gpus else ', no GPU'})"

    def _await(self, actor) -> None:
        """Wait until a GPU of the node is free for the actor. A wait is announced on stderr, as by gpu_lock.locked."""
        import ray

        with telling(self.address):
            ready, start, announced = actor.call.remote("about"), time.monotonic(), False
            while not ray.wait([ready], timeout=0.5)[0]:
                waited = time.monotonic() - start
                if waited > GIVEN_UP_S:
                    raise EnvironmentLacks(f"GPU busy: all {self.gpus} GPUs of {self.name} are in use; wait for one")
                if waited > ANNOUNCED_S and not announced:
                    say(f"waiting for {self.name}: its GPUs are in use, or it prepares the bundle")
                    announced = True
            about = unwrapped(*ray.get(ready))
            if not self._introduced:
                say(self.introduction(about))
            self._introduced = True


def on_the_node() -> type:
    """A class that Ray sends by value, because the node has this bundle only where it runs."""

    class RunThere:
        def __init__(self, *arguments):
            self._arguments, self._run = arguments, None

        def call(self, method: str, *values) -> tuple:
            """(result, None), or (None, (class, message)) of a ToolError, whose class Ray would lose on the way."""
            import sys

            sys.path.insert(0, "tools")  # of the bundle that Ray brought
            from kernelopt import errors
            from kernelopt.remote import there

            try:
                self._run = self._run or there.Run(*self._arguments)
                return getattr(self._run, method)(*values), None
            except errors.ToolError as error:
                return None, (type(error).__name__, str(error))

    return RunThere


def unwrapped(result: Any, error: tuple[str, str] | None) -> Any:
    """The result of a call on the node. Raise the ToolError that it met there."""
    if error:
        raise getattr(errors, error[0])(error[1])
    return result


def shipped() -> dict:
    """Ray's runtime environment: the parts of the bundle that tools need."""
    left_out = [f"/{path.name}" for path in bundle.ROOT.iterdir() if path.name not in SHIPPED]
    return {"working_dir": str(bundle.ROOT), "excludes": left_out}


def check_reachable(address: Address) -> None:
    """EnvironmentLacks when nothing answers there, or this process may not ask."""
    try:
        socket.create_connection((address.host, address.port), REACH_S).close()
    except PermissionError:
        raise EnvironmentLacks(
            f"this process may not open a connection to {address}, probably because of its sandbox; allow it the "
            "network (Codex: -c sandbox_workspace_write.network_access=true), or use tools/carry.py"
        ) from None
    except OSError as error:
        raise EnvironmentLacks(
            f"nothing answers at {address} ({error.strerror or error}); start a node there: bash scripts/gpu_node.sh"
        ) from None


def set_up(address: Address) -> None:
    """Set what Ray's client reads from the environment: its limits, and the token."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not has_token() and address.is_here() and (own := mirrors.token_file()):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(own)
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def has_token() -> bool:
    """Whether the user has given Ray a token, in one of its three places."""
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return given or (Path.home() / ".ray" / "auth_token").is_file()


@contextlib.contextmanager
def reasons() -> Iterator[list[str]]:
    """The reasons that Ray's client logs, and silence about the rest."""
    logged: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger = logging.getLogger("ray.util.client.worker")
    before = logger.handlers[:], logger.propagate, logger.level
    logger.handlers, logger.propagate = [Collect(logging.DEBUG)], False
    logger.setLevel(logging.DEBUG)
    try:
        yield logged
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


@contextlib.contextmanager
def telling(address: Address, logged: Sequence[str] = ()) -> Iterator[None]:
    """Turn what Ray raises into EnvironmentLacks. logged: what its client said meanwhile."""
    import grpc
    import ray

    try:
        yield
    except ToolError:  # of ours, raised on the node
        raise
    except (ray.exceptions.RayError, grpc.RpcError, ConnectionError, RuntimeError, ValueError) as error:
        raise EnvironmentLacks(why(address, str(error), logged)) from None


def why(address: Address, error: str, logged: Sequence[str]) -> str:
    """One sentence on what Ray raised."""
    if "Version mismatch" in error:
        theirs, ours = (re.search(rf"{who}.*?Ray: (\S+).*?Python: (\S+)", error, re.DOTALL) for who in WHO)
        versions = f": {theirs[1]} and {theirs[2]} there, {ours[1]} and {ours[2]} here" if theirs and ours else ""
        return f"{address} has another version of Ray or Python{versions}; install the same on both machines"
    if "connection timeout" in error:
        if any("token" in line.lower() or "nauthenticated" in line for line in logged):
            return f"{address} refuses the token; set RAY_AUTH_TOKEN to the node's (its first lines say where that is)"
        return f"what answers at {address} is no node; start one there: bash scripts/gpu_node.sh"
    last = error.strip().splitlines()[-1:] or ["without a reason"]
    if any(words in error for words in NOT_STARTED):
        return f"{address} cannot start its server for this client ({last[0][:200]}); {AGAIN}"
    if "Initialization failure" in error:  # before Ray compares versions
        here = f"Ray {importlib.metadata.version('ray')}, Python {platform.python_version()}"
        return (
            f"{address} does not accept this client ({last[0][:200]}); install the same versions there as here: {here}"
        )
    return f"the connection to {address} broke ({last[0][:200]}); {AGAIN}"
