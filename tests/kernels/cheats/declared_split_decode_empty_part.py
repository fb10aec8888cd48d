"""Lets a part without tokens count: minus infinity less minus infinity."""

STATUS = {"NONFINITE"}
CAUGHT_BY = "verify"
HONEST = "declared_split_decode"
CHANGES = {
    'tl.where(part == -float("inf"), 0.0, tl.exp(part - tl.max(part, 0)))': "tl.exp(part - tl.max(part, 0))",
}
