"""Takes the number of the segment for its adapter."""

STATUS = {"NONFINITE", "WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lora_shrink"
CHANGES = {
    "adapter = tl.load(adapters + number)": "adapter = number % 3",
}
