"""The clients themselves: where they are installed, and how each is pointed at a scripted model, in a HOME of its own."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Variables of a user's own clients, which must not reach these.
FOREIGN = re.compile(
    r"^(ANTHROPIC|CLAUDE|CODEX|OPENAI|GEMINI|GOOGLE|OPENCODE|XDG|AWS|AZURE|HTTPS?_PROXY|https?_proxy)|KEY|TOKEN"
)
REFUSING = "http://127.0.0.1:9"  # nobody listens on the port of `discard`


@dataclass(frozen=True)
class RealClient:
    """command: reads a prompt on stdin and names no folder. configure: writes its settings into a HOME, and returns the variables that
    point it at the model at a URL. starts_s: seconds in which it has run a first command, on a busy machine."""

    command: str
    configure: Callable[[Path, str], dict[str, str]]
    starts_s: int

    def environment(self, home: Path, url: str, programs: Path) -> dict[str, str]:
        """The whole environment of the client: this process's without secrets and foreign settings. Whatever does not
        go to loopback is refused, also where no network namespace could be made."""
        home.mkdir(parents=True, exist_ok=True)
        own = {name: value for name, value in os.environ.items() if not FOREIGN.search(name)}
        proxies = {"HTTPS_PROXY": REFUSING, "HTTP_PROXY": REFUSING, "NO_PROXY": "127.0.0.1,localhost"}
        # OpenCode fetches ripgrep where there is none; Codex brings one.
        path = [str(programs), *map(str, programs.parent.glob("@openai/*/vendor/*/codex-path")), own.get("PATH", "")]
        return {**own, **proxies, **self.configure(home, url), "HOME": str(home), "PATH": ":".join(path)}


def claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(home: Path, url: str) -> dict[str, str]:
    settings = f"""
model = "gpt-5.5"  # the default model wants its tools in a form that the scripted model does not speak
model_provider = "scripted"
check_for_update_on_startup = false
[model_providers.scripted]
name = "scripted"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "SCRIPTED_KEY"
[analytics]
enabled = false
[features]
plugins = false
apps = false
"""
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(settings)
    return {"SCRIPTED_KEY": "any"}


def gemini(home: Path, url: str) -> dict[str, str]:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (home / ".gemini").mkdir(exist_ok=True)
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    return {"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": "any"}


def opencode(home: Path, url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
        "models": {"scripted": {"limit": {"context": 200000, "output": 8000}, "tool_call": True}},
    }
    settings = {"provider": {"scripted": provider}, "model": "scripted/scripted", "share": "disabled"}
    (home / ".config" / "opencode").mkdir(parents=True, exist_ok=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    off = ("MODELS_FETCH", "AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    return {f"OPENCODE_DISABLE_{name}": "1" for name in off}


REAL_CLIENTS = {
    "claude": RealClient("claude -p --allowedTools Bash Read", claude, starts_s=12),
    "codex": RealClient("codex exec --sandbox workspace-write", codex, starts_s=12),
    "gemini": RealClient("gemini --approval-mode=yolo --skip-trust", gemini, starts_s=25),
    "opencode": RealClient("opencode run --auto", opencode, starts_s=45),
}
