"""AMD's GPUs as amd-smi and rocm-smi tell them. The programs are stand-ins that print what others published."""

import json

import pynvml
import pytest
from conftest import FIXTURES, tool_json
from kernelopt.compiling import choosing
from kernelopt.device import amd, gpu
from kernelopt.errors import EnvironmentLacks

ROCM_SMI = (FIXTURES / "rocm_smi_showproductname.json").read_text()
AMD_SMI = (FIXTURES / "amd_smi_static.json").read_text()


def card(name: str | None = None, gfx: str | None = None, uuid: str | None = None) -> amd.AmdCard:
    return amd.AmdCard(name, gfx, uuid)


def entry(number: int, name: str, gfx: str = "gfx942", serial: str = "N/A") -> dict:
    """A card in amd-smi's form."""
    asic = {"market_name": name, "target_graphics_version": gfx, "asic_serial": serial}
    return {"gpu": number, "asic": asic, "board": {"product_name": "N/A"}}


def test_what_was_published_is_read():
    assert amd.read_rocm_smi(ROCM_SMI) == [card("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "gfx90a")]
    assert amd.read_amd_smi(AMD_SMI) == [card("AMD Instinct MI210", "gfx90a")]
    bare_list = json.dumps(json.loads(AMD_SMI)["gpu_data"])  # as before ROCm 6.4
    assert amd.read_amd_smi("WARNING: a user is missing from the group render\n" + bare_list) == amd.read_amd_smi(
        AMD_SMI
    )


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "no json", '{"gpu_data": 1}', '[{"gpu": 0}]', '{"system": {}}']
)
def test_what_is_no_list_of_cards_gives_none(text):
    assert amd.read_rocm_smi(text) == []
    assert amd.read_amd_smi(text) == []


def test_cards_come_in_the_order_of_their_numbers():
    cards = {f"card{number}": {"Card Series": f"Card {number}"} for number in (10, 2, 1)}
    assert [found.name for found in amd.read_rocm_smi(json.dumps(cards))] == ["Card 1", "Card 2", "Card 10"]
    cards = [entry(number, f"Card {number}") for number in (10, 2)]
    assert [found.name for found in amd.read_amd_smi(json.dumps(cards))] == ["Card 2", "Card 10"]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"Card Series": "N/A", "Card Model": "AMD Instinct MI300X"}, "AMD Instinct MI300X"),
        ({"Card series": "0x738c", "Card model": "0xc34", "Card SKU": "D34314"}, None),  # MI100 under ROCm 4.0
        ({"Device Name": "Phoenix3", "Unique ID": "N/A"}, "Phoenix3"),
        ({"Card Series": " ", "Card SKU": "D65201"}, None),  # a part number is no product
    ],
)
def test_what_says_nothing_is_no_name(keys, name):
    assert amd.read_rocm_smi(json.dumps({"card0": keys})) == [card(name)]


CARDS = [card("A", "gfx1103", "00aa"), card("B", "gfx942", "3d4595974090853c"), card("C", "gfx942", "0b0c")]


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, "ABC"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "B"),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, "CA"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "C"),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, "B"),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, "BC"),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "C"),  # among what is left
        ({"ROCR_VISIBLE_DEVICES": "GPU-3D4595974090853C, 0"}, "BA"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1111"}, ""),
        ({"HIP_VISIBLE_DEVICES": "1,-1,0"}, "B"),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
        ({"HIP_VISIBLE_DEVICES": "7"}, ""),
    ],
)
def test_the_variables_that_choose_a_gpu_are_respected(variables, names):
    assert "".join(found.name for found in amd.visible(CARDS, variables)) == names


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The only programs on the PATH: `programs(amd_smi=text)` makes a stand-in that prints it, or fails without one."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(**texts: str | None) -> None:
        for name, text in texts.items():
            program = tmp_path / name.replace("_", "-")
            printed = f"while read -r line; do echo \"$line\"; done <<'END'\n{text}\nEND"
            program.write_text("#!/bin/sh\n" + ("exit 1" if text is None else printed) + "\n")
            program.chmod(0o755)

    return make


def test_amd_smi_is_asked_first_and_rocm_smi_where_it_knows_nothing(programs):
    assert amd.identify() is None
    programs(rocm_smi=ROCM_SMI)
    assert amd.identify().to_json() == {"name": "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "gfx_target": "gfx90a"}
    programs(amd_smi=None)
    assert amd.identify().gfx_target == "gfx90a"
    programs(amd_smi=AMD_SMI)
    assert amd.identify().to_json() == {"name": "AMD Instinct MI210", "gfx_target": "gfx90a"}


def test_a_gpu_that_is_hidden_or_nameless_is_said(programs, monkeypatch):
    programs(amd_smi=json.dumps([entry(0, "N/A", "gfx1103"), entry(1, "AMD Instinct MI300X")]))
    with pytest.raises(EnvironmentLacks, match=r"\(gfx1103\) does not report its name; .* gpu_specs\.py list"):
        amd.identify()
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert amd.identify().name == "AMD Instinct MI300X"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    with pytest.raises(EnvironmentLacks, match="hides every AMD GPU"):
        amd.identify()


def test_a_tool_that_needs_a_gpu_names_the_amd_gpu_that_is_here(programs, monkeypatch):
    """Whatever build torch is: the tools ask for the GPU before they start torch."""

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
        gpu.identify()
    programs(amd_smi=json.dumps([entry(0, "AMD Instinct MI300X")]))
    with pytest.raises(EnvironmentLacks, match=r"the GPU here is AMD Instinct MI300X, of AMD.*--for gfx942"):
        gpu.identify()
    assert choosing.default(None, True, "--for").arch == "gfx942"


def test_detect_finds_the_page_of_the_gpu_and_where_the_two_disagree(programs, run_here, monkeypatch):
    def no_nvidia_gpu():
        raise EnvironmentLacks("no NVIDIA GPU here")

    monkeypatch.setattr(gpu, "identify", no_nvidia_gpu)
    programs(amd_smi=json.dumps([entry(0, "AMD Instinct MI300X"), entry(1, "AMD Instinct MI300X", "gfx90a")]))
    found = tool_json("gpu_specs.py", "detect", run=run_here)
    assert found["platform"] == "MI300X" and found["gfx_target"] == "gfx942" and found["disagreements"] == []
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    (odd,) = tool_json("gpu_specs.py", "detect", run=run_here)["disagreements"]
    assert odd["metric"] == "gfx_target" and odd["device"] == "gfx90a"
    programs(amd_smi=json.dumps([entry(0, "AMD Instinct MI210", "gfx90a")]))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    done = run_here("gpu_specs.py", "detect")
    assert done.returncode == 1 and "The device reports: gfx_target gfx90a" in done.stderr
    assert "calibrate_gpu" not in done.stderr  # it measures NVIDIA's GPUs alone
