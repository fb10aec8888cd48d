"""Triton's hash of itself: once in a server, not in each of its forks."""

import forks_with_torch
import pytest
from kernelopt.worker import triton_hash


@pytest.mark.parametrize(("interprets", "cores", "known"), [("0", 4, 1), ("0", 2, 0), ("1", 4, 0)])
def test_a_server_whose_children_compile_knows_it_before_it_forks(interprets, cores, known):
    code = f"""if True:
        import importlib, os, sys
        from kernelopt.worker import triton_hash
        os.sched_getaffinity = lambda _: range({cores})
        sys.argv = ["kernelopt.worker", "serve", "0"]
        main = importlib.import_module("kernelopt.worker.__main__")
        if main.hashing:
            main.hashing.join()
        found = [getattr(importlib.import_module(place), "triton_key", None) for place in triton_hash.PLACES]
        assert [key.cache_info().currsize for key in found if key][:1] == [{known}]
    """
    done = forks_with_torch.run(code, TRITON_INTERPRET=interprets)
    assert done.returncode == 0, done.stdout


def test_a_triton_without_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(triton_hash, "PLACES", ("no_such_module", "triton"))
    triton_hash.compute()
