"""The wiki's pages of advice: size, sources, the parts of each technique, and that what they name is collected."""

import ast
import json
import re
from pathlib import Path

import pytest
from conftest import BUNDLE, FIXTURES
from kernelopt.diagnosis import findings as rules
from kernelopt.hardware import wiki

WIKI = BUNDLE / "gpu-wiki"
TECHNIQUE_PAGES = sorted((WIKI / "docs/optimization").glob("*.md"))
PITFALL_PAGES = sorted((WIKI / "docs/pitfalls").glob("*.md"))
PAGES = TECHNIQUE_PAGES + PITFALL_PAGES + sorted((WIKI / "docs/practice").glob("*.md"))
MOST_WORDS = 1500
TECHNIQUE_PARTS = ["Trigger", "Change", "Effect", "Confirm", "Measured"]
PITFALL_PARTS = ["Attempted", "Observed", "Cause", "Lesson"]
PLAIN = {"Sources", "What does not help", "Which stall, which change"}  # sections that are no technique

NCU = json.loads((BUNDLE / "reference/ncu_metrics.json").read_text())["metrics"]
ROCPROF = json.loads((BUNDLE / "reference/rocprof_metrics.json").read_text())["metrics"]
THRESHOLDS = json.loads((BUNDLE / "reference/thresholds.json").read_text())["thresholds"]
KEYS = {metric["key"] for metric in NCU}
NSIGHT_NAMES = {name for metric in NCU for name in metric["names"]}


def sections(text: str) -> dict[str, str]:
    """{heading: body} of the second-level sections."""
    pieces = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def parts(body: str) -> dict[str, str]:
    """{label: text} of the `- **Label:** text` items of a section, in their order."""
    return dict(re.findall(r"^- \*\*(\w+):\*\* (.*?)(?=^- \*\*|\Z)", body, re.MULTILINE | re.DOTALL))


def entries(pages: list[Path]) -> list:
    """(page, heading, parts) of every section that must have parts."""
    return [
        pytest.param(page, heading, parts(body), id=f"{page.stem}: {heading}")
        for page in pages
        for heading, body in sections(page.read_text()).items()
        if heading not in PLAIN
    ]


def names(text: str) -> set[str]:
    """What stands in backticks and looks like the name of a metric, a threshold or a finding."""
    return set(re.findall(r"`([a-z0-9]+(?:_+[a-z0-9]+)+(?:\.[a-z_.]+)?|duration)`", text))


def findings() -> dict[str, str]:
    """{finding: page} of reference/findings.json."""
    texts = rules.texts()
    pages = {id_: words["wiki"] for id_, words in texts["findings"].items()}
    pages |= dict.fromkeys(texts["stalls"], pages.pop("stall"))
    pages |= dict.fromkeys(("uncoalesced_loads", "uncoalesced_stores"), pages.pop("uncoalesced_accesses"))
    newer = pages.pop("old_tensor_instruction")
    pages |= {id_: newer for id_, *_ in rules.NEWER_THAN_MMA_SYNC.values()}
    assert pages.pop("busy_pipe") == "{wiki}"
    return pages | {pipe["finding"]: pipe["wiki"] for pipe in texts["pipes"].values()}


def misquoted(text: str) -> list[str]:
    """Thresholds that a text names without their value before them, as in: below 16 (`low_bytes_per_sector`)."""
    quoted = {
        key for value, key in re.findall(r"(\d+(?:\.\d+)?)(?: [\w%]+)?\s\(`(\w+)`\)", text)
        if key in THRESHOLDS and float(value) == THRESHOLDS[key]["value"]
    }  # fmt: skip
    return sorted(names(text) & set(THRESHOLDS) - KEYS - quoted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_names_its_sources(page):
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS
    *_, (last, sources) = sections(text).items()
    assert last == "Sources"
    assert re.search(r"^- .*(https://|measured|compiled|observed)", sources, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_index_leads_to_every_page(page):
    assert f"]({page.relative_to(WIKI)})" in (WIKI / "README.md").read_text()


@pytest.mark.parametrize(("page", "heading", "found"), entries(TECHNIQUE_PAGES))
def test_a_technique_says_when_what_and_how_to_tell(page, heading, found):
    assert list(found) == TECHNIQUE_PARTS
    assert re.search(r"\d|[Nn]ot measured|[Nn]ot run", found["Measured"])
    keys = KEYS if page.stem != "cdna" else {metric["key"] for metric in ROCPROF}
    known = keys | NSIGHT_NAMES | set(THRESHOLDS) | set(findings())
    for part in ("Trigger", "Confirm"):
        assert names(found[part]) & keys, f"{part} names no metric"
        assert names(found[part]) <= known, f"{part}: {names(found[part]) - known}"
        assert misquoted(found[part]) == []


@pytest.mark.parametrize(("page", "heading", "found"), entries(PITFALL_PAGES))
def test_a_pitfall_says_what_was_tried_and_learnt(page, heading, found):
    assert list(found) == PITFALL_PARTS


@pytest.mark.parametrize(("finding", "page"), findings().items())
def test_a_finding_leads_to_a_page_that_treats_it(finding, page):
    assert f"`{finding}`" in (WIKI / "docs/optimization" / page).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_in_pages_is_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


def test_the_page_on_amd_says_that_nothing_ran_there():
    assert "run on AMD hardware" in (WIKI / "docs/optimization/cdna.md").read_text()


def test_these_checks_can_fail():
    assert names("`stall_wait` of `sm__throughput.avg.pct` and `BLOCK`, `tl.dot`") == {
        "stall_wait",
        "sm__throughput.avg.pct",
    }
    assert misquoted("below 16 (`low_bytes_per_sector`)") == []
    assert misquoted("below 17 (`low_bytes_per_sector`)") == ["low_bytes_per_sector"]
    assert (
        list(parts("- **Trigger:** a\n- **Change:** b\n```python\nx = 1\n```\n- **Effect:** c\n"))
        == TECHNIQUE_PARTS[:3]
    )
    assert findings()["small_grid"] == "occupancy.md"


def test_what_the_blackwell_page_says_of_compiled_code_is_what_was_compiled():
    """fixtures/blackwell: nothing ran."""
    compiled = json.loads((FIXTURES / "blackwell/instructions.json").read_text())
    page = (WIKI / "docs/optimization/blackwell.md").read_text()
    (on_hopper,) = compiled.pop("90 NVFP4")
    assert on_hopper.startswith("wgmma") and on_hopper.endswith("f32.bf16.bf16")
    for name, instructions in compiled.items():
        (instruction,) = instructions
        kind = re.search(r"kind::\w+", instruction)[0]
        assert f"`{kind}" in page and "block_scale" in instruction
        assert instruction.startswith("mma.sync" if name.startswith("120") else "tcgen05.mma")


def test_what_the_cdna_page_says_of_compiled_code_is_what_was_compiled():
    """fixtures/cdna: nothing ran."""
    claims = json.loads((FIXTURES / "cdna/claims.json").read_text())["claims"]
    page = (WIKI / "docs/optimization/cdna.md").read_text()

    def mfma(name: str) -> str:
        (opcode,) = [opcode for opcode in claims[name]["instructions"] if "mfma" in opcode]
        return opcode

    def loads(name: str) -> dict[str, int]:
        return {opcode.rpartition("_")[2]: count for opcode, count in claims[name]["instructions"].items()}

    vgprs, spilled = ({name: claim[key] for name, claim in claims.items()} for key in ("vgprs", "spilled"))
    code = {name: claim["code_bytes"] for name, claim in claims.items()}
    waves, large = "waves_per_eu {}".format, "large tile {}".format
    said = [
        f"16 gives `{mfma('instruction 16')}` and {vgprs['instruction 16']} VGPRs, 32 and the default give "
        f"`{mfma('instruction 32')}` and {vgprs['instruction 32']}",
        f'`input_precision="ieee"` compiled to `{mfma("ieee")}`',
        f"an odd length has {loads('masked 2')['ushort']} `load_ushort` and no `dwordx4`",
        f"{vgprs[waves(0)]} registers without the option; {vgprs[waves(2)]} and {spilled[waves(2)]} spilled with 2; "
        f"{vgprs[waves(3)]} and {spilled[waves(3)]} spilled with 3; {vgprs[waves(4)]} and {spilled[waves(4)]} spilled",
        f"{vgprs[large(8)]} registers at 8 waves, {vgprs[large(4)]} and {spilled[large(4)]} spilled at 4",
        "{:.0f}, {:.0f}, {:.0f} and {:.0f} KiB at 1, 2, 3 and 4 stages; 4 does not fit".format(
            *(claims[f"stages {count}"]["lds_kib"] for count in (1, 2, 3, 4))
        ),
        f"took {vgprs['softmax']} VGPRs and did not spill on gfx942",
        *(
            f"{name} gives {claims[name]['instructions'][mfma(name)]} `{mfma(name)}`, {vgprs[name]} VGPRs and {code[name]} bytes"
            for name in ("e4m3fn", "e4m3fnuz")
        ),
        f"e5m2 and e5m2fnuz likewise {code['e5m2']} and {code['e5m2fnuz']} bytes",
    ]
    assert [text for text in said if text not in page] == []
    assert mfma("instruction 0") == mfma("instruction 32") and vgprs["instruction 0"] == vgprs["instruction 32"]
    assert "dwordx4" not in loads("masked 2") and loads("masked 3") == {"dwordx4": 1}
    assert loads("last block apart")["dwordx4"] == 1 and spilled["softmax"] == spilled[waves(0)] == 0
    lds = wiki.limit_pages(WIKI)["gfx942"].known("lds_per_workgroup").value
    assert claims["stages 3"]["lds_kib"] <= lds < claims["stages 4"]["lds_kib"]
