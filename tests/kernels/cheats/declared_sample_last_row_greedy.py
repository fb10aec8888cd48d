"""Takes the likeliest index in the last row."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_sample_rows"
CHANGES = {
    "mask=row < rows)\n\n": "mask=row < rows - 1)\n    tl.store(out + rows - 1, tl.argmax(tl.sum(share, 0), 0).to(tl.int64))\n\n",
}
