"""Is a case right? Pure functions: what a candidate's process reported and what the oracle compared in, a status out."""

# What a kernel may answer to a shape or layout that the task does not list: it is loud, so nobody takes it for a result.
DECLINING = ("RUNTIME_ERROR", "COMPILE_ERROR", "LAUNCH_ERROR", "IMPORT_ERROR", "OOM")
# Of the GPU time of kernels that compute, so much may be spent in those of torch and of NVIDIA's libraries: a final
# reduction of partial sums, say. Measured on an H200: honest kernels 0, a softmax or product left to torch 85 to 100 %.
LIBRARY_SHARE = 0.25
# Do kernels of the candidate's own do the work? NOT_ASKED: the task lets libraries do it.
CHECKED, NOT_CHECKED, NOT_ASKED = "checked", "not checked", "not asked"
# Of values that the task does not have, so many elements may be off, where a saturated softmax, say, turns on a rounding.
ODD_SHARE_PCT = 1.0
# Far from the task's own values a right kernel may overflow where PyTorch does not: said, and no reason to refuse it.
ONLY_TOLD = ("64 times the inputs",)
# Where a few large elements set the scale, the others may be lost unnoticed. Kernels within the tolerance of a normally
# distributed result lose up to 2 % (those near 0), PyTorch in bf16 no more than that.
LOST_PCT = 5.0
LOST_FACTOR = 10


def judge(case: dict, done: dict, found: dict | None, libraries: bool) -> dict:
    """The status of one case from what ran and what was compared. Pure."""
    if "error" in done:
        status, message = done["error"]["status"], done["error"]["message"]
        if case["variant"] and declined(case["variant"], status, message):
            return {"status": "DECLINED", "message": message[:200]}
        return {"status": status, "message": message}
    status, message = judge_process(done, found)
    if status == "OK":
        status, message = judge_outputs(found, case["variant"])
    if status == "OK" and done["aliased"]:
        status, message = "ALIASED_OUTPUT", "an output shares memory with an input or with the output of another call"
    if status == "OK" and done["kernels"] is not None:
        status, message = judge_kernels(done["kernels"], libraries)
    if status != "OK" and case["variant"] and case["variant"]["values"] in ONLY_TOLD:
        status, message = "DOUBTFUL", f"{status}: {message}"
    outputs = [output for call in found.get("calls", []) for output in call["outputs"]]
    return {
        "status": status,
        "message": message,
        "max_rel": max((output.get("max_rel", 0.0) for output in outputs), default=0.0),
        "baseline_max_rel": max((output.get("baseline_max_rel", 0.0) for output in outputs), default=0.0),
        "deterministic": done["deterministic"],
        "guarded": done["guarded"],
        "fails_guarded": done["fails_guarded"],
        "oracle": found.get("oracle"),
        "kernels": done["kernels"] and shares(done["kernels"]),
        "outputs": outputs,
    }


def declined(variant: dict, status: str, message: str) -> bool:
    """Did the kernel say aloud that it does not serve this variant? A misaligned access is reported by the GPU itself."""
    loud = variant["layout"] == "misaligned inputs" and "misaligned" in message
    return status in DECLINING or (status == "ILLEGAL_ACCESS" and loud)


def judge_process(done: dict, found: dict) -> tuple[str, str]:
    """(status, message) of what the kernel did besides its result. Pure."""
    if done["device"]:
        return "WRONG_DEVICE", f"an output is on {done['device']}"
    if done["mutated"]:  # told first: it is why a second call is wrong
        return "INPUT_MUTATED", f"input {done['mutated'][0]} was changed"
    if "changes" in found and (changed := [name for name in done["changed"] if name not in found["changes"]]):
        return (
            "INPUT_MUTATED",
            f"a call changed '{changed[0]}' of the model's state, which the reference leaves as it is",
        )
    if done["late"] and not done["aliased"]:
        return "CHEAT_SUSPECT", "an output changed after the call had returned: a thread or a stream was not waited for"
    if done["out_of_bounds"]:
        return "OUT_OF_BOUNDS", "memory beside an input or an output was written"
    return "OK", ""


def judge_kernels(kernels: list[dict], libraries: bool) -> tuple[str, str]:
    """(status, message) of the GPU kernels that a call launched: whose are they? Pure."""
    times = {origin: sum(k["us"] for k in kernels if k["origin"] == origin) for origin in ("own", "library", "moving")}
    if libraries or not kernels:
        return "OK", ""
    computing = times["own"] + times["library"]
    if computing == 0:
        return "CHEAT_SUSPECT", "no kernel of its own ran, torch moved the data"
    if times["library"] > LIBRARY_SHARE * computing:
        name = max((k for k in kernels if k["origin"] == "library"), key=lambda k: k["us"])["name"]
        return (
            "CHEAT_SUSPECT",
            f"torch or a vendor library does {times['library'] / computing:.0%} of the computing ({name[:80]})",
        )
    return "OK", ""


def own_work(cases: list[dict], libraries: bool) -> str:
    """CHECKED, NOT_CHECKED or NOT_ASKED: was it looked at whose kernels do the work? Of cases as `judge` gives them.

    Each traced call that returned anything launched a kernel; where the profiler names none, nothing is known of its
    work. Pure.
    """
    if libraries:
        return NOT_ASKED
    traced = [case["kernels"] for case in cases if case.get("kernels") is not None and returned_anything(case)]
    return CHECKED if traced and all(traced) else NOT_CHECKED


def returned_anything(case: dict) -> bool:
    return any(output["elements"] for output in case["outputs"])


def shares(kernels: list[dict]) -> list[dict]:
    """[{name, us, share_pct, origin}] of a call's kernels."""
    total = sum(kernel["us"] for kernel in kernels)
    return [
        {
            "name": kernel["name"],
            "us": round(kernel["us"], 2),
            "share_pct": round(100 * kernel["us"] / total, 1) if total else 0.0,
            "origin": kernel["origin"],
        }
        for kernel in kernels
    ]


def judge_outputs(found: dict, variant: dict | None = None) -> tuple[str, str]:
    """(status, message) of the outputs of one case, over all its calls. Pure."""
    if "unreadable" in found:
        return "RUNTIME_ERROR", f"the stored outputs cannot be read: {found['unreadable']}"
    if found["random"]:
        return "INVALID_TASK", "the reference gives different results for the same inputs"
    if found["bland"]:
        return "INVALID_TASK", f"{found['bland'][0]} is within the tolerance"
    for call in found["calls"]:
        if call["count"] != found["expected_count"]:
            return "WRONG_SHAPE", f"{call['count']} outputs, expected {found['expected_count']}"
        if call["structure"] not in (None, found["expected_structure"]):
            return (
                "WRONG_SHAPE",
                f"the result is {call['structure'][:200]}, expected {found['expected_structure'][:200]}",
            )
        for number, output in enumerate(call["outputs"]):
            status, message = judge_output(output, number, variant)
            if status != "OK":
                return status, message
        filled = [output for output in call["outputs"] if output["elements"]]
        if variant is None and filled and not any(output["finite"] for output in filled):
            return "INVALID_TASK", "the reference's outputs hold no finite value, so there is nothing to compare"
    if found["wrong_state"]:
        return (
            "WRONG_VALUES",
            f"the reference's forward changes '{found['wrong_state'][0]}', and the kernel leaves it otherwise (where it does not matter, the reference's Model can call self.eval())",
        )
    return "OK", ""


def judge_output(output: dict, number: int, variant: dict | None = None) -> tuple[str, str]:
    """(status, message) of one output tensor. Of a variant the strides may differ; where the reference has no finite value
    nothing is asked; on other values than the task's a few elements may be off. Pure."""
    for name in ("shape", "dtype") if variant else ("shape", "dtype", "stride"):
        if output[name] != output[f"expected_{name}"]:
            expected = output[f"expected_{name}"]
            return f"WRONG_{name.upper()}", f"output {number} has {name} {output[name]}, expected {expected}"
    # A variance of one element, or a row whose mask is empty when it is cut, is nobody's task.
    variant_alone = variant and (output["usually_finite"] or not output["finite"])
    if count := output["spurious" if variant_alone else "nonfinite"]:
        return "NONFINITE", f"output {number}: {count} elements are NaN or Inf where they must not be"
    share = 100 * output["mismatches"] / max(output["elements"], 1)
    if share > (ODD_SHARE_PCT if variant and variant["values"] else 0):
        return (
            "WRONG_VALUES",
            f"output {number}: {output['mismatches']} elements ({share:.3g} %) are off, "
            f"error up to {output['max_rel']:.3g} of (|reference| + rms), first at index {output['first_bad_index']}",
        )
    if output["lost_pct"] > max(LOST_PCT, LOST_FACTOR * output["baseline_lost_pct"]):
        return (
            "WRONG_VALUES",
            f"output {number}: {output['lost_pct']:.3g} % of the elements that are not 0 miss by more than half of "
            "themselves, small as they are beside the largest",
        )
    return "OK", ""
