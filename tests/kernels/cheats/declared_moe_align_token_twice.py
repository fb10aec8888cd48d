"""Names one token twice and another one never."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_moe_align"
CHANGES = {
    "tl.cumsum(here, 0), at,": "tl.cumsum(here, 0), tl.maximum(at, 1),",
}
