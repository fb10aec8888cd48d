"""Triton's hash of itself: once in a server, not in each of its forks."""

import forks_with_torch
import pytest
from kernelopt.worker import triton_hash


@pytest.mark.parametrize(("interprets", "cores", "known"), [("0", 4, 1), ("0", 2, 0), ("1", 4, 0)])
def test_a_server_whose_children_compile_knows_it_before_it_forks(interprets, cores, known):
    code = f"""if True:
        import importlib, os, runpy, sys, threading
        from kernelopt.worker import server, triton_hash
        def served(handle):
            found = [getattr(importlib.import_module(place), "triton_key", None) for place in triton_hash.PLACES]
            assert [key.cache_info().currsize for key in found if key][:1] == [{known}]
            assert threading.active_count() == 1
            print("served", handle)
        os.sched_getaffinity, server.serve = lambda _: range({cores}), served
        sys.argv = ["kernelopt.worker", "serve", "7"]
        runpy.run_module("kernelopt.worker", None, "__main__", True)
    """
    done = forks_with_torch.run(code, TRITON_INTERPRET=interprets)
    assert done.returncode == 0 and "served 7" in done.stdout, done.stdout


def test_a_triton_without_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(triton_hash, "PLACES", ("no_such_module", "triton"))
    triton_hash.compute()
