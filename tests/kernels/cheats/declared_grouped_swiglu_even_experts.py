"""Takes it for granted that each expert has equally many rows, and never looks at the offsets."""

STATUS = {"WRONG_VALUES", "NONFINITE", "OUT_OF_BOUNDS"}
CAUGHT_BY = "verify"
HONEST = "declared_grouped_swiglu"
CHANGES = {
    "        end = tl.load(offsets + one + 1)": "        end = (one + 1) * tl.load(offsets + experts) // experts",
}
