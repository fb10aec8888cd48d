"""Returns the gradients and leaves the inputs as they were."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_swiglu_backward"
CHANGES = {
    "    backward[(": "    a, b = a.clone(), b.clone()\n    backward[(",
}
