"""What artefacts.of_module says of a file of Triton kernels that were compiled for a GPU that is not here, as JSON.

python compile_elsewhere.py FILE. The kernels are real and so is the compiler; the driver is a stand-in, which gives
sm_80 as its GPU, launches nothing and lets each configuration of an autotuner be faster than the one before.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, jit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from kernelopt.worker import artefacts


class Elsewhere(DriverBase):
    def __init__(self):
        self.milliseconds = itertools.count(9, -1)

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, name):
        return name

    def get_current_target(self):
        return GPUTarget("cuda", 80, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_capability(self, device=0):
        return 8, 0

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        def benchmark(call, quantiles):
            call()
            return [next(self.milliseconds)] * len(quantiles)

        return benchmark


def main() -> None:
    driver.set_active(Elsewhere())
    run = jit.JITFunction.run
    jit.JITFunction.run = lambda self, *arguments, **options: run(self, *arguments, **{**options, "warmup": True})
    spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.launch()
    print(json.dumps(artefacts.of_module(module, None)))


if __name__ == "__main__":
    main()
