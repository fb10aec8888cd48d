"""Always takes two experts a token."""

STATUS = {"WRONG_VALUES", "NONFINITE", "OUT_OF_BOUNDS"}
CAUGHT_BY = "variants"
HONEST = "declared_fused_moe"
CHANGES = {
    "in range(chosen)": "in range(2)",
}
