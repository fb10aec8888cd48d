"""Starts each sequence from its slot, also where it begins anew."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_conv1d_varlen"
CHANGES = {
    "known = inside & (tl.load(started + number) + tl.zeros_like(at) != 0)": "known = inside",
}
