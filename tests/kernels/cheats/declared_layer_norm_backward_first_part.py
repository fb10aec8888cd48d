"""Returns the first part of the sums."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_layer_norm_backward"
CHANGES = {
    "*parts.sum(0)": "*parts[0]",
}
