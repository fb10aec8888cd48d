"""Triton's hash of itself: once in a server, not in each of its forks."""

import forks_with_torch
import pytest
from kernelopt.worker import triton_hash


@pytest.mark.parametrize(("variables", "known"), [({"TRITON_INTERPRET": "0"}, 1), ({"TRITON_INTERPRET": "1"}, 0)])
def test_a_server_whose_children_compile_knows_it_before_it_forks(variables, known):
    code = f"""if True:
        import importlib, sys
        from kernelopt.worker import triton_hash
        sys.argv = ["kernelopt.worker", "serve", "0"]
        main = importlib.import_module("kernelopt.worker.__main__")
        if main.hashing:
            main.hashing.join()
        found = [getattr(importlib.import_module(place), "triton_key", None) for place in triton_hash.PLACES]
        assert [key.cache_info().currsize for key in found if key][:1] == [{known}]
    """
    done = forks_with_torch.run(code, **variables)
    assert done.returncode == 0, done.stdout


def test_a_triton_without_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(triton_hash, "PLACES", ("no_such_module", "triton"))
    triton_hash.compute()
