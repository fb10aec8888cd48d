"""Takes no adapter for the first one."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_lora_expand"
CHANGES = {
    "tl.load(adapters + tl.program_id(0))": "tl.maximum(tl.load(adapters + tl.program_id(0)), 0)",
}
