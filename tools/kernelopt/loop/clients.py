"""The known clients: the command line that lets each work on a brief, and the lines in which it tells a trouble.

Each reads the brief on stdin, works in its working directory, and prints events, most of them as a line of JSON.
Source: their `--help` and what they print, of the versions that tests/clients/package.json names.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from shlex import quote

from .. import bundle
from ..errors import EnvironmentLacks

FINAL_AFTER = 3  # lines that tell what the user must mend: a login that is renewed meanwhile costs one
GIVE_UP_S = 120.0  # since the first line of a trouble, without an answer; services recover from a rush in less
PROBE_S = 20  # for a client to start, and to run `true` in its sandbox
NO_SANDBOX = re.compile(r"bwrap|bubblewrap|landlock", re.IGNORECASE)
STATUS = re.compile(r"\b(?:status|code)\W{1,3}(\d{3})\b")


@dataclass(frozen=True)
class Sign:
    """A kind of line. event: what a JSON object holds; message, status: where it has its text and an HTTP status, as
    paths with dots; pattern: of that text. Without an event: of a line that is no JSON, with groups of these names."""

    event: Mapping[str, object] = field(default_factory=dict)
    pattern: str = ""
    message: str = "message"
    status: str = "status"

    def read(self, line: str, event: Mapping | None) -> tuple[str, int | None] | None:
        """(text, HTTP status where the line has one) of a line of this kind; None for any other. event: the line as a
        JSON object, if it is one."""
        if bool(self.event) != (event is not None):
            return None
        if event is None:
            match = re.search(self.pattern, line)
            return with_status(match.groupdict(), "message", "status") if match else None
        told = with_status(event, self.message, self.status)
        fits = all(at(event, path) == value for path, value in self.event.items())
        return told if fits and re.search(self.pattern, told[0]) else None


@dataclass(frozen=True)
class Client:
    """command: {bundle} is the bundle's folder, {confined} the option `confined` or `unconfined`. network: an option
    that opens the client's own sandbox to the network. hides_gpu: that sandbox does. probe: a command that fails where
    that sandbox does not work. troubles, refusals: lines that tell that it gets no answer of its model, and that a tool
    was not allowed. answers: lines that show an answer."""

    command: str
    troubles: tuple[Sign, ...]
    refusals: tuple[Sign, ...]
    answers: tuple[Sign, ...]
    confined: str = ""
    unconfined: str = ""
    network: str = ""
    probe: tuple[str, ...] = ()
    hides_gpu: bool = False

    def command_line(self, model: str | None = None, unconfined: bool = False, network: bool = False) -> str:
        """The command, for bash."""
        confined = self.unconfined if unconfined else f"{self.confined} {self.network}" if network else self.confined
        command = self.command.format(bundle=quote(str(bundle.ROOT)), confined=confined)
        return f"{command} --model {quote(model)}" if model else command


CLIENTS = {
    "claude": Client(
        command="claude -p --permission-mode acceptEdits --allowedTools Bash Read "
        "--output-format stream-json --verbose",
        troubles=(
            Sign({"type": "system", "subtype": "api_retry"}, message="error", status="error_status"),
            Sign({"type": "result", "is_error": True}, message="result", status="api_error_status"),
        ),
        refusals=(Sign({"type": "system", "subtype": "permission_denied"}),),
        answers=(Sign({"type": "assistant"}),),
    ),
    "codex": Client(
        command="codex exec --json --skip-git-repo-check {confined}",
        troubles=(Sign({"type": "error"}), Sign({"type": "turn.failed"}, message="error.message")),
        refusals=(),
        answers=(Sign({"type": "item.started"}), Sign({"type": "item.completed"})),
        # Without /tmp: it would leave empty folders there, .git among them, when it is killed.
        confined="--sandbox workspace-write --config sandbox_workspace_write.exclude_slash_tmp=true",
        unconfined="--sandbox danger-full-access",
        network="--config sandbox_workspace_write.network_access=true",
        probe=("codex", "sandbox", "--", "true"),
        hides_gpu=True,  # its sandbox has a /dev without it
    ),
    "gemini": Client(
        command="gemini --approval-mode=yolo --skip-trust --output-format stream-json --include-directories {bundle}",
        troubles=(
            Sign(pattern=r"^(?P<message>Attempt \d+ failed(?: with status (?P<status>\d{3}))?.*)"),
            Sign(pattern=r"(?P<message>.*specify the GEMINI_API_KEY environment variable)"),
            Sign(pattern=r"(?P<message>Please set an Auth method\b.*)"),
            Sign({"type": "result", "status": "error"}, message="error.message", status="error.code"),
        ),
        refusals=(Sign({"type": "tool_result"}, pattern="not in workspace", message="error.message"),),
        answers=(Sign({"type": "tool_use"}), Sign({"type": "message", "role": "assistant"})),
    ),
    "opencode": Client(
        command="opencode run --auto --format json --print-logs --log-level ERROR",
        troubles=(
            Sign(pattern=r'level=ERROR .*message="stream error".* error\.error="(?P<message>[^"]*)'),
            Sign(pattern=r'level=ERROR .*message=failed .* error="(?P<message>[^"]*)'),
            Sign({"type": "error"}, message="error.data.message", status="error.data.statusCode"),
        ),
        refusals=(Sign(pattern=r"(?P<message>permission requested: .*auto-rejecting)"),),
        answers=(Sign({"type": "step_start"}),),
    ),
}


def require_installed(name: str) -> None:
    """EnvironmentLacks when the program of a client, which has its name, is not on the PATH."""
    if shutil.which(name) is None:
        raise EnvironmentLacks(f"{name} is not installed, or not on the PATH; install it, or name another --client")


def require_sandbox(name: str, mend: str) -> None:
    """EnvironmentLacks, with a mend, when a known client's own sandbox does not work here: each command of its agents
    would fail."""
    client = CLIENTS.get(name)
    if client is None or not client.probe:
        return
    try:
        done = subprocess.run(
            client.probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return
    told = done.stderr.strip().splitlines()[-1:] or [""]
    if done.returncode and NO_SANDBOX.search(told[0]):
        raise EnvironmentLacks(
            f"{name}'s own sandbox does not work here ({told[0][:200]}), so no command of its agents would run; {mend}"
        )


@dataclass(frozen=True)
class Kind:
    """Why a client gets no answer. statuses, words: of a trouble of this kind. final: whether it stays until the user
    mends it."""

    name: str
    mend: str
    statuses: Container[int]
    words: str
    final: bool = False


KINDS = (
    Kind(
        "its key or login is rejected",
        "log in again, or mend the key",
        (401, 403),
        r"api.?key|log ?in\b|unauthor",
        final=True,
    ),
    Kind(
        "its quota is used up",
        "wait, or raise the quota",
        (402, 429),
        r"quota|rate.?limit|(usage|your|session|weekly) limit|limit (reached|exceeded)|credit|billing",
    ),
    Kind(
        "it does not reach its model",
        "look at the network and at the service",
        range(500, 600),
        r"network|connect|fetch failed|overloaded|at capacity|^unknown$",  # the last is Claude Code's word
    ),
    Kind(
        "its model is not known",
        "name one of its models with --model",
        (404,),
        r"\bmodels?\b.{0,60} not (found|exist|supported)\b",
        final=True,
    ),
)


@dataclass(frozen=True)
class Trouble:
    """Why a client gets no answer of its model, in its own words."""

    kind: Kind
    text: str
    status: int | None

    def describe(self) -> str:
        """ "the agent gets no answer: its quota is used up (HTTP 429: rate_limit)" """
        status = f"HTTP {self.status}: " if self.status else ""
        return f"the agent gets no answer: {self.kind.name} ({status}{self.text[:200]})"


class Watch:
    """Reads the lines of a client as they come. say: gets each new kind of trouble at once.

    trouble: since the last answer of its model; None without one. answered: whether there was one. refused: what it
    was not allowed, in its words.
    """

    def __init__(self, client: Client, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._client, self._say, self._clock = client, say, clock
        self._since, self._lines = 0.0, 0
        self.trouble: Trouble | None = None
        self.answered = False
        self.refused: list[str] = []

    def line(self, line: str) -> bool:
        """Take a line. Return whether the client is past help, so that nothing is gained by waiting for it."""
        event = parsed(line)
        if first(self._client.answers, line, event):
            self.trouble, self.answered = None, True
        elif refusal := first(self._client.refusals, line, event):
            self.refused.append(refusal[0])
        elif (told := first(self._client.troubles, line, event)) and (kind := kind_of(*told)):
            return self._take(Trouble(kind, *told))
        return False

    def _take(self, trouble: Trouble) -> bool:
        if self.trouble is None or self.trouble.kind != trouble.kind:
            self._say(trouble.describe())
            self._since, self._lines = self._clock(), 0
        self.trouble, self._lines = trouble, self._lines + 1
        return self._lines >= FINAL_AFTER if trouble.kind.final else self._clock() - self._since > GIVE_UP_S


def kind_of(text: str, status: int | None) -> Kind | None:
    """The first kind that fits, by the status before the words; None when none does."""
    by_status = (kind for kind in KINDS if status in kind.statuses)
    by_words = (kind for kind in KINDS if re.search(kind.words, text, re.IGNORECASE))
    return next(by_status, None) or next(by_words, None)


def first(signs: tuple[Sign, ...], line: str, event: Mapping | None) -> tuple[str, int | None] | None:
    """What the first sign that fits reads in a line."""
    return next(filter(None, (sign.read(line, event) for sign in signs)), None)


def parsed(line: str) -> dict | None:
    """The JSON object that a line is, or None."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def at(event: Mapping, path: str) -> object:
    """The value at a path of names with dots between; None where it leads nowhere."""
    value: object = event
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def with_status(event: Mapping, message: str, status: str) -> tuple[str, int | None]:
    """(text on one line, HTTP status) of an event; the status from its field, or else from the text."""
    text = " ".join(str(at(event, message) or "").split())
    given = str(at(event, status) or "")
    number = given if given.isdigit() else (STATUS.search(text) or [None, ""])[1]
    return text, int(number) if number else None


def readable(log: str) -> str:
    """The last line of an output that tells something: the text of an event, or the line itself; "" without one."""
    for line in reversed(log.strip().splitlines()):
        event = parsed(line)
        texts = [line] if event is None else [at(event, path) for path in ("error.message", "result", "message")]
        if text := next((text for text in texts if isinstance(text, str) and text.strip()), None):
            return " ".join(text.split())
    return ""
