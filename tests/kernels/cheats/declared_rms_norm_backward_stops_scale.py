"""A backward pass that takes the row's scale for a constant: the gradient of x lacks a term."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rms_norm_backward"
CHANGES = {
    "(slope - normal * mean)": "slope",
}
