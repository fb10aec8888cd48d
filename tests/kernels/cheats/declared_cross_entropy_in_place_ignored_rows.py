"""Leaves the rows of ignored targets as they were."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_cross_entropy_in_place"
CHANGES = {
    "tl.where(real, slope, 0.0)": "tl.where(real, slope, x)",
}
