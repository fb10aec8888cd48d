"""Triton without a GPU: what its interpreter still asks of a driver."""

import time

from triton.backends.driver import DriverBase


class HostDriver(DriverBase):
    """Lets triton.autotune choose among configurations in the interpreter; there is no GPU to ask for anything else."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled in Triton's interpreter")

    def get_current_target(self):
        raise NotImplementedError("there is no GPU in Triton's interpreter")

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda kernel_call, *, quantiles, **_: [_seconds(kernel_call)] * len(quantiles)


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
