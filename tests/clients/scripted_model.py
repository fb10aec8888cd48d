"""A model that follows a script, on loopback, behind the four HTTP interfaces that the clients speak.

A script is a list of steps. Which step is next follows from the number of tool calls in the request's history, so the
model holds no state, and several conversations may go on at once. A request that offers no tools (a title, a check of
the key) is answered "ok".
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """tools: names of the tools that a request offers. calls: tool calls in its history. text: all that it says."""

    tools: list[str]
    calls: int
    text: str


@dataclass(frozen=True)
class Step:
    """What the model does next. kind: "say", "fail", "hang", or a key of TOOLS. arguments: of that kind; a function of
    the request in place of a text is called."""

    kind: str
    arguments: tuple


def step(kind: str, *arguments: str | int | Callable[[Request], str]) -> Step:
    return Step(kind, arguments)


# kind of step: {the tool that a client has for it: its arguments}
TOOLS: dict[str, dict[str, Callable[..., dict]]] = {
    "shell": {
        "Bash": lambda command: {"command": command, "description": "a step of the script"},  # Claude Code
        "run_shell_command": lambda command: {"command": command},  # Gemini CLI
        "exec_command": lambda command: {"cmd": command, "yield_time_ms": 30000},  # Codex
        "shell_command": lambda command: {"command": command, "timeout_ms": 60000},  # Codex, other models
        "bash": lambda command: {"command": command, "description": "a step of the script"},  # OpenCode
    },
    "skill": {
        "Skill": lambda name: {"skill": name},
        "activate_skill": lambda name: {"name": name},
        "skill": lambda name: {"name": name},
    },
    "read": {
        "Read": lambda path: {"file_path": path},
        "read_file": lambda path: {"file_path": path},
        "read": lambda path: {"filePath": path},
    },
    "write": {
        "Write": lambda path, text: {"file_path": path, "content": text},
        "write_file": lambda path, text: {"file_path": path, "content": text},
        "write": lambda path, text: {"filePath": path, "content": text},
    },
}
BY_SHELL = {  # for Codex, which has a shell alone
    "read": lambda path: f"cat '{path}'",
    "write": lambda path, text: f"cat > '{path}' <<'END'\n{text}\nEND",
}


def tool_call(wanted: Step, request: Request) -> tuple[str, dict]:
    """(tool, arguments) of a step, by a tool that the request offers. LookupError when it offers none."""
    given = [part(request) if callable(part) else part for part in wanted.arguments]
    for tool, arguments in TOOLS[wanted.kind].items():
        if tool in request.tools:
            return tool, arguments(*given)
    if wanted.kind == "shell":
        raise LookupError(f"no shell among {request.tools}")
    if wanted.kind == "skill":  # the client lists files, and has no tool that opens one
        given = [listed_file(given[0], request.text)]
    return tool_call(step("shell", BY_SHELL.get(wanted.kind, BY_SHELL["read"])(*given)), request)


def listed_file(skill: str, text: str) -> str:
    """The file of a skill, by the list that Codex gives: `(file: r0/NAME/SKILL.md)`, and "`r0` = `/folder`". A skill of
    a plugin is listed as PLUGIN:NAME. LookupError where it is not listed."""
    entry = re.search(rf"^- (?:[\w-]+:)?{skill}: .*\(file: (?:(r\d+)/)?(\S+)\)$", text, re.MULTILINE)
    if entry is None:
        raise LookupError(f"{skill} is not listed")
    root = re.search(rf"^- `{entry[1]}` = `(.*)`$", text, re.MULTILINE) if entry[1] else None
    return f"{root[1]}/{entry[2]}" if root else entry[2]


class Anthropic:
    """Messages (Claude Code)."""

    path = re.compile(r"/v1/messages$")

    @staticmethod
    def read(body: dict) -> Request:
        parts = [part for m in body.get("messages", []) if isinstance(m["content"], list) for part in m["content"]]
        calls = sum(part.get("type") == "tool_use" for part in parts)
        return Request([tool["name"] for tool in body.get("tools", [])], calls, plain([body]))

    @staticmethod
    def answer(body: dict, call: tuple[str, dict] | None, text: str) -> tuple[dict, list]:
        if call:
            block = {"type": "tool_use", "id": new("toolu_"), "name": call[0], "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
        else:
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
        ends = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
        head = {"id": new("msg_"), "type": "message", "role": "assistant", "model": body.get("model")}
        head |= {"content": [], "usage": {"input_tokens": 100, "output_tokens": 1}}
        whole = {**block, "input": call[1]} if call else {"type": "text", "text": text}
        events = [
            {"type": "message_start", "message": {**head, "stop_reason": None, "stop_sequence": None}},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ends, "usage": {"output_tokens": 20}},
            {"type": "message_stop"},
        ]
        return {**head, **ends, "content": [whole]}, [(event["type"], event) for event in events]


class Responses:
    """OpenAI Responses (Codex)."""

    path = re.compile(r"/responses$")

    @staticmethod
    def read(body: dict) -> Request:
        kinds = ("function_call", "custom_tool_call", "local_shell_call")
        calls = sum(item.get("type") in kinds for item in body.get("input", []))
        return Request([tool.get("name") or tool["type"] for tool in body.get("tools", [])], calls, plain([body]))

    @staticmethod
    def answer(body: dict, call: tuple[str, dict] | None, text: str) -> tuple[dict, list]:
        if call:
            item = {"type": "function_call", "id": new("fc_"), "call_id": new("call_"), "name": call[0]}
            item["arguments"] = json.dumps(call[1])
        else:
            item = {"type": "message", "id": new("msg_"), "role": "assistant"}
            item["content"] = [{"type": "output_text", "text": text}]
        usage = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
        usage |= {"input_tokens_details": None, "output_tokens_details": None}
        response = {"id": new("resp_"), "output": [item], "usage": usage}
        events = [
            {"type": "response.created", "response": {"id": response["id"]}},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": response},
        ]
        return response, [(event["type"], event) for event in events]


class Chat:
    """OpenAI chat completions (OpenCode)."""

    path = re.compile(r"/chat/completions$")

    @staticmethod
    def read(body: dict) -> Request:
        calls = sum(len(message.get("tool_calls") or []) for message in body.get("messages", []))
        return Request([tool["function"]["name"] for tool in body.get("tools", [])], calls, plain([body]))

    @staticmethod
    def answer(body: dict, call: tuple[str, dict] | None, text: str) -> tuple[dict, list]:
        message = {"role": "assistant", "content": None if call else text}
        if call:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            message["tool_calls"] = [{"index": 0, "id": new("call_"), "type": "function", "function": function}]
        head = {"id": new("chatcmpl-"), "created": int(time.time()), "model": body.get("model")}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        why = "tool_calls" if call else "stop"
        whole = {**head, "choices": [{"index": 0, "message": message, "finish_reason": why}], "usage": usage}
        pieces = [
            {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": why}], "usage": usage},
        ]
        return whole, [*((None, piece) for piece in pieces), (None, "[DONE]")]


class Gemini:
    """generateContent (Gemini CLI)."""

    path = re.compile(r":(stream)?[gG]enerateContent$")

    @staticmethod
    def read(body: dict) -> Request:
        offered = [function["name"] for tool in body.get("tools", []) for function in tool["functionDeclarations"]]
        calls = sum("functionCall" in part for content in body.get("contents", []) for part in content["parts"])
        return Request(offered, calls, plain([body]))

    @staticmethod
    def answer(body: dict, call: tuple[str, dict] | None, text: str) -> tuple[dict, list]:
        schema = body.get("generationConfig", {}).get("responseJsonSchema")
        if schema and not call:  # it asks which model to use, and how hard the task is
            text = json.dumps({name: example(value) for name, value in schema.get("properties", {}).items()})
        part = {"functionCall": {"name": call[0], "args": call[1]}} if call else {"text": text}
        usage = {"promptTokenCount": 100, "candidatesTokenCount": 20, "totalTokenCount": 120}
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        whole = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}
        return whole, [(None, whole)]


INTERFACES = (Anthropic, Responses, Chat, Gemini)


def example(schema: dict) -> object:
    """A value that fits a property of a JSON Schema."""
    return (schema.get("enum") or [1 if schema.get("type", "").lower() in ("number", "integer") else "ok"])[0]


def new(prefix: str) -> str:
    return prefix + uuid.uuid4().hex[:20]


def plain(value: object) -> str:
    """All strings of a JSON value, each on lines of its own."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return "\n".join(filter(None, map(plain, parts)))


@dataclass
class ScriptedModel:
    """The server, as a context manager. requests: those that offered tools, as they came. asked: the paths of all."""

    script: list[Step] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> "ScriptedModel":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"model": self}))
        self._server.daemon_threads = True
        self.over = threading.Event()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def follow(self, *script: Step) -> None:
        """A new script, and a new list of requests."""
        self.script, self.requests, self.asked = list(script), [], []

    def next_step(self, request: Request) -> Step:
        if not request.tools:
            return step("say", "ok")
        self.requests.append(request)
        return self.script[min(request.calls, len(self.script) - 1)]

    @property
    def said(self) -> str:
        """All that the longest request holds: prompts, calls and what the tools answered."""
        return max((request.text for request in self.requests), key=len, default="")


class Handler(BaseHTTPRequestHandler):
    model: ScriptedModel
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Nothing on the terminal."""

    def do_GET(self) -> None:
        self.model.asked.append(self.path)
        self.send(200, {"data": [], "models": []})

    def do_POST(self) -> None:
        body, path = json.loads(self.body() or b"{}"), self.path.partition("?")[0]
        self.model.asked.append(self.path)
        interface = next((known for known in INTERFACES if known.path.search(path)), None)
        if interface is None:
            return self.send(200, {"input_tokens": 100, "totalTokens": 100})  # they count tokens before they ask
        request = interface.read(body)
        wanted = self.model.next_step(request)
        if wanted.kind == "hang":
            return self.hang()
        if wanted.kind == "fail":
            return self.fail(*wanted.arguments)
        call = None if wanted.kind == "say" else tool_call(wanted, request)
        whole, events = interface.answer(body, call, "" if call else wanted.arguments[0])
        if body.get("stream") or ":stream" in path:
            return self.stream(events)
        self.send(200, whole)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def hang(self) -> None:
        """No answer, until the test ends."""
        self.model.over.wait()
        self.close_connection = True

    def fail(self, status: int, kind: str, message: str) -> None:
        """An error, in a form that fits all four interfaces."""
        error = {"type": kind, "message": message, "code": status, "status": kind.upper()}
        self.send(status, {"type": "error", "error": error})

    def send(self, status: int, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, events: list[tuple[str | None, object]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for name, event in events:
            head = f"event: {name}\n" if name else ""
            content = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"{head}data: {content}\n\n".encode())
        self.close_connection = True
