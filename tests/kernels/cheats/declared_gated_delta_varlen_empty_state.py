"""Begins each sequence with a state of zeros, whatever state it is given."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gated_delta_varlen"
CHANGES = {
    "state = tl.load(states + place, mask=both, other=0.0)": "state = tl.zeros((DEPTH, WIDTH), tl.float32)",
}
