"""Begins each sequence at the first token of all: the state of one sequence flows into the next."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_gated_delta_varlen"
CHANGES = {
    "tl.load(offsets + tl.program_id(0))": "tl.load(offsets + tl.program_id(0) * 0)",
}
