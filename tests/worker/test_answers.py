"""What the answers of the worker's jobs are on the pipe to the parent (worker.server.Channel)."""

import json
import os

import pytest
from kernelopt.explore.resources import CompiledCall
from kernelopt.hardware.work import COUNTED, CountedWorkload, Work
from kernelopt.measure.raw_times import RawTimes
from kernelopt.session.benchmark_reports import BufferRate, ProductRate, Rate, ShapeRate
from kernelopt.worker import exploring, gpu_times, rates, server, tensor_probe, timing
from kernelopt.worker.tracing import KernelRun

RATE = Rate(3.0, 2.5, 3.5, 9)
RATE_JSON = {"median": 3.0, "p20": 2.5, "p80": 3.5, "n": 9}
WINDOW = [1.0, 2.0]
SHAPE = {"block": 1024, "warps": 4, "programs": None}
DEVICE = {"compute_capability": "9.0", "sm_count": 132, "l2_capacity": 50.0, "memory_capacity": 139.8}
ANSWERS = {  # the answer and its JSON
    "bandwidth": (
        rates.BandwidthAnswer("GB/s", [BufferRate("copy", 4096, "warm", RATE)], [8192], WINDOW, DEVICE, "2.11", "3.6"),
        {
            "unit": "GB/s",
            "rates": [{"pattern": "copy", "buffer_bytes": 4096, "cache": "warm", **RATE_JSON}],
            "left_out": [8192],
            "window": WINDOW,
            "device": DEVICE,
            "torch": "2.11",
            "triton": "3.6",
        },
    ),
    "ceiling": (
        rates.CeilingAnswer("GB/s", 8, 4, [ShapeRate(**SHAPE, rate=RATE)], ShapeRate(**SHAPE, rate=RATE), WINDOW),
        {
            "unit": "GB/s",
            "bytes_in": 8,
            "bytes_out": 4,
            "rates": [{**SHAPE, **RATE_JSON}],
            "best": {**SHAPE, **RATE_JSON},
            "window": WINDOW,
        },
    ),
    "matmul": (
        rates.ProductAnswer("TFLOPS", [ProductRate("bf16", 512, RATE)]),
        {"unit": "TFLOPS", "rates": [{"dtype": "bf16", "size": 512, **RATE_JSON}]},
    ),
    "product_rates": (
        rates.ProductRatesAnswer("bf16", 512, rates.RestedRate(RATE, WINDOW), rates.SustainedRate(2.0, [3.0, 4.0])),
        {
            "dtype": "bf16",
            "size": 512,
            "rested": {**RATE_JSON, "window": WINDOW},
            "sustained": {"median": 2.0, "window": [3.0, 4.0]},
        },
    ),
    "time": (exploring.TurnTimes([1.5]), {"us": [1.5]}),
    "sustain": (exploring.SustainedTime(1.5, WINDOW), {"us": 1.5, "window": WINDOW}),
}


def sent(message: dict) -> dict:
    """What the parent reads of a message."""
    reader, writer = os.pipe()
    try:
        server.Channel(writer, "seal").send(message)
    finally:
        os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as line:
        seal, _, text = line.read().partition(" ")
    assert seal == "seal" and text.endswith("\n")
    return json.loads(text)


@pytest.mark.parametrize("job", ANSWERS)
def test_an_answer_keeps_its_keys_on_the_pipe(job):
    answer, expected = ANSWERS[job]
    assert sent({"result": answer}) == {"result": expected}


def raw_times(on_gpu: gpu_times.GpuTimes | None) -> timing.WorkloadTimes:
    return timing.WorkloadTimes(
        clock="host",
        window=WINDOW,
        sets=2,
        rounds=timing.PairedRounds([[1.0, 2.0]], None),
        alone_us=[],
        bench_us=[1.0],
        empty_us=0.5,
        outputs=[timing.StoredOutput(1, "0-0.pt")],
        overwritten=False,
        differing=0,
        first_set_us=[3.0],
        on_gpu=on_gpu,
    )


EVERYWHERE = {
    **{"clock": "host", "window": WINDOW, "sets": 2, "a_us": [[1.0, 2.0]], "b_us": None, "alone_us": []},
    **{"bench_us": [1.0], "empty_us": 0.5, "outputs": [{"set": 1, "output": "0-0.pt"}]},
    **{"overwritten": False, "differing": 0, "first_set_us": [3.0]},
}
AFTER = {"call_us": 5.0, "stray_us": 1.0, "idle_us": 2.0}
KERNEL = {"name": "k", "start_us": 7.0, "us": 1.0, "origin": "own", "reduces": None}
TRACED = gpu_times.TracedCalls([1.0], [KernelRun(**KERNEL)])


@pytest.mark.parametrize(
    ("on_gpu", "more"),
    [
        (None, {}),
        (gpu_times.GpuTimes(gpu_times.AfterTheCall(**AFTER)), {"after": AFTER}),
        (
            gpu_times.GpuTimes(gpu_times.AfterTheCall(**AFTER), TRACED, None),
            {"after": AFTER, "traced_us": [1.0], "kernels": [KERNEL], "graph_us": None},
        ),
    ],
)
def test_raw_times_are_what_the_parent_reads(on_gpu, more):
    answer = sent({"result": timing.TimingAnswer({"default": raw_times(on_gpu)})})["result"]
    assert answer == {"workloads": {"default": {**EVERYWHERE, **more}}}
    read = RawTimes(**answer["workloads"]["default"], gpu_state=None, wall_us={})
    assert read.a_us == [[1.0, 2.0]] and read.after == more.get("after")


def test_counted_work_comes_back_from_the_pipe_without_its_source():
    work = Work(flops=8, bytes_in=4, bytes_out=2, bytes_min=6, dtype="bf16", also=(), cast_to=None, source=COUNTED)
    counted = CountedWorkload(work, {"inputs": [[2]], "outputs": [[1]]})
    answer = sent({"result": {"workloads": {"default": counted}}})["result"]["workloads"]["default"]
    assert answer == {
        **{"flops": 8, "bytes_in": 4, "bytes_out": 2, "bytes_min": 6, "dtype": "bf16", "also": [], "cast_to": None},
        "shapes": {"inputs": [[2]], "outputs": [[1]]},
    }
    assert CountedWorkload.from_json(answer) == counted


def test_the_compiled_code_of_a_call_comes_back_from_the_pipe():
    compilation = {"registers": 32, "spills": 4, "shared_bytes": 0, "num_warps": 4, "num_stages": 1, "files": []}
    kernels = [
        {"name": "k", "compiled": [compilation], "autotuned": None},
        {"name": "unknown", "compiled": None, "autotuned": None},
    ]
    answer = sent({"answer": exploring.CompiledCode(kernels, [], "a warning", "0.json")})["answer"]
    assert answer == {"triton": kernels, "extensions": [], "printed": "a warning", "trace": "0.json"}
    assert CompiledCall.from_json(answer) == CompiledCall((4,), (), "a warning")


def test_what_has_no_json_form_is_not_sent():
    with pytest.raises(TypeError, match="set has no JSON form"):
        sent({"result": {1}})


def test_the_times_of_a_launch_are_the_inverse_of_its_rates(monkeypatch):
    monkeypatch.setattr(rates, "rates", lambda *_: Rate(2e5, 1e5, 4e5, 9))
    assert tensor_probe.microseconds(None, 100) == {"median": 5.0, "p20": 2.5, "p80": 10.0, "n": 9}
