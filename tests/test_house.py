"""The repository itself: the direction of the layers, its documents, its set-up."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLE, GPU_TEST_S, run_tool

PYPROJECT = (BUNDLE / "pyproject.toml").read_text()
DOCUMENTS = [
    path for path in BUNDLE.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(BUNDLE).parts)
]
BUDGETS = {"SKILL.md": (600, 110)} | {
    f"skills/{folder.name}/SKILL.md": (1200, 180) for folder in sorted((BUNDLE / "skills").iterdir())
}


WORKSPACE_FILES = {"kernel.py", "reference.py", "op.py", "x.py", "verb_noun.py"}  # named in documents, not ours


def lint_imports(tree: Path) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is not installed")
    environment = {**os.environ, "PYTHONPATH": str(tree / "tools")}
    return subprocess.run([program, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True)


def test_the_layers_check_can_fail(tmp_path):
    shutil.copytree(BUNDLE / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(BUNDLE / "pyproject.toml", tmp_path / "pyproject.toml")
    assert lint_imports(tmp_path).returncode == 0
    with (tmp_path / "tools/kernelopt/hardware/wiki.py").open("a") as file:
        file.write("\n\ndef late():\n    from .. import gate\n")
    assert lint_imports(tmp_path).returncode != 0


LIBRARY = BUNDLE / "tools" / "kernelopt"
ROOMS = sorted(folder.name for folder in LIBRARY.iterdir() if (folder / "__init__.py").is_file())
LAYERS = [  # from the top, as pyproject.toml has them
    set(layer.split(" | "))
    for layer in re.findall(
        r'^  "(.+)",$', re.search(r"^layers = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)[1], re.MULTILINE
    )
]


def imported(room: Path) -> set[str]:
    """What the modules of a room import from elsewhere in the library: "device.sandbox", "errors"."""
    names = set()
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2:  # from ..device import gpu
                module = [node.module] if node.module else []
                names |= {".".join([*module, alias.name]) for alias in node.names}
    return {".".join(name.split(".")[: 2 if (room.parent / name.split(".")[0]).is_dir() else 1]) for name in names}


def drift(room: Path) -> list[str]:
    """Where the line `May import:` of a room and its imports differ.

    The line names rooms, modules of rooms, and modules beside the rooms; "and below": every layer below the last room.
    """
    stated = re.search(r"^May import: (.+?)\.(?=\s)", (room / "__init__.py").read_text(), re.MULTILINE | re.DOTALL)[1]
    with_below, names = stated.endswith(" and below"), set(re.split(r",\s+", stated.removesuffix(" and below")))
    lowest = max(at for at, layer in enumerate(LAYERS) if layer & {name.split(".")[0] for name in names})
    allowed = names | (set().union(*LAYERS[lowest + 1 :]) if with_below else set())
    real = imported(room)
    unstated = [f"imports {name}" for name in sorted(real) if not {name, name.split(".")[0]} & allowed]
    used = real | {name.split(".")[0] for name in real}
    return unstated + [f"does not import {name}" for name in sorted(names - used)]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_imports(room):
    assert drift(LIBRARY / room) == []


def test_that_check_sees_an_import_that_is_not_stated_and_a_statement_without_an_import(tmp_path):
    for name in ("device", "hardware", "session"):
        (tmp_path / name).mkdir()
    room = tmp_path / "session"
    (room / "__init__.py").write_text('"""x\n\nMay import: hardware.wiki, bundle,\nerrors. Next: y.\n"""\n')
    (room / "task.py").write_text(
        "from ..hardware.wiki import Page\nfrom .. import bundle\nfrom ..errors import Refused\n"
    )
    assert drift(room) == []
    (room / "plans.py").write_text("def late():\n    from ..device import gpu\n    from ..hardware import work\n")
    (room / "task.py").write_text("from ..hardware import wiki\nfrom .. import bundle\n")
    assert drift(room) == ["imports device.gpu", "imports hardware.work", "does not import errors"]


def test_every_room_and_module_is_in_the_map_and_in_the_contracts():
    modules = {path.stem for path in LIBRARY.glob("*.py")} - {"__init__"}
    assert set().union(*LAYERS) == {*ROOMS, *modules}
    contract = re.search(r'name = "Torch and triton.*?^source_modules = (\[.*?\])', PYPROJECT, re.MULTILINE | re.DOTALL)
    assert {name.removeprefix("kernelopt.") for name in re.findall(r'"(.+?)"', contract[1])} == (
        {*ROOMS, *modules} - {"worker"}
    )
    table = re.search(r"^\| room \| knows \|$(.*?)^$", (BUNDLE / "AGENTS.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    named = set(re.findall(r"`([a-z_]+)(?:/|\.py)`", table))
    assert named == {*ROOMS, *modules}


def broken_links(path: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [t for t in targets if not re.match(r"[a-z]+:", t) and not (path.parent / t).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(BUNDLE)))
def test_links_resolve(path):
    assert broken_links(path) == []


def test_that_check_sees_a_broken_link(tmp_path):
    (tmp_path / "a.md").write_text("[x](b.md) and [y](https://example.org) and [z](a.md)")
    assert broken_links(tmp_path / "a.md") == ["b.md"]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(tool, long options) of every command of the bundle that a document names in code."""
    code = re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in "\n".join(code).splitlines():
        name = re.search(r"\b([a-z_-]+\.(?:py|sh))\b", line)
        if name:
            found.append((name[1], re.findall(r"(?<=\s)--[a-z-]+", line)))
    return found


def help_text(name: str, run) -> str:
    text = run(name, "--help").stdout
    verbs = re.search(r"^ +((?:[a-z]+\|)+[a-z]+)$", text, re.MULTILINE)
    return text + "".join(run(name, verb, "--help").stdout for verb in (verbs[1].split("|") if verbs else []))


def test_commands_and_options_named_in_documents_exist(run_here):
    wanted: dict[str, set[str]] = {}
    existing = {path.name for path in BUNDLE.glob("[!.]*/**/*.*")}
    for path in DOCUMENTS:
        if "examples" in path.parts or "gpu-wiki" in path.parts:
            continue
        for name, options in commands(path.read_text()):
            if name not in WORKSPACE_FILES:
                assert name in existing, f"{path}: {name} does not exist"
            if (BUNDLE / "tools" / name).exists() or name == "workspace_init.sh":
                wanted.setdefault(name, set()).update(options)
    assert len(wanted) >= 10
    for name, options in wanted.items():
        text = help_text(name, run_tool if name.endswith(".sh") else run_here)
        lacking = {option for option in options if not re.search(rf"{option}(?![a-z-])", text)}
        assert not lacking, f"{name} has no {lacking}"


@pytest.mark.parametrize("name", BUDGETS)
def test_skills_keep_their_size(name):
    words, lines = BUDGETS[name]
    text = (BUNDLE / name).read_text()
    assert len(text.split()) <= words and len(text.splitlines()) <= lines
    head = text.split("---")[1]
    assert f"name: {Path(name).parent.name or 'gpu-kernel-optimizer'}" in head
    assert len(re.search(r'description: "(.*)"', head)[1]) <= 1024


def test_the_router_names_every_sub_skill_and_every_gate():
    router = (BUNDLE / "SKILL.md").read_text()
    for folder in (BUNDLE / "skills").iterdir():
        assert f"skills/{folder.name}/SKILL.md" in router
    for tool in (
        "gpu_specs.py",
        "verify_kernel.py",
        "run_gate.py",
        "check_goal.py",
        "memory_manager.py",
        "profile_kernel.sh",
    ):
        assert tool in router


def test_skills_name_no_command_that_gemini_refuses():
    """Gemini CLI 0.61.0 runs no shell command with a substitution: "Command injection detected"."""
    texts = [BUNDLE / "SKILL.md", *BUNDLE.glob("skills/*/SKILL.md"), *BUNDLE.glob("reference/*.md")]
    lines = [line for path in texts for line in path.read_text().splitlines() if "$(" in line or "<(" in line]
    assert len(texts) > 6 and lines == []


def test_no_program_holds_a_figure_of_the_wiki():
    """Distinctive hardware values (three significant digits or more) stand in no program."""
    from kernelopt.hardware import wiki

    rows = [row for page in wiki.pages(BUNDLE / "gpu-wiki") for row in page.rows.values()]
    named = ("bandwidth", "peak_", "clock", "measured_")
    texts = {
        r.text
        for r in rows
        if any(word in r.metric for word in named) and len(r.text.replace(".", "").rstrip("0")) >= 3
    }
    assert len(texts) >= 20
    texts.remove("10001")  # MHz of a card's memory, and the port of Ray's client server
    texts.remove("97.5")  # TFLOPS of one card, and in gate.py the upper end of a 95 % interval
    for path in [*(BUNDLE / "tools").rglob("*.py"), *filter(Path.is_file, (BUNDLE / "scripts").iterdir())]:
        code = re.sub(r'"""(.*?)"""', "", path.read_text(), flags=re.DOTALL)
        numbers = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", code))
        assert not numbers & texts, f"{path.name}: {numbers & texts}"


def test_nothing_private_is_in_the_repository():
    listed = subprocess.run(["git", "ls-files"], cwd=BUNDLE, capture_output=True, text=True).stdout.splitlines()
    assert listed
    for name in listed:
        path = BUNDLE / name
        if not path.exists():
            continue  # deleted, not committed yet
        assert path.stat().st_size < 2_000_000, f"{name} is large"
        if path.suffix in (".md", ".py", ".sh", ".json", ".toml"):
            text = path.read_text()
            assert not re.search(r"(?<![\w.])/(?:root|work|home/\w+|Users)/(?!\.\.\.)", text), (
                f"{name} holds a private path"
            )


def test_setup_asks_for_what_is_absent_and_nothing_else():
    """pip leaves what is installed; of torch and triton any importable build is used, which pip may not know."""
    script = BUNDLE / "scripts" / "requirements.py"
    done = subprocess.run([sys.executable, script, "dependencies"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[0] == "numpy"
    assert not re.search("torch|triton", done.stdout) and "jsonschema-rs>=" in done.stdout
    sys.path.insert(0, str(script.parent))
    import requirements

    assert requirements.requirements('a = [\n "x>=1", # why\n "y",\n]\nb = ["z"]  # c\n', "a") == ["x>=1", "y"]
    assert "torch==2.6.0" in requirements.for_pip("oldest")


def test_every_test_has_a_time_limit_and_one_on_a_gpu_a_longer_one(pytestconfig, tmp_path):
    if not pytestconfig.pluginmanager.hasplugin("timeout"):
        pytest.skip("pytest-timeout is not installed")
    usual = float(pytestconfig.getini("timeout"))
    assert 0 < usual <= 120 < GPU_TEST_S
    (tmp_path / "conftest.py").write_text((BUNDLE / "tests" / "conftest.py").read_text())
    (tmp_path / "test_limits.py").write_text(
        "import pytest, time\n"
        "def test_that_hangs(): time.sleep(600)\n"
        "def test_after_it(request): assert request.node.get_closest_marker('timeout') is None\n"
        "@pytest.mark.gpu\ndef test_of_a_gpu(): pass\n"
        "def test_its_limit(request):\n"
        "    (other,) = [item for item in request.session.items if item.name == 'test_of_a_gpu']\n"
        f"    assert other.get_closest_marker('timeout').args == ({GPU_TEST_S},)\n"
    )
    command = ["-m", "pytest", "-p", "no:xdist", "-o", "timeout=2"]
    command += ["-c", BUNDLE / "pyproject.toml", "--rootdir", tmp_path]
    options = {
        "timeout": usual / 2,
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "env": {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    }
    done = subprocess.run([sys.executable, *command, tmp_path], **options)
    assert "1 failed, 2 passed, 1 skipped" in done.stdout and "Timeout" in done.stdout, done.stdout + done.stderr


EXAMPLE = BUNDLE / "examples" / "row_softmax" / "h200"


def test_the_results_show_what_the_example_recorded():
    table = (BUNDLE / "docs" / "results.md").read_text().split("<!-- result -->")[1].split("<!-- /result -->")[0]
    for version in ("v0", "v1", "v2"):
        record = json.loads((EXAMPLE / "memory" / f"{version}.json").read_text())
        row = next(line for line in table.splitlines() if line.startswith(f"| {version} |"))
        performance, comparison = record["performance"], record["performance"]["comparison_with_previous"]
        assert record["device"] == "NVIDIA H200"
        assert f"{performance['latency_us']:.1f} us" in row and f"{performance['floor_share_pct']:.1f} %" in row
        if comparison:
            low, high = comparison["ci95"]
            assert f"{comparison['speedup']:.3f}x (95 % interval {low:.3f} to {high:.3f})" in row


def test_the_readme_shows_what_the_tools_print(run_here):
    shown = (BUNDLE / "README.md").read_text().split("<!-- output -->")[1].split("<!-- /output -->")[0]
    for block in shown.strip().strip("`").strip().split("\n\n"):
        command, *lines = block.splitlines()
        words, *filters = command.removeprefix("$ python tools/").split(" | ")
        tool, *arguments = (BUNDLE / word if word.startswith("examples/") else word for word in words.split())
        done = run_here(tool, *arguments)
        text = subprocess.run(
            ["bash", "-c", " | ".join(["cat", *filters])], input=done.stdout, capture_output=True, text=True
        )
        assert lines == [line.rstrip() for line in text.stdout.splitlines()], command


def test_the_readme_is_short():
    assert len((BUNDLE / "README.md").read_text().split()) <= 800


def test_the_demos_exit_code_is_that_of_the_step_that_failed(tmp_path):
    demo = [sys.executable, BUNDLE / "scripts" / "demo.py", "--root", tmp_path / "nowhere"]
    done = subprocess.run(demo, capture_output=True, text=True)
    assert done.returncode == 2 and "exit code 2 where 0 was expected" in done.stderr
