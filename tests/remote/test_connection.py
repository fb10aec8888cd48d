"""A node of Ray on this machine, from its start to its end, and what is said when there is none.

The node is one test, because Ray takes seconds to start and a second a command.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import free_port, gpu_node, kernel_text
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.remote import connection, hand_over, mirrors, nodes
from kernelopt.remote.connection import Address
from stand_in_node import PATH, work

MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.52.0
    Python: 3.12.1
This process on Ray Client was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


@pytest.fixture
def node_here(monkeypatch):
    """(process, address, what it printed) of a node; its files and token are in a folder of its own."""
    given = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    for name in given:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need short paths
        monkeypatch.setenv("HOME", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with gpu_node(2, TMPDIR=folder) as started:
            yield started
    for name in {name for name in os.environ if name.startswith("RAY_")} - given.keys():
        del os.environ[name]  # the client's settings


@pytest.mark.timeout(300)
def test_a_node_from_its_start_to_its_end(node_here, session, problem, run_here):
    process, address, lines = node_here
    assert f"export KERNELOPT_ON={address}" in lines[1] and "RAY_AUTH_TOKEN" in lines[2]
    assert listening_elsewhere(process.pid) == []
    a_tool_says_what_it_says_here(address, problem, run_here)
    of_ray = descendants(process.pid)
    ends = signal.getsignal(signal.SIGTERM)
    with connection.connected(address) as node:
        assert signal.getsignal(signal.SIGTERM) is ends  # Ray's own would leave with exit code 15
        assert not logging.getLogger("ray.util.client.logsclient").isEnabledFor(logging.WARNING)
        work_ends_with_its_block(node)
        a_node_that_is_killed_is_named(node, session, process)
    assert not [pid for pid in of_ray if Path(f"/proc/{pid}").exists()]


def work_ends_with_its_block(node) -> None:
    """Also when an error comes from the node, or Ctrl-C from here."""
    with pytest.raises(UsageError, match="is no path of a file that travels"), node.run("key", None, "/x") as there:
        there("start", ["-m", "work_there", "/x", "pid", "sleep:300"], [], None, {"PYTHONPATH": PATH}, None)
        while not (lines := there("output", 0.5)[0]):
            pass
        there("adopt", {"relative": "folder"})
    assert not Path(f"/proc/{int(lines[0][1])}").exists() and node.gpus == 2


def a_tool_says_what_it_says_here(address: str, problem, run_here) -> None:
    problem["kernel"].write_text(kernel_text("return x * self.weight"))
    options = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    options += ["--seeds", "2", "--only-these-shapes"]
    here, there = run_here("verify_kernel.py", *options), run_here("verify_kernel.py", *options, "--on", address)
    assert here.returncode == there.returncode == 1 and here.stdout.startswith("WRONG_VALUES")
    assert there.stdout.split(";")[0].split(":")[:2] == here.stdout.split(";")[0].split(":")[:2]
    assert there.stderr.splitlines()[0].startswith(f"on {address} (") and there.stderr.endswith(here.stderr)


def a_node_that_is_killed_is_named(node, session, process) -> None:
    before = session.kernel.read_bytes()
    with pytest.raises(EnvironmentLacks, match="nothing was changed here; run the command again"):
        hand_over.run(node, work(session, "write:kernel.py=x", "say:now", "sleep:300"), lambda _: process.terminate())
    assert session.kernel.read_bytes() == before and process.wait(30) == 128 + signal.SIGTERM


# --- what is said -----------------------------------------------------------------------------------------------


def test_addresses():
    for text in ("ray://gpu:10001", "gpu:10001", "gpu", "ray://gpu/"):
        assert str(Address.parse(text)) == "ray://gpu:10001"
    for text in ("", "ray://", "gpu:", "gpu:port", "http://gpu:1", "gpu:0", "gpu:65536"):
        with pytest.raises(UsageError, match=r"write ray://HOST:PORT"):
            Address.parse(text)


def test_a_port_that_no_machine_has_starts_no_node(run_here):
    done = run_here("gpu_node.py", "--port", "65536")
    assert done.returncode == 2 and "127.0.0.1:65536' is no address of a node" in done.stderr


ENDS = """
import socket, sys
listening = socket.create_server(("127.0.0.1", {port}))
listening.accept()
print("Ray runtime was terminated: out of memory")
sys.exit(7)
"""


def test_a_node_whose_ray_ends_by_itself_says_so(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address = Address("127.0.0.1", free_port(10002 + os.getpid() % 9000))
    ray = [sys.executable, "-c", ENDS.format(port=address.port)]
    monkeypatch.setattr(nodes, "command", lambda *_: ray)
    with pytest.raises(EnvironmentLacks, match=r"Ray has ended by itself, exit code 7: Ray runtime was terminated"):
        nodes.serve(address, None, lambda token: None)


def test_grpc_does_nothing_when_a_process_is_started(monkeypatch, tmp_path):
    """Its handlers of fork kill a process that Ray starts for a client now and then, and break connections of others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*connection.SETTINGS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert nodes.environment_of(Address("127.0.0.1", 1))[0]["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    connection.set_up(Address("127.0.0.1", 1))
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


def test_a_node_without_a_gpu_is_told_before_its_messages():
    node = Address("h", 1)
    assert connection.RayNode(node, 0).introduction("box, Python 3.11") == "on ray://h:1 (box, Python 3.11, no GPU)"
    assert connection.RayNode(node, 2).introduction("box, Python 3.11") == "on ray://h:1 (box, Python 3.11)"


def test_an_address_where_nothing_answers():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
        with pytest.raises(EnvironmentLacks, match=r"nothing answers at ray://.* start a node there: bash scripts/gpu"):
            connection.check_reachable(address)
        with pytest.raises(UsageError, match=r"no node can listen at .* name another --port"):
            nodes.check_free(address)


def test_a_sandbox_without_network_is_named(monkeypatch):
    def refuses(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_connection", refuses)
    with pytest.raises(EnvironmentLacks, match=r"sandbox_workspace_write\.network_access=true"):
        connection.check_reachable(Address("h", 1))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "grpc" else object())
    with pytest.raises(EnvironmentLacks, match=r"not installed: grpc; run: bash scripts/setup\.sh distributed"):
        connection.connected("h:1").__enter__()


@pytest.mark.parametrize(
    "error, logged, words",
    [
        (
            MISMATCH,
            (),
            "another version of Ray or Python: 2.52.0 and 3.12.1 there, 2.60.0 and 3.11.7 here; install the",
        ),
        (
            "ray client connection timeout",
            ("Unauthenticated: InvalidAuthToken",),
            "refuses the token; set RAY_AUTH_TOKEN",
        ),
        (
            "Initialization failure from server:\nAttributeError: x",
            (),
            "not accept this client (AttributeError: x); install the same",
        ),
        (
            "Initialization failure from server:\npsutil.ZombieProcess: a zombie",
            (),
            "cannot start its server for this client (psutil.ZombieProcess: a zombie); nothing was changed here; run",
        ),
        ("ray client connection timeout", (), "is no node; start one there"),
        ("The actor died.\nIts node was killed", (), "broke (Its node was killed); nothing was changed here"),
        ("", (), "broke (without a reason)"),
    ],
)
def test_what_ray_raises_becomes_a_sentence(error, logged, words, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.60.0")
    assert words in connection.why(Address("h", 1), error, logged)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        ("Initialization failure from server:\npsutil.ZombieProcess: PID still exists but it's a zombie (pid=7)", 3),
        ("Initialization failure from server:\npsutil.NoSuchProcess: process PID not found (pid=7)", 3),
        ("Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.", 3),
        ("Initialization failure from server:\nAttributeError: x", 1),
    ],
)
def test_a_nodes_server_that_did_not_start_is_asked_for_again(monkeypatch, error, tries):
    asked = []

    def init(*_, **__):
        asked.append(1)
        raise ConnectionAbortedError(error)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    with pytest.raises(ConnectionAbortedError):
        connection.join(Address("h", 1))
    assert len(asked) == tries


def test_the_token_of_this_machines_node_is_used_unless_the_user_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*connection.SETTINGS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    environment, token = nodes.environment_of(Address("127.0.0.1", 1))
    assert token.stat().st_mode & 0o777 == 0o600 and environment["RAY_AUTH_MODE"] == "token"
    elsewhere = Address("192.0.2.1", 1)  # RFC 5737: no machine has it
    assert nodes.environment_of(elsewhere)[0].keys().isdisjoint(nodes.LOOPBACK)
    connection.set_up(elsewhere)
    assert "RAY_AUTH_MODE" not in os.environ
    connection.set_up(Address("localhost", 1))
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token) and os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of_an_agent"))
    monkeypatch.setattr(mirrors, "USUAL", tmp_path)
    connection.set_up(Address("127.0.0.1", 1))
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    assert nodes.environment_of(Address("127.0.0.1", 1))[1] is None


# --- processes --------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.parent.name))
    return children + [one for child in children for one in descendants(child)]


def listening_elsewhere(pid: int) -> list[str]:
    """Sockets of a node that listen at another address than 127.0.0.1."""
    inodes = set()
    for child in descendants(pid):
        for link in Path(f"/proc/{child}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    elsewhere = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes and fields[1].split(":")[0] not in loopback:
                elsewhere.append(fields[1])
    return elsewhere
