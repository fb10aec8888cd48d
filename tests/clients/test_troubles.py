"""A client that gets no answer of its model, or is not allowed what it tries: told within seconds, in words."""

import time

import pytest
from kernelopt.loop import clients
from scripted_agents import log_lines

from .bench import optimize
from .real_clients import REFUSING
from .scripted_model import step

TOLD_S = 15  # after the client has started


def test_a_rejected_key_stops_the_run(bench, ready, measured_here):
    bench.model.follow(step("fail", 401, "authentication_error", "invalid x-api-key"))
    began = time.monotonic()
    done = optimize(bench, ready)
    assert done.returncode == 3 and "its key or login is rejected (HTTP 401: " in done.stderr, done.stderr
    assert time.monotonic() - began < bench.client.starts_s + TOLD_S


def test_an_unknown_model_stops_the_run(bench, ready, measured_here):
    bench.model.follow(step("fail", 404, "not_found_error", "The model `scripted/unknown` does not exist"))
    began = time.monotonic()
    done = optimize(bench, ready, "--model", "scripted/unknown")
    assert done.returncode == 3 and "its model is not known (" in done.stderr, done.stderr
    assert "--model" in done.stderr and time.monotonic() - began < bench.client.starts_s + TOLD_S


def test_a_used_up_quota_and_a_missing_network_are_named(bench, ready, measured_here, monkeypatch):
    monkeypatch.setattr(clients, "GIVE_UP_S", 0.0)
    bench.model.follow(step("fail", 429, "rate_limit_error", "You exceeded your current quota"))
    done = optimize(bench, ready)
    assert done.returncode == 3 and "the agent gets no answer: its quota is used up (" in done.stderr, done.stderr
    bench.url = REFUSING
    done = optimize(bench, ready, "--resume")
    assert done.returncode == 3 and "the agent gets no answer: it does not reach its model" in done.stderr, done.stderr


@pytest.mark.parametrize("home", ["claude", "codex"], indirect=True)  # which are quick
def test_a_model_that_never_answers_is_told_at_the_time_out(bench, ready, measured_here):
    bench.model.follow(step("hang"))
    optimize(bench, ready, "--rounds", "1", "--agent-timeout", str(bench.client.starts_s))
    line = log_lines(ready)[0]
    assert line["outcome"] == "timed out" and "its model answered nothing" in line["message"], line


@pytest.mark.parametrize("home", ["claude", "gemini"], indirect=True)  # the others write there, or ask nobody
def test_a_write_that_the_client_refuses_is_told(bench, ready, measured_here, tmp_path):
    bench.model.follow(step("write", str(tmp_path / "kernel.py"), "x = 1\n"), step("say", "done"))
    optimize(bench, ready, "--rounds", "1")
    line = log_lines(ready)[0]
    assert line["outcome"] == "unchanged" and "the client did not allow it: " in line["message"], line
    assert str(tmp_path) in line["message"]
