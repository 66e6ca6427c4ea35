"""What powerguard-gpu and powerguard-signal both stand on: the file that is written before anything is touched.

It is all that says what was changed, so it is never half, and never somebody else's.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boot_id, boottime_s
from powerguard.effectors.gpu import helper as gpu
from powerguard.effectors.root_helper import BootFolder, KeptError, RefusedError, parse_object, read_line
from powerguard.effectors.signals import helper as signals
from tests.peers.machine import file_size_limit

WORDS = {"helper": "powerguard-x", "file": "kept.json", "by_hand": "mend it by hand"}


@pytest.fixture
def folder(tmp_path: Path) -> BootFolder:
    return BootFolder(tmp_path, **WORDS)


SERVES = """import sys
from powerguard.effectors.root_helper import serve
def carry_out(request):
    print(request["word"], file=sys.stderr)
    return {"ok": True}
sys.exit(serve(carry_out, awaited=("stop",)))
"""


@pytest.mark.parametrize(
    ("word", "waits", "is_done"),
    [("stop", True, True), ("stop", False, False), ("continue", False, True)],
)
def test_a_word_whose_caller_has_gone_is_not_carried_out_late(word: str, *, waits: bool, is_done: bool) -> None:
    """systemd may start the process only when the daemon has given up, and has said the opposite word since."""
    ours, theirs = socket.socketpair()
    ours.sendall(json.dumps({"word": word}).encode() + b"\n")
    if not waits:
        ours.close()
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", SERVES], stdin=theirs, capture_output=True, text=True, check=False
        )
    assert (ended.returncode, word in ended.stderr.split()) == (0, is_done)
    assert ("no longer waits" in ended.stdout) is not is_done


def test_what_was_kept_comes_back(folder: BootFolder) -> None:
    assert folder.load() is None
    folder.keep({"what": [1, 2]})
    assert folder.load() == {"schema_version": 1, "boot_id": boot_id(), "what": [1, 2]}
    assert [path.name for path in folder.path.iterdir()] == ["kept.json"]
    folder.forget()
    folder.forget()
    assert folder.load() is None


def test_a_disk_that_fills_up_leaves_what_was_kept_before(folder: BootFolder) -> None:
    """Half a file in its place, and nobody would ever be let go on: not by a word, not by the watch."""
    folder.keep({})
    # The first write takes so much, and only the next one fails, as where a disk is full.
    with file_size_limit(100), pytest.raises(KeptError, match=r"kept\.json: cannot write: File too large .*make room"):
        folder.keep({"what": "x" * 200})
    assert folder.load() == {"schema_version": 1, "boot_id": boot_id()}


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 3000, '{"boot_id": 1}', '{"boot_id": "BOOT"}', "\xff"])
def test_what_makes_no_sense_is_left_for_a_person(folder: BootFolder, text: str) -> None:
    (folder.path / "kept.json").write_bytes(text.replace("BOOT", boot_id()).encode("latin-1"))
    with pytest.raises(KeptError, match="mend it by hand, then remove it"):
        folder.load()
    assert (folder.path / "kept.json").exists()


def test_what_another_boot_has_left_is_removed(folder: BootFolder) -> None:
    """Also where a newer powerguard wrote it."""
    (folder.path / "kept.json").write_text(json.dumps({"schema_version": 9, "boot_id": "another"}), encoding="ascii")
    assert folder.load() is None
    assert list(folder.path.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("how", [{"mode": 0o777}, {"mode": 0o775}, {"owner": 65534}])
def test_a_folder_in_which_others_can_write_is_not_believed(folder: BootFolder, how: dict[str, Any]) -> None:
    """Whoever could write there could have root signal anybody: a process of root that was "stopped", say."""
    folder.keep({})
    folder.path.chmod(how.get("mode", 0o755))
    os.chown(folder.path, how.get("owner", 0), -1)
    with pytest.raises(KeptError, match="other users than root can write there"):
        folder.load()


def test_a_hold_of_the_future_or_of_nonsense_holds_nothing(folder: BootFolder) -> None:
    assert folder.held_s() == 0.0
    for text in ("garbage", "nan", "inf", "-1", str(boottime_s() + 1000)):
        (folder.path / "held").write_text(text, encoding="ascii")
        assert folder.held_s() == 0.0
    before = (folder.path / "held").stat().st_ino
    folder.hold()
    assert 0 <= boottime_s() - folder.held_s() < 60
    assert (folder.path / "held").stat().st_ino == before, "on a disk that is full there is no room for another one"


def test_a_lock_that_cannot_be_had_is_reported(folder: BootFolder) -> None:
    (folder.path / "lock").symlink_to(folder.path / "elsewhere")
    with pytest.raises(KeptError, match=r"lock: .*remove it"), folder.locked(boottime_s()):
        pass
    nowhere = BootFolder(folder.path / "none", **WORDS)
    with pytest.raises(KeptError, match=r"systemctl enable --now powerguard-x\.socket"), nowhere.locked(boottime_s()):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system read-only")
def test_on_a_disk_that_has_become_read_only_what_was_kept_is_still_read_under_the_lock(tmp_path: Path) -> None:
    """Who was stopped must be let go on, whatever has become of /run since."""
    mounted = tmp_path / "run"
    mounted.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "mode=0700", "none", mounted]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("root may not mount here (a container)")
    try:
        folder = BootFolder(mounted, **WORDS)
        with folder.locked(boottime_s()):
            folder.keep({"what": 1})
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        with folder.locked(boottime_s()):
            assert (folder.load() or {})["what"] == 1
            with pytest.raises(KeptError, match="Read-only file system"):
                folder.forget()
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("run", [gpu.run, signals.run])
@pytest.mark.parametrize("lease_s", ["nan", "inf", "-1", "long"])
def test_a_lease_that_is_no_time_is_usage(run: Callable[[Sequence[str]], int], lease_s: str, tmp_path: Path) -> None:
    assert run(["watch", "--folder", str(tmp_path), "--lease-s", lease_s]) == 64


# --- The line -------------------------------------------------------------------------------------------------------

BOTH = [
    (b"garbage\n", "not a word"),
    (b"\n", "not a word"),
    (b"\xff\xfe\x00\n", "not a word"),
    (b"[" * 4000 + b"\n", "not a word"),
    (b"x" * 5000, "longer than 4096 bytes"),
    (b'{"word": "list"', "no end"),
    (b'"list"\n', "not a word"),
    (b'{"word": "off"}\n', "unknown word; the words are list, "),
    (b'{"word": "watch"}\n', "unknown word; the words are list, "),
    (b'{"word": ["list"]}\n', "unknown word"),
    (b'{"word": "list", "folder": "/tmp"}\n', "list takes no other key"),
]
GPU = [
    (b'{"word": "cap"}\n', "cap takes share"),
    (b'{"word": "restore", "share": 0.6}\n', "restore takes no other key"),
    (b'{"word": "cap", "share": 0.6, "folder": "/tmp"}\n', "cap takes share"),
    (b'{"word": "cap", "share": NaN}\n', "not a word"),
    (b'{"word": "cap", "share": 1e999}\n', "above 0, at most 1"),
    (b'{"word": "cap", "share": 0}\n', "above 0, at most 1"),
    (b'{"word": "cap", "share": 1.01}\n', "above 0, at most 1"),
    (b'{"word": "cap", "share": -0.6}\n', "above 0, at most 1"),
    (b'{"word": "cap", "share": true}\n', "above 0, at most 1"),
    (b'{"word": "cap", "share": "0.6"}\n', "above 0, at most 1"),
]
SIGNALS = [
    (b'{"word": "stop"}\n', "stop takes socket"),
    (b'{"word": "stop", "socket": 7}\n', "as text"),
    (b'{"word": "stop", "socket": "a.sock", "pid": 1}\n', "stop takes socket"),
    (b'{"word": "checkpoint", "unit": "a.service", "signal": "KILL"}\n', "checkpoint takes a unit"),
    (b'{"word": "checkpoint", "unit": "../a.service", "signal": "USR1"}\n', "checkpoint takes a unit"),
    (b'{"word": "checkpoint", "unit": "\\ud800.service", "signal": "USR1"}\n', "checkpoint takes a unit"),
    *(
        (json.dumps({"word": "stop", "socket": name}).encode() + b"\n", "is not the name of a socket")
        for name in (
            "../llm.sock",
            "/run/x.sock",
            "llm",
            ".sock",
            "a/b.sock",
            "",
            "llm.sock\n",
            "\ud800.sock",
            "x" * 99,
        )
    ),
]


def heard(line: bytes) -> Mapping[str, object]:
    """What a helper makes of this line, from whoever hangs up after it."""
    reading, writing = os.pipe()
    try:
        os.write(writing, line)
        os.close(writing)
        result = read_line(reading, boottime_s() + 5.0)
    finally:
        os.close(reading)
    assert result is not None
    return parse_object(result)


@pytest.mark.parametrize(
    ("checked", "line", "words"),
    [
        *((gpu.checked, *each) for each in (*BOTH, *GPU)),
        *((signals.checked, *each) for each in (*BOTH, *SIGNALS)),
    ],
)
def test_what_is_not_a_word_is_refused(
    checked: Callable[[Mapping[str, object]], object], line: bytes, words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        checked(heard(line))


def test_only_the_first_line_counts_and_silence_is_no_line() -> None:
    assert heard(b'{"word": "list"}\n{"word": "cap", "share": 0.6}\n') == {"word": "list"}
    reading, writing = os.pipe()
    try:
        with pytest.raises(RefusedError, match="no whole line within 2 s"):
            read_line(reading, boottime_s())
        os.close(writing)
        assert read_line(reading, boottime_s() + 5.0) is None
    finally:
        os.close(reading)
