"""Never adds the bonus token."""

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"
HONEST = "declared_rejection"
CHANGES = {
    "    tl.store(out + request * width + last - first, tl.load(bonus + request), mask=still)\n": "",
}
