"""The known clients: what they print when they get no answer (captured), and what the loop makes of it."""

from dataclasses import replace

import pytest
from conftest import FIXTURES
from kernelopt.errors import EnvironmentLacks
from kernelopt.loop import clients
from kernelopt.loop.clients import CLIENTS, FINAL_AFTER, GIVE_UP_S, Watch
from scripted_agents import GOOD, LIMITS, agent, kernel, nap, outcomes, run, running

KINDS = {
    "key": "its key or login is rejected",
    "quota": "its quota is used up",
    "unreachable": "it does not reach",
    "model": "its model is not known",
}
RETRY = '{{"type":"system","subtype":"api_retry","error_status":{},"error":"{}"}}'
KEY, QUOTA = RETRY.format(401, "authentication_failed"), RETRY.format(429, "rate_limit")
ANSWER = '{"type":"assistant","message":{}}'
REFUSAL = '{"type":"system","subtype":"permission_denied","message":"Claude requested permissions to write to /x"}'


def captured(client: str, trouble: str) -> list[str]:
    return (FIXTURES / "clients" / f"{client}_{trouble}.txt").read_text().splitlines()


@pytest.mark.parametrize("trouble", KINDS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_gets_no_answer_is_named_once_and_says_why(client, trouble):
    said = []
    watch = Watch(CLIENTS[client], said.append)
    for line in captured(client, trouble):
        watch.line(line)
    assert len(said) == 1 and said[0].startswith(f"the agent gets no answer: {KINDS[trouble]}"), said
    assert watch.trouble.kind.name.startswith(KINDS[trouble])
    status = {"key": 401, "quota": 429, "model": 404}.get(trouble)
    assert watch.trouble.status == status or client == "opencode" or (client, trouble) == ("gemini", "model")


def test_a_client_without_a_login_is_named():
    """As Gemini CLI 0.61.0 and Claude Code 2.1.330 print it in a new HOME."""
    lines = {
        "gemini": "Please set an Auth method in your /F/home/.gemini/settings.json or specify one of the following "
        "environment variables before running: GEMINI_API_KEY, GOOGLE_GENAI_USE_VERTEXAI, GOOGLE_GENAI_USE_GCA",
        "claude": '{"type":"result","is_error":true,"result":"Not logged in · Please run /login"}',
    }
    for client, line in lines.items():
        watch = Watch(CLIENTS[client], lambda _: None)
        watch.line(line)
        assert watch.trouble and watch.trouble.kind.name == KINDS["key"], client


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        ("You've hit your session limit · resets 5:10pm (Europe/Paris)", None, "quota"),
        ("You've hit your weekly limit · resets Monday", None, "quota"),
        ("5-hour limit reached", None, "quota"),
        ("You've hit your usage limit. Upgrade your plan, or try again at 16:29.", None, "quota"),
        ("The usage limit has been reached", None, "quota"),
        ("Selected model is at capacity. Please try a different model.", None, "unreachable"),
        ("The 'gpt-x' model is not supported when using Codex with a ChatGPT account.", 400, "model"),
        ("Invalid API key · Please run /login", None, "key"),
        ("Prompt is too long: the limit is 200000 tokens", 400, None),
    ],
)
def test_words_of_subscriptions_are_read(text, status, kind):
    """As users report them in the issues of anthropics/claude-code (74079) and openai/codex (17642, 30546)."""
    told = clients.kind_of(text, status)
    assert told.name.startswith(KINDS[kind]) if kind else told is None


def test_a_rejected_key_ends_at_the_third_line_and_a_quota_when_it_lasts():
    now = [0.0]
    watch = Watch(CLIENTS["claude"], lambda _: None, lambda: now[0])
    assert [watch.line(KEY) for _ in range(FINAL_AFTER)] == [False, False, True]
    assert not watch.line(QUOTA)
    now[0] = GIVE_UP_S
    assert not watch.line(QUOTA)
    now[0] += 1
    assert watch.line(QUOTA)


def test_an_answer_ends_the_trouble():
    said = []
    watch = Watch(CLIENTS["claude"], said.append)
    for line in (KEY, KEY, ANSWER, KEY, KEY):
        assert not watch.line(line)
    assert len(said) == 2
    watch.line(ANSWER)
    assert watch.trouble is None


@pytest.mark.parametrize(
    "line", ["{", "[1]", '"quota"', "HTTP 401: quota", '{"type": "user", "message": "no quota"}', ""]
)
def test_what_an_agent_says_itself_is_no_trouble(line):
    for client in CLIENTS.values():
        watch = Watch(client, pytest.fail)
        assert not watch.line(line) and watch.trouble is None


def prints(*lines: str) -> str:
    """A command that prints lines, and hangs."""
    return "; ".join([*(f"echo '{line}'" for line in lines), f"sleep {nap(311)}"])


def test_a_rejected_key_stops_the_run_at_once_and_another_agent_goes_on(ready):
    said = []
    with pytest.raises(EnvironmentLacks, match=r"rejected \(HTTP 401: authentication_failed\); log in .* --resume"):
        run(ready, prints(*[KEY] * 3), client=CLIENTS["claude"], say=said.append)
    assert not running(nap(311))
    assert sum("its key or login is rejected" in line for line in said) == 1
    result, lines = run(ready, GOOD, resume=True)
    assert outcomes(lines) == ["interrupted", *["accepted"] * 3, "stop"] and result.agent_calls == 3


def test_a_client_that_ends_in_its_trouble_stops_the_run(ready, monkeypatch):
    with pytest.raises(
        EnvironmentLacks, match=r"its quota is used up \(HTTP 429: rate_limit\); wait, or raise the quota"
    ):
        run(ready, f"echo '{QUOTA}'; exit 1", client=CLIENTS["claude"])
    monkeypatch.setattr(clients, "GIVE_UP_S", 0.0)
    with pytest.raises(EnvironmentLacks, match="its quota is used up"):
        run(ready, prints(QUOTA, QUOTA), client=CLIENTS["claude"], resume=True)


def test_a_call_that_the_client_did_not_allow_is_told(ready):
    limits = replace(LIMITS, rounds=1)
    _, lines = run(ready, f"echo '{REFUSAL}'", client=CLIENTS["claude"], limits=limits)
    assert outcomes(lines) == ["unchanged", "stop"]
    assert lines[0]["message"].endswith("did not allow it: Claude requested permissions to write to /x")
    _, lines = run(ready, agent(kernel(50) + f"echo '{REFUSAL}'"), client=CLIENTS["claude"], limits=limits)
    assert outcomes(lines)[-2:] == ["accepted", "stop"]


@pytest.mark.parametrize(("printed", "told"), [([], True), ([ANSWER], False)])
def test_a_model_that_never_answers_is_told_apart_from_a_slow_agent(ready, printed, told):
    limits = replace(LIMITS, rounds=1, agent_timeout_s=0.5)
    _, lines = run(ready, prints(*printed), client=CLIENTS["claude"], limits=limits)
    assert outcomes(lines)[0] == "timed out" and ("its model answered nothing" in lines[0]["message"]) == told


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ('{"type":"result","is_error":true,"result":"Prompt is too long"}\n', "Prompt is too long"),
        ('{"type":"turn.failed","error":{"message":"stream\\ndisconnected"}}\n\n', "stream disconnected"),
        ("Traceback\nValueError: x\n", "ValueError: x"),
        ('{"type":"x"}\nsorry\n{"type":"y","message":{"a":1}}\n', "sorry"),
        ("", ""),
    ],
)
def test_the_last_words_of_an_output_are_found_among_events(log, says):
    assert clients.readable(log) == says


def test_a_line_that_comes_in_pieces_is_read_whole(ready):
    halves = KEY[:20], KEY[20:]
    slowly = "; sleep 0.05; ".join(f"printf %s '{half}'" for half in halves) + "; echo"
    with pytest.raises(EnvironmentLacks, match="its key or login is rejected"):
        run(ready, f"{slowly}; exit 1", client=CLIENTS["claude"])
