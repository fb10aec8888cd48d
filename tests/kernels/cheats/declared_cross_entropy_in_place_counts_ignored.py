"""Divides by the number of all rows, ignored ones included: loss and gradient are too small by the same factor."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cross_entropy_in_place"
CHANGES = {
    "counted += tl.sum((others != ignored).to(tl.int32), 0)": "counted += tl.sum((start + at < rows).to(tl.int32), 0)",
}
