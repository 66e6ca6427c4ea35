"""A small file is there as it was, or as it is to be, and never as something between."""

import os
import stat
from pathlib import Path

import pytest

from powerguard.durable import replace_file
from tests.trainer.toy import short_folder


def test_replaced_whole_with_its_mode_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old and longer than what comes")
    replace_file(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_kill_has_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".kept.new").write_bytes(b"half of something long")
    replace_file(tmp_path / "kept", b"whole")
    assert (tmp_path / "kept").read_bytes() == b"whole"


def test_another_file_whose_name_ends_in_new_stays(tmp_path: Path) -> None:
    """`powerguard secret set bmc` took a secret named bmc.new away."""
    (tmp_path / "bmc.new").write_bytes(b"the password of next week")
    replace_file(tmp_path / "bmc", b"the password")
    assert (tmp_path / "bmc.new").read_bytes() == b"the password of next week"


@pytest.mark.root
def test_what_a_killed_command_of_root_has_left_is_no_hindrance() -> None:
    """The folder is the daemon's, and the file was root's."""
    with short_folder() as folder:
        replace_file(folder / "kept", b"old")
        (folder / ".kept.new").touch(0o600)
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
        try:
            replace_file(folder / "kept", b"new")
        finally:
            os.seteuid(0)
        assert (folder / "kept").read_bytes() == b"new"


def test_never_through_a_link_that_somebody_has_put_there(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    (tmp_path / ".kept.new").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "kept", b"new")
    assert other.read_bytes() == b"not ours"
    assert not (tmp_path / "kept").exists()


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    (tmp_path / ".kept.new").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
