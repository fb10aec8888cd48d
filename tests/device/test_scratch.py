"""Scratch folders: what is removed of them, and when."""

import pytest
from kernelopt.device import scratch


@pytest.mark.parametrize("large_bytes", [1, scratch.LARGE_BYTES])
def test_a_folder_is_removed_and_what_it_links_to_stays(tmp_path, monkeypatch, large_bytes):
    monkeypatch.setattr(scratch, "LARGE_BYTES", large_bytes)
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    kept = [outside / "kept.pt", tmp_path / "kept too"]
    for file in (*kept, folder / "1.pt", folder / "a" / "2.pt", folder / "a" / "b" / "3"):
        file.write_text("x")
    (folder / "a" / "link").symlink_to(outside)
    (folder / "another").symlink_to(kept[1])
    scratch.remove_tree(folder)
    scratch.remove_tree(folder)  # which is gone
    assert not folder.exists() and all(file.exists() for file in kept)


def test_a_new_scratch_folder_is_not_taken_for_an_abandoned_one(tmp_path, monkeypatch):
    """Another process looks for abandoned ones at the worst moment: before the lock is taken."""
    lock = scratch.fcntl.flock

    def late(file, how):
        if how == scratch.fcntl.LOCK_EX:
            monkeypatch.setattr(scratch.fcntl, "flock", lock)
            scratch.remove_abandoned(tmp_path)
        lock(file, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    folder, alive = scratch.new_scratch(tmp_path)
    scratch.remove_abandoned(tmp_path)
    assert (folder / "alive").exists()
    alive.close()
    scratch.remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())
