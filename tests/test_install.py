"""Where clients find the skills: scripts/install.sh for each of them, the manifests, the snippet for AGENTS.md.

What clients make of it is tested in tests/clients/.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLE, run_script

ROUTER = "gpu-kernel-optimizer"
SUB_SKILLS = sorted(path.name for path in (BUNDLE / "skills").iterdir())
SKILLS = [ROUTER, *SUB_SKILLS]
HOMES = {
    "claude": ".claude/skills",
    "codex": ".agents/skills",
    "cursor": ".cursor/skills",
    "gemini": ".gemini/skills",
    "opencode": ".config/opencode/skills",
    "agents": ".agents/skills",
}
PROJECTS = {**HOMES, "opencode": ".opencode/skills"}
INSTALLER = runpy.run_path(str(BUNDLE / "scripts" / "install.py"))  # its names
CLIENTS = INSTALLER["CLIENTS"]
MOVED = {variable for _, variable, _, _ in CLIENTS.values() if variable}  # they move the skills folder of a client
MODES = {"link": [], "copy": ["--copy"]}
NOT_NEEDED = {".agents", ".ci", ".claude-plugin", ".package", "AGENTS.md", "tests"}


class Machine:
    """A home and a project in a scratch folder, and a bundle's installer run in them."""

    def __init__(self, root: Path, bundle: Path):
        self.home, self.project, self.bundle = root / "home", root / "project", bundle
        self.home.mkdir()
        self.project.mkdir()

    def run(self, *arguments, bundle: Path | None = None, **variables) -> subprocess.CompletedProcess:
        """install.py in this process, which is quick."""
        script = (bundle or self.bundle) / "scripts" / "install.py"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment(**variables).items():
                patch.setenv(name, value)
            for name in MOVED - variables.keys():
                patch.delenv(name, raising=False)
            return run_script(script, *arguments)

    def run_shell(self, *arguments) -> subprocess.CompletedProcess:
        """install.sh, as a user runs it."""
        environment = {name: value for name, value in os.environ.items() if name not in MOVED} | self.environment()
        command = ["bash", self.bundle / "scripts" / "install.sh", *arguments]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def environment(self, **variables) -> dict[str, str]:
        return {"HOME": str(self.home), **{name: str(value) for name, value in variables.items()}}

    def install(self, client: str, scope: str, mode: str = "link", **options) -> Path:
        """The skills folder, after a run that went well."""
        done = self.run("--client", client, *self.scope(scope), *MODES[mode], **options)
        assert done.returncode == 0, done.stderr
        return self.skills(client, scope)

    def uninstall(self, client: str, scope: str) -> None:
        done = self.run("--client", client, *self.scope(scope), "--uninstall")
        assert done.returncode == 0, done.stderr

    def scope(self, scope: str) -> list:
        return ["--project", self.project] if scope == "project" else []

    def skills(self, client: str, scope: str) -> Path:
        return self.project / PROJECTS[client] if scope == "project" else self.home / HOMES[client]


@pytest.fixture(scope="session")
def shared_bundle(tmp_path_factory) -> Path:
    return small_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def machine(tmp_path, shared_bundle) -> Machine:
    return Machine(tmp_path, shared_bundle)


@pytest.fixture(scope="session", params=MODES)
def installed(request, tmp_path_factory) -> Path:
    """The skills folder with all of this bundle, linked and copied once for the tests that read or run it there."""
    return Machine(tmp_path_factory.mktemp("whole"), BUNDLE).install("agents", "home", request.param)


def tree(root: Path) -> dict[str, object]:
    """Everything below `root`: where a link points to, the bytes of a file, None for a folder."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = content
    return found


def small_bundle(folder: Path) -> Path:
    """A bundle of its own, with all that its install.sh needs, and a file in place of what is large."""
    shutil.copytree(BUNDLE / "skills", folder / "skills")
    for name in ("scripts", "tools/kernelopt"):
        (folder / name).mkdir(parents=True)
        for file in (BUNDLE / name).glob("*.*"):
            shutil.copy(file, folder / name)
    for name in ("reference", "gpu-wiki", "examples", "docs", "benchmarks", "evals"):
        (folder / name).mkdir()
        (folder / name / "README.md").write_text(name)
    for name in (".gitignore", "SKILL.md", "README.md", "pyproject.toml"):
        shutil.copyfile(BUNDLE / name, folder / name)
    return folder


def assert_refused(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done
    for word in words:
        assert word in done.stderr


# --- what is put where --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", HOMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scope", ["home", "project"])
def test_every_skill_lies_one_level_deep_and_goes_without_a_trace(machine, client, mode, scope):
    skills = machine.skills(client, scope)
    if scope == "project":  # what is there already stays; in the home even the folders are made
        neighbour = skills / "somebody-elses" / "SKILL.md"
        neighbour.parent.mkdir(parents=True)
        neighbour.write_text("---\nname: somebody-elses\n---\n")
    before = {root: tree(root) for root in (machine.home, machine.project)}
    machine.install(client, scope, mode)
    for name in SKILLS:
        file = skills / name / "SKILL.md"
        assert f"\nname: {name}\n" in file.read_text()
        assert not file.is_symlink()  # Codex passes over a SKILL.md that is a link; a linked folder it follows
        assert (skills / name).is_symlink() == (mode == "link")
    inside = [path.is_symlink() for path in (skills / ROUTER / "skills").iterdir()]
    assert inside == [mode == "copy" and client in INSTALLER["LOOK_DEEP"]] * len(SUB_SKILLS)
    installed = tree(skills)
    machine.install(client, scope, mode)
    assert tree(skills) == installed
    machine.uninstall(client, scope)
    assert {root: tree(root) for root in before} == before


def test_each_run_says_what_it_did(machine):
    call = ["--client", "claude"]
    first, second = machine.run_shell(*call).stdout, machine.run(*call).stdout
    assert first.count(": linked\n") == len(SKILLS) == second.count(": there already\n")
    assert machine.run(*call, "--copy").stdout.count(": copied\n") == len(SKILLS)
    assert machine.run(*call, "--uninstall").stdout.count(": removed\n") == len(SKILLS)
    done = machine.run(*call, "--uninstall")
    assert done.returncode == 0 and "nothing of this script is there" in done.stdout


def test_folders_that_somebody_used_since_stay(machine):
    skills = machine.install("opencode", "home")
    (skills.parent / "opencode.json").write_text("{}")
    machine.uninstall("opencode", "home")
    assert tree(machine.home) == {".config": None, ".config/opencode": None, ".config/opencode/opencode.json": b"{}"}


def test_a_client_whose_folder_was_moved_is_followed(machine):
    moved = {"claude": "CLAUDE_CONFIG_DIR", "gemini": "GEMINI_CLI_HOME", "opencode": "XDG_CONFIG_HOME"}
    places = {"claude": "skills", "gemini": ".gemini/skills", "opencode": "opencode/skills"}
    for client, variable in moved.items():
        base = machine.home / client
        assert machine.run("--client", client, **{variable: base}).returncode == 0
        assert (base / places[client] / ROUTER / "SKILL.md").is_file()


def test_links_are_replaced_by_copies_and_back(machine):
    skills = machine.install("agents", "project", "link")
    links = tree(skills)
    machine.install("agents", "project", "copy")
    assert not (skills / ROUTER).is_symlink()
    machine.install("agents", "project", "link")
    assert tree(skills) == links
    machine.uninstall("agents", "project")
    assert tree(machine.project) == {}


def test_a_copy_follows_its_bundle(machine, tmp_path):
    bundle = small_bundle(tmp_path / "bundle")
    skills = machine.install("claude", "project", "copy", bundle=bundle)
    (bundle / "SKILL.md").write_text("---\nname: gpu-kernel-optimizer\n---\nnewer\n")
    shutil.rmtree(bundle / "skills" / SUB_SKILLS[0])  # which the newer version has no more
    machine.install("claude", "project", "copy", bundle=bundle)
    assert (skills / ROUTER / "SKILL.md").read_text().endswith("newer\n")
    assert not (skills / SUB_SKILLS[0]).exists()
    machine.uninstall("claude", "project")
    assert tree(machine.project) == {}


def test_a_bundle_that_lies_in_the_skills_folder_stays_there(machine):
    skills = machine.home / HOMES["agents"]
    bundle = small_bundle(skills / ROUTER)
    before = tree(machine.home)
    for mode in MODES:
        machine.install("agents", "home", mode, bundle=bundle)
        assert all((skills / name / "SKILL.md").is_file() for name in SKILLS)
        assert machine.run("--client", "agents", "--uninstall", bundle=bundle).returncode == 0
        made_by_python = {name for name in tree(machine.home) if "__pycache__" in name}
        assert {name: what for name, what in tree(machine.home).items() if name not in made_by_python} == before


def test_a_bundle_that_was_moved_to_its_link_is_not_removed(machine, tmp_path):
    skills = machine.install("agents", "home", bundle=small_bundle(tmp_path / "bundle"))
    (skills / ROUTER).unlink()
    (tmp_path / "bundle").rename(skills / ROUTER)
    done = machine.run("--client", "agents", "--uninstall", bundle=skills / ROUTER)
    assert done.returncode == 0 and {path.name for path in skills.iterdir()} == {ROUTER}
    assert (skills / ROUTER / "SKILL.md").is_file()


def test_links_made_by_hand_are_left_to_their_maker(machine):
    skills = machine.home / HOMES["claude"]
    skills.mkdir(parents=True)
    for name in SKILLS:
        (skills / name).symlink_to(machine.bundle if name == ROUTER else machine.bundle / "skills" / name)
    before = tree(machine.home)
    machine.install("claude", "home")
    assert tree(machine.home) == before
    machine.uninstall("claude", "home")
    assert tree(machine.home) == before


# --- what is in the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [ROUTER, SUB_SKILLS[-1]])
def test_what_is_in_the_way_is_named_and_nothing_changes(machine, tmp_path, kind, mode, name):
    path = machine.skills("claude", "home") / name
    path.parent.mkdir(parents=True)
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    before = tree(machine.home)
    assert_refused(machine.run("--client", "claude", *MODES[mode]), str(path))
    assert tree(machine.home) == before


@pytest.mark.parametrize("name", [".claude", ".claude/skills"])
def test_a_file_in_place_of_a_folder_is_named(machine, name):
    path = machine.home / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = tree(machine.home)
    assert_refused(machine.run("--client", "claude"), "is in the way")
    assert tree(machine.home) == before


@pytest.mark.parametrize("change", ["edited", "added", "removed", "replaced"])
def test_a_copy_that_somebody_changed_is_kept(machine, change):
    skills = machine.install("claude", "home", "copy")
    file = skills / ROUTER / "SKILL.md"
    if change == "edited":
        file.write_text("mine")
    elif change == "added":
        (skills / ROUTER / "notes.md").write_text("mine")
    elif change == "removed":
        file.unlink()
    else:
        shutil.rmtree(skills / ROUTER)
        (skills / ROUTER).symlink_to(machine.project)
    before = tree(machine.home)
    for arguments in (["--uninstall"], ["--copy"], []):
        assert_refused(machine.run("--client", "claude", *arguments), str(skills / ROUTER))
        assert tree(machine.home) == before


def test_what_using_a_copy_leaves_in_it_is_no_change(machine):
    skills = machine.install("claude", "home", "copy")
    for folder in (".venv/bin", "tools/__pycache__", "tools/kernelopt/__pycache__"):
        (skills / ROUTER / folder).mkdir(parents=True)
        (skills / ROUTER / folder / "file").write_text("x")
    machine.install("claude", "home", "copy")
    assert (skills / ROUTER / ".venv").is_dir()
    machine.uninstall("claude", "home")
    assert tree(machine.home) == {}


def test_a_run_that_was_killed_can_be_repeated_and_undone(machine):
    skills = machine.install("claude", "home", "copy")
    whole = tree(machine.home)
    for name in SKILLS[2:]:  # the record is written before anything is put
        shutil.rmtree(skills / name)
    machine.install("claude", "home", "copy")
    assert tree(machine.home) == whole
    shutil.rmtree(skills / SUB_SKILLS[0])
    machine.uninstall("claude", "home")
    assert tree(machine.home) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--client", "emacs"],
        ["--client", "claude", "--copy", "--uninstall"],
        ["--client", "claude", "--project", "no/such"],
    ],
)
def test_a_wrong_call_is_one_sentence(machine, arguments):
    done = machine.run_shell(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and tree(machine.home) == {}


# --- what works from there ----------------------------------------------------------------------------------------


def named_roots(skill: Path) -> list[Path]:
    """The places that a sub-skill's text names as the bundle's root; it speaks of them from the skill's folder."""
    places = {"two levels up": "../..", f"`../{ROUTER}`": f"../{ROUTER}"}
    text = (skill / "SKILL.md").read_text()
    return [skill / place for words, place in places.items() if words in text]


def test_a_sub_skill_names_the_root_whether_links_are_resolved_or_not(installed):
    for name in SUB_SKILLS:
        for folder in (installed / name, installed / ROUTER / "skills" / name):
            for read in (os.path.realpath, os.path.normpath):  # `..` as files are opened, and as `cd` understands it
                places = [Path(read(place)) for place in named_roots(folder)]
                found = {place.resolve() for place in places if (place / "tools" / "run_gate.py").is_file()}
                assert found == {(installed / ROUTER).resolve()}, f"{read.__name__}: the root is not at {places}"


def test_the_tools_run_from_there(installed, tmp_path):
    for path in (installed / ROUTER, installed / ROUTER / "skills" / ".."):
        command = [sys.executable, path / "tools" / "gpu_specs.py", "list"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and "H200" in done.stdout, done.stderr
    start = ["bash", installed / ROUTER / "reference" / "workspace_init.sh", "--help"]
    assert "KERNEL" in subprocess.run(start, capture_output=True, text=True, cwd=tmp_path).stdout


def test_every_path_that_the_skills_name_is_in_a_copy(installed):
    root = installed / ROUTER
    texts = [root / "SKILL.md", *root.glob("skills/*/SKILL.md")]
    folders = "tools|skills|reference|gpu-wiki|scripts|examples|docs"
    named = {
        path for file in texts for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\.\w+", file.read_text())
    }
    assert len(named) >= 20
    assert [path for path in named - {"tools/x.py"} if not (root / path).exists()] == []


def test_every_link_in_a_copy_leads_somewhere_in_it(installed):
    """But those to AGENTS.md, which is for who works on the bundle: in a project of others, clients would follow it."""
    root = (installed / ROUTER).resolve()
    pages = [
        page
        for folder in ("docs", "evals", "benchmarks", "gpu-wiki", "examples")
        for page in (root / folder).rglob("*.md")
    ]
    dead, links = set(), 0
    for page in [*root.glob("*.md"), *pages]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in target:
                links += 1
                if not (page.parent / target).exists():
                    dead.add((page.parent / target).resolve().relative_to(root).as_posix())
    assert links > 900 and dead <= {"AGENTS.md"}


def test_a_copy_holds_what_is_needed_and_no_more(machine, tmp_path):
    bundle = small_bundle(tmp_path / "bundle")
    for folder in (".git", ".venv", "tests", "tools/__pycache__", "tools/kernelopt/__pycache__"):
        (bundle / folder).mkdir(parents=True, exist_ok=True)
        (bundle / folder / "file").write_text("x")
    names = set(tree(machine.install("agents", "home", "copy", bundle=bundle) / ROUTER))
    assert not [name for name in names if "__pycache__" in name]
    found = {Path(name).parts[0] for name in names}
    assert not found & {*NOT_NEEDED, ".git", ".venv"}
    listed = subprocess.run(["git", "ls-files"], cwd=BUNDLE, capture_output=True, text=True).stdout.splitlines()
    tracked = {Path(name).parts[0] for name in listed}
    assert tracked <= found | NOT_NEEDED, "new at the top level: put it into NEEDED of install.py, or NOT_NEEDED here"


def test_the_validator_of_skills_takes_them_there(installed):
    program = Path(sys.executable).with_name("agentskills")
    if not program.exists():
        pytest.skip("skills-ref is not installed")
    for name in SKILLS:
        done = subprocess.run([program, "validate", installed / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# --- manifests and snippet ----------------------------------------------------------------------------------------


def manifest(name: str) -> dict:
    return json.loads((BUNDLE / ".claude-plugin" / name).read_text())


def test_the_manifests_name_what_exists():
    plugin, marketplace = manifest("plugin.json"), manifest("marketplace.json")
    (entry,) = marketplace["plugins"]
    assert plugin["name"] == entry["name"] == marketplace["name"] == ROUTER
    assert plugin["description"] == entry["description"] and marketplace["owner"]["name"] and marketplace["description"]
    packed = BUNDLE / entry["source"] / ".claude-plugin" / "plugin.json"
    assert (
        packed.read_bytes() == (BUNDLE / ".claude-plugin" / "plugin.json").read_bytes()
    )  # Codex follows no link to it
    codex = json.loads((BUNDLE / ".agents" / "plugins" / "marketplace.json").read_text())  # nor links in .package
    assert codex == {
        "name": ROUTER,
        "plugins": [{"name": ROUTER, "source": {"source": "local", "path": "./"}}],
    }
    found = []
    for place in plugin["skills"]:  # a folder that is a skill, or one of skills
        assert place.startswith("./")
        folder = BUNDLE / place
        found += [folder] if (folder / "SKILL.md").is_file() else [path.parent for path in folder.glob("*/SKILL.md")]
    assert sorted(path.resolve().name for path in found[1:]) == SUB_SKILLS and found[0].resolve() == BUNDLE


def test_there_is_one_version():
    project = re.search(r'^version = "(.+)"$', (BUNDLE / "pyproject.toml").read_text(), re.MULTILINE)[1]
    router = re.search(r'^  version: "(.+)"$', (BUNDLE / "SKILL.md").read_text(), re.MULTILINE)[1]
    assert (
        project == router == manifest("plugin.json")["version"] == manifest("marketplace.json")["plugins"][0]["version"]
    )


def test_no_folder_of_a_client_is_in_the_bundle():
    """A .claude/ folder in a plugin hid its skills from Claude Code 2.1.92. No other SKILL.md may look like a skill."""
    listed = subprocess.run(["git", "ls-files"], cwd=BUNDLE, capture_output=True, text=True).stdout.splitlines()
    folders = (".claude", ".agents", ".cursor", ".gemini", ".opencode")
    inside = [name for name in listed if Path(name).parts[0] in folders]
    assert inside == [".agents/plugins/marketplace.json"]  # no skills
    assert sorted(name for name in listed if name.endswith("SKILL.md")) == sorted(
        [".package/SKILL.md", "SKILL.md", *(f"skills/{name}/SKILL.md" for name in SUB_SKILLS)]
    )


def test_installers_of_others_get_one_skill_that_holds_all_that_is_needed():
    """`npx skills add` and Claude Code's marketplace take .package and copy what its links lead to. The first takes a
    SKILL.md at the root for the whole repository, tests included, unless it is internal (1.7.4)."""
    folder, hidden = BUNDLE / ".package", "  internal: true\n"
    assert (BUNDLE / "SKILL.md").read_text().count(hidden) == 1
    assert (folder / "SKILL.md").read_text() == (BUNDLE / "SKILL.md").read_text().replace(hidden, "")
    assert all(f"metadata:\n{hidden}" in path.read_text() for path in BUNDLE.glob("skills/*/SKILL.md"))
    links = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert links == {*INSTALLER["NEEDED"], "skills"} - {
        "SKILL.md",
        ".gitignore",
    }  # git follows no .gitignore that is a link
    assert all((folder / name).resolve() == BUNDLE / name for name in links)


def test_the_snippet_has_five_lines_and_is_pointed_to(tmp_path):
    path = BUNDLE / "docs" / "agents-snippet.md"
    snippet = re.search(r"```markdown\n(.*?)```", path.read_text(), re.DOTALL)[1]
    assert len(snippet.splitlines()) == 5 and f"`{ROUTER}`" in snippet
    assert all(f"`{place}`" in snippet for place in PROJECTS.values())
    assert str(path) in Machine(tmp_path, BUNDLE).run("--client", "agents").stdout


def test_the_clients_are_those_of_the_help_and_of_this_test():
    assert CLIENTS.keys() == HOMES.keys()


@pytest.mark.parametrize(
    "record",
    [
        '{"folders_made": 9, "put": {"../../precious": "link:x"}}',
        '{"folders_made": 0, "put": {"..": "link:x"}}',
        "[]",
        "{}",
    ],
)
def test_a_record_from_elsewhere_leads_nowhere(tmp_path, record):
    skills = tmp_path / ".claude" / "skills"
    skills.mkdir(parents=True)
    (tmp_path / "precious").symlink_to("x")
    (skills / ".gpu-kernel-optimizer.json").write_text(record)
    done = run_script(BUNDLE / "scripts" / "install.py", "--client", "claude", "--project", tmp_path, "--uninstall")
    assert done.returncode == 2 and "is no record of what this script put there" in done.stderr
    assert (tmp_path / "precious").is_symlink()


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_each_client_has_its_command_on_the_page(page):
    text = (BUNDLE / page).read_text()
    assert [client for client in CLIENTS if f"--client {client}" not in text] == []
