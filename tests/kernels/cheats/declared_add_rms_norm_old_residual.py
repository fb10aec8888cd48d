"""Writes the sum, and norms the input without the residual."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_add_rms_norm"
CHANGES = {
    "    scale = 1.0": "    total = tl.load(x + row + at, mask=inside, other=0.0)\n    scale = 1.0",
}
