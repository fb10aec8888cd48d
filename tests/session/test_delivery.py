"""Changes that were made elsewhere come home in one step, or not at all."""

import errno
import os
import tempfile

import pytest
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.session import delivery, trees
from kernelopt.session.digests import content_digest


def tree_of(workspace) -> trees.Tree:
    return trees.scan([str(workspace.root)], str(workspace.root))


def changes_of(workspace, **contents: str | None) -> tuple[trees.Changes, list[tuple[str, bytes]]]:
    """Changes of files by name, "__" for a slash, and their contents."""
    texts = {f"{workspace.root}/{name.replace('__', '/')}.py": text for name, text in contents.items()}
    kinds = {
        name: None if text is None else f"file 640 {content_digest(text.encode())}" for name, text in texts.items()
    }
    return kinds, [(content_digest(text.encode()), text.encode()) for text in texts.values() if text is not None]


def test_files_are_made_changed_and_removed(session):
    (session.root / "old.py").write_text("old")
    changed, contents = changes_of(session, kernel="new", plans__a__b="x", same="x", old=None)
    changed[f"{session.root}/empty"] = "folder"
    changed[f"{session.root}/link"] = "link kernel.py"
    delivery.deliver(session.root, changed, contents)
    assert session.kernel.read_text() == (session.root / "link").read_text() == "new"
    assert session.kernel.stat().st_mode & 0o777 == 0o640 and (session.root / "plans" / "a" / "b.py").read_text() == "x"
    assert (session.root / "empty").is_dir() and not (session.root / "old.py").exists()
    assert not list((session.root / ".git").glob("kernelopt-incoming*"))


def test_without_a_content_nothing_is_changed(session):
    changed, contents = changes_of(session, kernel="new", other="x")
    before = tree_of(session)
    with pytest.raises(UsageError, match="1 changed files did not arrive; nothing was changed"):
        delivery.deliver(session.root, changed, contents[:1])
    assert tree_of(session) == before and not list((session.root / ".git").glob("kernelopt-incoming*"))


def test_where_git_is_read_only_the_rest_comes_home(session, monkeypatch):
    """As in Codex's sandbox, for its working folder. The index is derived; a commit is not."""
    make = tempfile.mkdtemp

    def refuses(prefix: str, dir) -> str:
        if dir.name == ".git":
            raise OSError(errno.EROFS, "Read-only file system", str(dir))
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuses)
    changed, contents = changes_of(session, kernel="new")
    changed |= {f"{session.root}/.git": "folder", f"{session.root}/.git/index": f"file 644 {contents[0][0]}"}
    index = (session.root / ".git" / "index").read_bytes()
    delivery.deliver(session.root, changed, contents)
    assert session.kernel.read_text() == "new" and (session.root / ".git" / "index").read_bytes() == index
    changed, contents = changes_of(session, kernel="newer")
    with pytest.raises(EnvironmentLacks, match=r"\.git is read-only here, and .*/HEAD was changed elsewhere"):
        delivery.deliver(session.root, {**changed, f"{session.root}/.git/HEAD": None}, contents)
    assert session.kernel.read_text() == "new" and not list(session.root.glob(".*/kernelopt-incoming*"))


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_kill_divides_is_completed_by_the_next_that_locks_the_workspace(session, monkeypatch, number):
    changed, contents = changes_of(session, kernel="new", other="x")
    put, done = delivery.put, []

    def dies(*arguments):
        if len(done) == number:
            raise MemoryError("stands in for a kill")
        done.append(put(*arguments))

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(delivery, "put", dies)
        delivery.deliver(session.root, changed, contents)
    assert (session.kernel.read_text() == "new") == (number > 0) and not (session.root / "other.py").exists()
    with session.locked():
        assert session.kernel.read_text() == "new" and (session.root / "other.py").read_text() == "x"
    assert not list((session.root / ".git").glob("kernelopt-incoming*"))


def test_an_interrupt_does_not_divide_it(session, monkeypatch):
    changed, contents = changes_of(session, kernel="new", other="x")
    put, interrupted = delivery.put, []

    def interrupts(*arguments):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        put(*arguments)

    monkeypatch.setattr(delivery, "put", interrupts)
    with pytest.raises(KeyboardInterrupt):
        delivery.deliver(session.root, changed, contents)
    assert session.kernel.read_text() == "new" and (session.root / "other.py").exists()


def test_a_delivery_without_a_journal_is_removed_after_a_while(session):
    half = session.root / ".git" / "kernelopt-incoming-half"
    half.mkdir()
    with session.locked():
        assert half.exists()  # its process may still be writing
    os.utime(half, (0, 0))
    with session.locked():
        assert not half.exists()


def test_nothing_is_written_through_a_link_of_the_workspace(session, tmp_path):
    (tmp_path / "mine").mkdir()
    (session.root / "out").symlink_to(tmp_path / "mine")
    changed, contents = changes_of(session, out__x="x")
    with pytest.raises(UsageError, match="leads out of"):
        delivery.deliver(session.root, changed, contents)
    assert not list((tmp_path / "mine").iterdir())


def test_conflicts_are_what_differs_on_both_sides():
    before = {"/w/a": "file 644 1", "/w/b": "file 644 1", "/w/.git/index": "file 644 1", "/w/.cache/t": "file 644 1"}
    now = {
        **before,
        "/w/a": "file 644 2",
        "/w/.git/index": "file 644 2",
        "/w/.cache/t": "file 644 2",
        "/w/new": "folder",
    }
    assert delivery.conflicts("/w", before, now) == ["/w/a", "/w/new"]
    assert delivery.conflicts("/w", before, now, ["/w/b"]) == []
    assert delivery.conflicts("/w", before, now, ["/w/a", "/w/b", "/w/.cache/t"]) == ["/w/a"]


def test_what_travels_of_a_workspace():
    names = ["kernel.py", ".git/HEAD", ".git/kernelopt-lock", "x/__pycache__/a.pyc", ".cache/cuda/a", ".cache/triton/a"]
    assert [name for name in names if trees.travels(f"/w/{name}", "/w")] == [
        "kernel.py",
        ".git/HEAD",
        ".cache/triton/a",
    ]
    assert trees.travels("/other/.cache/cuda/a", "/w") and trees.travels("/w/.cache/cuda/a", None)


def test_a_path_through_a_link_leads_to_the_real_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.py").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tree = trees.scan([f"{tmp_path}/link/a.py", f"{tmp_path}/none"], None)
    assert tree[f"{tmp_path}/link/a.py"] == f"alias {tmp_path}/real/a.py"
    assert trees.digest_of(tree[f"{tmp_path}/real/a.py"]) == content_digest(b"a")
    assert tree[str(tmp_path)] == tree[f"{tmp_path}/link"] == "folder" and f"{tmp_path}/none" not in tree
    with pytest.raises(UsageError, match="over 0 GiB"):
        trees.scan([f"{tmp_path}/real"], None, most_bytes=0.5)
