"""`powerguard install` and `uninstall` on an image: everything once, nobody else's file, and nothing left behind.

What systemd makes of it is shown in a container (tests/e2e/test_systemd_install.py).
"""

import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.install import host
from powerguard.cli.install.disk import MANIFEST, Disk, PlaceError
from powerguard.cli.install.pieces import (
    ALWAYS,
    AT_BOOT,
    CREDENTIALS,
    PARTS,
    SENTINEL_AT_BOOT,
    SETTINGS,
    TRAINERS_MOUNT,
    pieces,
    resume_pieces,
)
from powerguard.cli.install.report import Report
from powerguard.cli.install.verb import runs_older_code
from powerguard.cli.main import main
from powerguard.clock import boot_id
from powerguard.effectors.child import Ended
from powerguard.sentinel.decide import Intent
from powerguard.sentinel.store import NAME, UNREAD, Clocks, IntentFile, IntentTable
from tests.golden import Golden

ROOT = Path(__file__).parents[2]
UNITS = "etc/systemd/system"


def tree(root: Path) -> dict[str, str | bytes]:
    """Everything below a folder: files with their bytes, links with their targets."""
    made: dict[str, str | bytes] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        made[name] = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return made


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "image"
    (made / "usr/bin").mkdir(parents=True)
    (made / "usr/bin/python3").touch()
    (made / "opt/powerguard/bin").mkdir(parents=True)
    (made / "opt/powerguard/bin/powerguard").touch()
    (made / "opt/powerguard/pyvenv.cfg").touch()
    return made


@pytest.fixture
def run(image: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def say(*words: str, verb: str = "install") -> tuple[int, dict[str, Any]]:
        code = main([verb, "--json", "--root", str(image), *words])
        return code, json.loads(capsys.readouterr().out)

    return say


def did(answer: Mapping[str, Any], path: str) -> str:
    return next(row["did"] for row in answer["files"] if row["path"] == f"/{path}")


def test_everything_has_its_place_and_the_second_run_changes_nothing(image: Path, run: Run) -> None:
    """Every file that the project keeps for systemd lies somewhere, as it is; programs can be run."""
    code, result = run("--with", "ipmi", "--with", "gpu", "--with", "signals")
    assert (code, result["is_done"]) == (0, True)
    laid = {value for value in tree(image).values() if isinstance(value, bytes)}
    assert [path.name for path in (ROOT / "systemd").iterdir() if path.read_bytes() not in laid] == []
    for program in ("usr/lib/powerguard/powerguard-off", "usr/lib/systemd/system-shutdown/powerguard"):
        assert (image / program).stat().st_mode & 0o7777 == 0o755
    assert (image / UNITS / "powerguard.service").stat().st_mode & 0o7777 == 0o644
    before = {path: path.lstat().st_ino for path in image.rglob("*") if path.name != Path(MANIFEST).name}
    code, result = run()
    assert {row["did"] for row in result["files"]} == {"unchanged"}
    assert {path: path.lstat().st_ino for path in before} == before
    assert result["steps"] == [], "nothing is started in an image"


def test_units_are_enabled_as_systemctl_would(image: Path, run: Run) -> None:
    """What is asked for, and the daemon once there are settings; moved away for a moment, they do not take it out."""
    assert run()[1]["next"] != []
    wants = image / UNITS
    assert {path.name for path in wants.glob("*.wants/*")} == set(ALWAYS)
    assert not (image / AT_BOOT[1:]).is_symlink()
    (image / SETTINGS[1:]).parent.mkdir()
    (image / SETTINGS[1:]).write_text("mode: dry-run\n", encoding="utf-8")
    for part in PARTS:
        assert run("--with", part)[0] == 0
    (image / SETTINGS[1:]).unlink()
    assert run()[0] == 0
    links = {path.name: path.readlink() for path in wants.glob("*.wants/*")}
    enabled = {*ALWAYS, "powerguard.service", *(unit for part in PARTS.values() for unit in part)}
    assert set(links) == enabled
    assert all(str(target) == f"/{UNITS}/{name}" for name, target in links.items())
    assert (wants / "sysinit.target.wants/powerguard-disarm.service").is_symlink()
    assert (image / "usr/local/bin/powerguard").readlink() == Path("/opt/powerguard/bin/powerguard")


def test_the_system_of_an_image_that_has_run_makes_the_user_at_its_next_boot(image: Path, run: Run) -> None:
    """systemd-sysusers.service has ConditionNeedsUpdate=/etc: it runs only if /usr is newer than /etc/.updated."""
    for folder in ("etc", "usr/lib", "usr/share", "usr/local"):
        (image / folder).mkdir()
    (image / "etc/.updated").touch()
    updated_s = (image / "etc/.updated").stat().st_mtime - 3600
    for path in ("etc/.updated", "usr"):
        os.utime(image / path, (updated_s, updated_s))
    run("--dry-run")
    assert (image / "usr").stat().st_mtime == updated_s
    run()
    assert (image / "usr").stat().st_mtime > updated_s


def test_a_dry_run_writes_nothing(image: Path, run: Run) -> None:
    before = tree(image)
    code, result = run("--dry-run")
    assert (code, did(result, f"{UNITS}/powerguard.service")) == (0, "would be written")
    assert tree(image) == before
    run()
    before = tree(image)
    code, result = run("--dry-run", verb="uninstall")
    assert (code, did(result, f"{UNITS}/powerguard.service")) == (0, "would be removed")
    assert tree(image) == before


@pytest.mark.parametrize("theirs", ["file", "mask"])
def test_what_is_not_ours_is_refused_before_anything_is_written(image: Path, run: Run, theirs: str) -> None:
    unit = image / UNITS / "powerguard-off.service"
    unit.parent.mkdir(parents=True)
    if theirs == "file":
        unit.write_text("[Service]\nExecStart=/bin/true\n", encoding="ascii")
    else:
        unit.symlink_to("/dev/null")
    before = tree(image)
    code, result = run()
    assert code == 1
    assert did(result, f"{UNITS}/powerguard-off.service").startswith(
        "refused: is masked" if theirs == "mask" else "refused"
    )
    assert tree(image) == before
    assert {each["did"] for each in result["files"] if not each["did"].startswith("refused")} == {"not done"}
    assert run("--force")[0] == 0
    assert "powerguard-off" in unit.read_text(encoding="utf-8")
    assert not unit.is_symlink()


def test_what_was_laid_by_hand_is_taken_over_with_its_mode(image: Path, run: Run) -> None:
    """As the guide had it before this verb: the same bytes are ours from now on, and uninstall removes them."""
    program = image / "usr/lib/powerguard/powerguard-off"
    program.parent.mkdir(parents=True)
    program.write_bytes((ROOT / "systemd/powerguard-off").read_bytes())
    program.chmod(0o644)
    code, result = run()
    assert (code, did(result, "usr/lib/powerguard/powerguard-off")) == (0, "owner and mode set")
    assert program.stat().st_mode & 0o111
    run(verb="uninstall")
    assert not program.exists()


@pytest.mark.root
def test_what_another_user_owns_is_taken_over_with_its_owner(image: Path, run: Run) -> None:
    """A copy from a user's checkout: its owner could change what root runs."""
    run()
    helper = image / "usr/lib/powerguard/powerguard-helper"
    os.chown(helper, 65534, 65534)
    assert did(run()[1], "usr/lib/powerguard/powerguard-helper") == "owner and mode set"
    assert helper.stat().st_uid == 0


def test_an_update_replaces_what_it_has_written_and_refuses_what_was_changed_since(
    image: Path, run: Run, golden: Golden
) -> None:
    run("--prefix", "/opt/older")
    unit = image / UNITS / "powerguard.service"
    assert b"ExecStart=/opt/older/bin/powerguard run" in unit.read_bytes()
    assert did(run()[1], f"{UNITS}/powerguard.service") == "updated"
    assert b"/opt/older" not in b"".join(value for value in tree(image).values() if isinstance(value, bytes))
    unit.write_bytes(unit.read_bytes() + b"Nice=5\n")
    code, result = run()
    assert code == 1
    golden("install", did(result, f"{UNITS}/powerguard.service"))
    assert b"Nice=5" in unit.read_bytes()


def test_a_unit_that_somebody_has_disabled_stays_so(image: Path, run: Run, golden: Golden) -> None:
    run()
    link = image / UNITS / "sockets.target.wants/powerguard-off.socket"
    link.unlink()
    code, result = run()
    assert (code, link.is_symlink()) == (0, False)
    golden("install", did(result, f"{UNITS}/sockets.target.wants/powerguard-off.socket"))
    run("--force")
    assert link.is_symlink()


def test_what_trains_is_named_once_and_stays(image: Path, run: Run) -> None:
    """The daemon may start it, and is stopped after it; a later word replaces the first, and none changes nothing."""
    assert run("--resume-unit", "old.service", "--resume-unit", "train.service")[1]["doubts"] == []
    code, result = run("--resume-unit", "train.service", "--resume-unit", "eval@1.service")
    assert (code, [doubt.split()[0] for doubt in result["doubts"]]) == (0, ["old.service"]), "it does not go unnoticed"
    wants = image / UNITS / "powerguard-resume.target.d/50-resume-units.conf"
    assert wants.read_text(encoding="ascii").splitlines()[-1] == "Wants=train.service eval@1.service"
    before = image / UNITS / "powerguard.service.d/50-resume-units.conf"
    assert before.read_text(encoding="ascii").splitlines()[-1] == "Before=train.service eval@1.service"
    result = run()[1]
    assert result["doubts"] == []
    assert did(result, f"{UNITS}/powerguard-resume.target.d/50-resume-units.conf") == "unchanged"
    wants.unlink()
    assert run()[0] == 0, "somebody took it away: it is not ours any more"
    assert not wants.exists()
    for wrong in ("train", "../x.service", "a b.service", "x.service\n[Service]"):
        with pytest.raises(SystemExit, match="64"):
            run("--resume-unit", wrong)


@pytest.mark.parametrize("done", [0, 1, 7, 20])
@pytest.mark.parametrize("update", [False, True], ids=["fresh", "update"])
def test_a_run_that_is_killed_is_completed_by_the_next(image: Path, run: Run, *, done: int, update: bool) -> None:
    """Killed after so many pieces, with a half-written one beside: in the manifest stands what is ours either way."""
    empty = tree(image)
    if update:
        run("--prefix", "/opt/older")
    disk = Disk(image)
    disk.load()
    wanted = [*pieces(image, "/opt/powerguard", ["ipmi"], with_daemon=False), *resume_pieces(("train.service",))]
    disk.begin(wanted)
    for piece in wanted[:done]:
        disk.put(piece)
    (half := image / UNITS / ".powerguard.service.powerguard-new").parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"[Un")
    if done == 7:
        assert run(verb="uninstall")[0] == 0
        assert tree(image) == empty, "also taken away at once"
    code, result = run("--with", "ipmi", "--resume-unit", "train.service")
    assert (code, result["is_done"]) == (0, True)
    whole = tree(image)
    assert {row["did"] for row in run()[1]["files"]} == {"unchanged"}
    assert (image / UNITS / "sysinit.target.wants/powerguard-disarm.service").is_symlink()
    assert not half.exists()
    assert tree(image) == whole


def child(program: str, image: Path, verb: str) -> subprocess.CompletedProcess[str]:
    """Run a verb on the image in a process of its own, after this program."""
    command = f"import os, resource, sys\n{program}\nfrom powerguard.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", command, verb, "--json", "--root", str(image)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("removed", [12, 45, 90])
@pytest.mark.parametrize("after", ["uninstall", "install"])
def test_an_uninstall_that_is_killed_is_completed_or_undone(image: Path, run: Run, removed: int, after: str) -> None:
    """An install afterwards enables all units again: no person has disabled any."""
    (image / SETTINGS[1:]).parent.mkdir(parents=True)
    (image / SETTINGS[1:]).write_text("mode: dry-run\n", encoding="utf-8")
    empty = tree(image)
    assert run()[0] == 0
    whole = tree(image)
    kill = f"""
left = {removed}
def hook(event, _arguments):
    global left
    left -= event in ("os.remove", "os.rmdir") and "uninstall" in sys.argv
    left > 0 or os._exit(137)
sys.addaudithook(hook)
"""
    assert child(kill, image, "uninstall").returncode == 137
    assert tree(image) != whole
    assert run(verb=after)[0] == 0
    now = tree(image)
    if after == "install":
        assert whole.pop(MANIFEST[1:])
        assert now.pop(MANIFEST[1:])
    assert now == (whole if after == "install" else empty)


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_a_full_disk_is_named_and_keeps_nothing_in_place(image: Path, run: Run, verb: str) -> None:
    empty = tree(image)
    if verb == "uninstall":
        assert run()[0] == 0
    ended = child("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))", image, verb)
    if verb == "install":
        assert ended.returncode == 1, ended.stderr
        assert "installed.json" in json.loads(ended.stdout)["error"]
        assert run()[0] == 0
    else:
        assert (ended.returncode, tree(image)) == (0, empty), ended.stderr


def test_uninstall_leaves_nothing_and_keeps_what_is_the_operators(image: Path, run: Run, golden: Golden) -> None:
    empty = tree(image)
    secret = image / "etc/powerguard/secrets/bmc"
    journal = image / "var/lib/powerguard/journal.sqlite"
    for kept in (secret, journal, image / SETTINGS[1:]):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("theirs", encoding="ascii")
    kept_tree = tree(image)
    run("--with", "gpu", "--resume-unit", "train.service")
    code, result = run(verb="uninstall")
    assert (code, did(result, "etc/powerguard")) == (0, "kept")
    assert tree(image) == kept_tree
    assert set(empty) < set(kept_tree)
    code, result = run(verb="uninstall")
    assert code == 1
    golden("uninstall", result["error"], varies={image: "IMAGE"})


def test_uninstall_proposes_to_remove_only_a_virtual_environment(image: Path, run: Run) -> None:
    """Where pip put powerguard among the system's own programs, the folder is /usr."""
    (image / "usr/bin/powerguard").touch()
    run("--prefix", "/usr")
    _, result = run(verb="uninstall")
    assert not [line for line in result["next"] if "rm -r" in line]
    inside = f"chroot {image} "
    assert any(line.startswith(f"{inside}/usr/bin/python -m pip uninstall powerguard") for line in result["next"])
    run()
    _, result = run(verb="uninstall")
    then = f"{inside}rm -r /opt/powerguard and {inside}userdel powerguard, to remove the rest"
    assert result["next"] == [then], "on this system it would remove the powerguard that runs here"


HOOKED = "/usr/lib/powerguard/nut/powerguard-shutdown /sbin/shutdown -h +0"


@pytest.mark.parametrize("folder", ["nut", "ups"])
def test_uninstall_leaves_upsmon_a_command_that_shuts_down(image: Path, run: Run, folder: str, golden: Golden) -> None:
    """A SHUTDOWNCMD whose script is gone shuts nothing down, which shows only when the battery is empty."""
    conf = image / "etc" / folder / "upsmon.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f'SHUTDOWNCMD "/sbin/shutdown -h +0"\nSHUTDOWNCMD \\\n  "{HOOKED}"\n', encoding="ascii")
    run()
    before = tree(image)
    code, result = run(verb="uninstall")
    assert (code, tree(image)) == (1, before)
    golden("uninstall", result["error"], varies={image: "IMAGE"})
    conf.write_text(f'# SHUTDOWNCMD "{HOOKED}"\nSHUTDOWNCMD "/sbin/shutdown -h +0"\n', encoding="ascii")
    assert run(verb="uninstall")[0] == 0
    run()
    conf.write_text(f'SHUTDOWNCMD "{HOOKED}"\n', encoding="ascii")
    code, result = run("--force", verb="uninstall")
    assert (code, len(result["doubts"])) == (0, 1)


@pytest.mark.parametrize("parts", [(), ("--with", "slurm")])
def test_uninstall_says_how_to_give_a_slurm_node_back(run: Run, parts: tuple[str, ...]) -> None:
    """The daemon owes it, and is gone."""
    run(*parts)
    _, result = run(verb="uninstall")
    assert any("scontrol update NodeName=NAME State=RESUME" in line for line in result["next"]) == bool(parts)


@pytest.mark.parametrize("name", [NAME, UNREAD])
def test_uninstall_leaves_a_sentinel_for_which_hosts_wait(image: Path, run: Run, name: str) -> None:
    """They are off, and no other program will power them on; also where the sentinel could not read their intents."""
    run()
    store = IntentFile(image / "var/lib/powerguard-sentinel")
    store.path.parent.mkdir(parents=True)
    now = Clocks(boot_id="of-before", boottime_s=500.0, wall_s=time.time())
    intent = Intent(host="n1", outage="o", boot_id="b", feeds=("a",), stored_s=400.0, not_before_s=450.0, expires_s=9e4)
    store.save(IntentTable().put(intent).put(replace(intent, host="n2", expires_s=499.0)), now)
    store.path.rename(store.path.with_name(name))
    before = tree(image)
    code, result = run(verb="uninstall")
    error = (
        "the sentinel here is still to power on n1: without it, they stay off: wait until they are on, or use --force"
    )
    assert (code, result["error"], tree(image)) == (1, error, before)
    code, result = run("--force", verb="uninstall")
    assert (code, len(result["doubts"]), did(result, "var/lib/powerguard-sentinel")) == (0, 1, "kept")


def test_uninstall_leaves_what_was_changed_and_what_lies_beside(image: Path, run: Run, golden: Golden) -> None:
    run()
    unit, beside = image / UNITS / "powerguard.service", image / UNITS / "powerguard.service.d/override.conf"
    unit.write_text("[Service]\n", encoding="ascii")
    beside.parent.mkdir()
    beside.write_text("[Service]\n", encoding="ascii")
    (image / UNITS / "powerguard-off.socket").unlink()
    code, result = run(verb="uninstall")
    assert code == 0
    golden("uninstall", did(result, f"{UNITS}/powerguard.service"))
    files = {name for name, value in tree(image).items() if isinstance(value, bytes) and value}
    assert files == {f"{UNITS}/powerguard.service", f"{UNITS}/powerguard.service.d/override.conf"}


WHOLE = {"prefix": "", "parts": [], "choices": [], "folders": [], "is_whole": True}
FOREIGN = [{path: []} for path in ("/home/me/thesis", "/etc/../home/me/thesis", "etc/passwd", "/etc//passwd")]


@pytest.mark.parametrize(
    "manifest", ["", "[]", *(json.dumps({**WHOLE, "files": files}) for files in (7, ["/etc/passwd"], *FOREIGN))]
)
def test_a_manifest_that_we_would_not_have_written_removes_nothing(
    image: Path, run: Run, manifest: str, golden: Golden
) -> None:
    run()
    (image / MANIFEST[1:]).write_text(manifest, encoding="utf-8")
    before = tree(image)
    for verb in ("install", "uninstall"):
        code, result = run(verb=verb)
        assert code == 1
        assert result["error"].startswith(f"{image}{MANIFEST}: ")
        if not manifest:
            golden(verb, result["error"], varies={image: "IMAGE"})
    assert tree(image) == before


def test_links_that_lead_out_of_the_image_are_not_followed(image: Path, run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (image / "etc").mkdir()
    (image / "etc/systemd").symlink_to(outside)
    code, result = run()
    assert code == 1
    assert "leads out of" in result["error"]
    assert tree(outside) == {}


def test_a_second_one_at_the_same_time_is_kept_out(image: Path, run: Run) -> None:
    run()
    descriptor = os.open((image / MANIFEST[1:]).parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code, result = run("--resume-unit", "train.service")
    finally:
        os.close(descriptor)
    assert code == 1
    assert "is running" in result["error"]


def test_one_that_ended_meanwhile_is_not_forgotten(image: Path, run: Run) -> None:
    """Its record must not be replaced by one made before: uninstall would leave its files behind."""
    late = Disk(image)
    assert not late.load()
    run("--with", "gpu")
    with pytest.raises(PlaceError, match="run this again"), late.alone():
        late.begin(pieces(image, "/opt/powerguard", [], with_daemon=False))
    run(verb="uninstall")
    assert not [name for name, value in tree(image / "etc").items() if value != "folder"]


def test_a_prefix_is_taken_as_a_shell_completes_it(image: Path, run: Run) -> None:
    assert run("--prefix", "/opt/powerguard/")[0] == 0
    assert "=/opt/powerguard/bin/powerguard run" in (image / UNITS / "powerguard.service").read_text(encoding="utf-8")


def test_where_units_cannot_look_or_others_can_write_is_no_place_for_the_program(run: Run, tmp_path: Path) -> None:
    for prefix, why in (
        ("/home/me/.venv", "ProtectHome"),
        ("/opt/my venv", "plain letters"),
        ("/opt/../x", "plain letters"),
    ):
        code, result = run("--prefix", prefix)
        assert code == 1
        assert why in result["error"]
    assert "is not there" in host.wrong_prefix(f"/opt{tmp_path}", live=True)


@pytest.mark.root
def test_a_python_where_units_cannot_look_is_none_for_them(tmp_path: Path) -> None:
    """uv keeps the Pythons that it downloads in its user's home: root's helpers would fail, each when it is asked."""
    assert f"{tmp_path}".startswith("/tmp/")
    (tmp_path / "python").touch()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as prefix:
        (Path(prefix) / "bin").mkdir()
        (Path(prefix) / "bin/powerguard").touch()
        (Path(prefix) / "bin/python").symlink_to(tmp_path / "python")
        assert host.wrong_prefix(prefix, live=True).startswith(f"{tmp_path}/python: units cannot see this Python")


@pytest.mark.root
def test_what_others_can_write_is_named(tmp_path: Path, golden: Golden) -> None:
    """Whoever can write what a unit runs as root is root: the file itself, or any folder above it."""
    assert host.not_roots(Path("/usr/bin/env")) == ""
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert host.not_roots(program) == ""
    program.parent.chmod(0o775)
    golden("install", host.not_roots(program), "a folder", varies={tmp_path: "FOLDER"})
    program.parent.chmod(0o755)
    os.chown(program, 65534, 65534)
    golden("install", host.not_roots(program), "a file", varies={tmp_path: "FOLDER"})
    assert "No such file" in host.not_roots(tmp_path / "gone")


@pytest.mark.root
def test_what_only_root_can_read_is_named() -> None:
    """With root's umask at 027, as on hardened hosts, pip writes files that the daemon's user cannot read."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as prefix:
        venv = Path(prefix)
        package, program = venv / "lib/site-packages/powerguard", venv / "bin/powerguard"
        for folder in (package, program.parent):
            folder.mkdir(parents=True)
        program.touch(mode=0o755)
        venv.chmod(0o755)
        assert host.roots_alone([program, package], prefix) == ""
        program.chmod(0o750)
        named = f"{program}: only root can read it, but the daemon runs as user powerguard (chmod -R go+rX {prefix})"
        assert host.roots_alone([program, package], prefix) == named
        os.chown(program, 0, 65534)
        assert host.roots_alone([program, package], prefix) == "", "its group may be the daemon's"
        package.parent.chmod(0o750)
        assert host.roots_alone([program, package], prefix).startswith(f"{package.parent}: only root can read it")


def test_a_host_whose_python_is_its_own_uses_that_for_the_boot_unit(image: Path, run: Run) -> None:
    (image / "usr/bin/python3").unlink()
    run("--with", "ipmi")
    unit = (image / UNITS / "powerguard-disarm.service").read_text(encoding="utf-8")
    started = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert [line.split()[::3] for line in started] == [
        ["/opt/powerguard/bin/python", "/usr/lib/powerguard/powerguard-disarm"]
    ]


def test_no_test_changes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("install", "uninstall"):
        assert main([verb]) == 1
        assert "refused under test" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_the_objects_are_those_of_the_reference(run: Run, verb: str) -> None:
    run()
    result = run(verb=verb)[1]
    example = json.loads((ROOT / f"docs/reference/{verb}.json").read_text(encoding="utf-8"))
    assert list(result) == list(example)
    assert list(result["files"][0]) == list(example["files"][0])
    assert list(example["steps"][0]) == ["command", "what", "did"]


def test_people_read_a_line_for_each_thing(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--root", str(image)]) == 0
    said = capsys.readouterr().out
    assert "written  /usr/lib/powerguard/powerguard-off " in said
    assert "next: write /etc/powerguard/powerguard.yaml" in said


def test_a_sentinel_is_started_by_a_person_who_gets_the_command(image: Path, run: Run, golden: Golden) -> None:
    """Laid on every host, enabled on none; where it has settings and does not start at boot, that is said."""

    def sentinel() -> list[str]:
        return [line for line in run()[1]["next"] if "sentinel" in line]

    assert sentinel() == []
    sample = (image / "usr/share/powerguard/sentinel.yaml").read_bytes()
    assert sample == (ROOT / "config/sentinel.yaml").read_bytes()
    (image / "etc/powerguard").mkdir()
    (image / "etc/powerguard/sentinel.yaml").write_bytes(sample)
    (result,) = sentinel()
    golden("install", result)
    link = image / SENTINEL_AT_BOOT[1:]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(f"/{UNITS}/powerguard-sentinel.service")
    assert sentinel() == []


# --- What is asked of systemd ----------------------------------------------------------------------------------------

ACTIVE = """Id=slow.service
TimeoutStopUSec=5min
KillMode=control-group

Id=slurmd.service
TimeoutStopUSec=1min 30s
KillMode=process

Id=agent.service
TimeoutStopUSec=infinity
KillMode=process

Id=user@1000.service
TimeoutStopUSec=2min
KillMode=mixed

Id=job@7.service
TimeoutStopUSec=2min
KillMode=mixed

Id=job@8.service
TimeoutStopUSec=2min
KillMode=mixed

Id=systemd-journald.service
TimeoutStopUSec=2min
KillMode=control-group

Id=dbus.service
TimeoutStopUSec=2min
KillMode=process

Id=getty@tty1.service
TimeoutStopUSec=2min
KillMode=process

Id=powerguard-off.service
TimeoutStopUSec=infinity
KillMode=process
"""
CIRCLE = """var.mount: Found ordering cycle on remote-fs-pre.target/start
var.mount: Found dependency on powerguard.service/start
var.mount: Found dependency on var.mount/start
"""


class Systemd:
    """Answers as the programs would; what it was asked is kept."""

    def __init__(self, answers: Mapping[str, Ended]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(
        self, argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        words = " ".join(argv)
        self.asked.append(words)
        found = [answer for begins, answer in self.answers.items() if words.startswith(begins)]
        if not found:
            raise FileNotFoundError(2, "No such file or directory")
        return found[0]


def says(text: str, code: int = 0, errors: str = "") -> Ended:
    return Ended(returncode=code, stdout=text.encode(), stderr=errors.encode())


async def test_drop_ins_are_offered_for_units_that_are_slow_or_leave_processes_behind() -> None:
    """For those of the site: systemd's own and the bus are left alone."""
    result = says('Environment=LC_ALL=C "POWERGUARD_OFF_KILL=slurmd.service containerd.service"\n')
    systemd = Systemd({"systemctl show --type": says(ACTIVE), "systemctl show powerguard-off": result})
    offered = {offer.piece.path: offer.piece.content.decode() for offer in await host.offers(systemd, 110)}
    assert list(offered) == [
        f"/{UNITS}/slow.service.d/50-powerguard-stop.conf",
        f"/{UNITS}/agent.service.d/50-powerguard-stop.conf",
        f"/{UNITS}/job@.service.d/50-powerguard-stop.conf",
        f"/{UNITS}/powerguard-off.service.d/50-powerguard-kill.conf",
    ]
    assert "\nTimeoutStopSec=55\n" in offered[f"/{UNITS}/slow.service.d/50-powerguard-stop.conf"]
    kill = 'Environment="POWERGUARD_OFF_KILL=slurmd.service containerd.service agent.service"'
    assert kill in offered[f"/{UNITS}/powerguard-off.service.d/50-powerguard-kill.conf"]
    assert await host.offers(Systemd({}), 110) == [], "a systemd that cannot be asked is offered nothing"


async def test_what_would_start_at_boot_anyway_or_closes_a_circle_is_reported(golden: Golden) -> None:
    systemd = Systemd(
        {
            "systemctl show train": says("LoadState=loaded\nWantedBy=powerguard-resume.target multi-user.target\n"),
            "systemctl show gone": says("LoadState=not-found\nWantedBy=\n"),
            "systemctl show good": says("LoadState=loaded\nWantedBy=powerguard-resume.target\nRequiredBy=\n"),
            "systemd-analyze verify": says("", 1, CIRCLE),
        }
    )
    result = await host.doubts(systemd, ["train.service", "gone.service", "good.service"])
    assert len(result) == 3
    golden("install", "\n".join(result))
    assert "gone.service: not-found" in result[1]
    assert "remote-fs-pre.target powerguard.service var.mount" in result[2]


async def test_a_step_that_fails_is_reported_and_the_others_are_taken(golden: Golden) -> None:
    systemd = Systemd({"systemd-sysusers": says("", 1, "Failed\nno room\n"), "systemctl": says("")})
    summary = Report("install", Path("/nowhere"), dry_run=False)
    await host.carry_out(systemd, host.steps(["gpu"], with_daemon=True), summary)
    assert summary.failed
    became = {command: did for command, _, did in summary.steps}
    assert "no room" in became["systemd-sysusers powerguard.conf"]
    assert os.strerror(errno.ENOENT) in became["systemd-tmpfiles --create powerguard.conf"]
    golden("install", "\n".join(f"{command}: {did}" for command, did in became.items()))
    listen = "systemctl start powerguard-off.socket powerguard-gpu.socket powerguard-gpu-watch.path"
    assert list(became)[-2:] == [listen, "systemctl start powerguard.service"]
    order = [
        "systemctl daemon-reload",
        f"systemctl start {TRAINERS_MOUNT}",
        "systemd-tmpfiles --create powerguard.conf",
    ]
    assert list(became)[1:4] == order, "mounted before its mode and group are set"


async def test_a_host_that_cannot_mount_is_installed_all_the_same() -> None:
    """In some containers nothing can be mounted: trainers' sockets then lie in /run; that is no failure."""
    answers = {"systemd": says(""), "udevadm": says(""), "systemctl start run": says("", 1), "systemctl": says("")}
    summary = Report("install", Path("/nowhere"), dry_run=False)
    await host.carry_out(Systemd(answers), host.steps([], with_daemon=True), summary)
    became = {command: did for command, _, did in summary.steps}
    assert became[f"systemctl start {TRAINERS_MOUNT}"].startswith("failed")
    assert not summary.failed


@pytest.mark.parametrize(("module", "fails"), [("ipmi_si", False), ("ipmi_devintf", True)])
async def test_a_bmc_with_another_interface_fails_no_install(module: str, *, fails: bool) -> None:
    """ipmi_si does not load without a KCS, SMIC or BT interface, and a BMC behind SSIF has none of them."""
    refused = says("", 1, f"modprobe: ERROR: could not insert '{module}': No such device\n")
    answers = {"systemd": says(""), "udevadm": says(""), f"modprobe {module}": refused, "modprobe": says("")}
    summary = Report("install", Path("/nowhere"), dry_run=False)
    await host.carry_out(Systemd({**answers, "systemctl": says("")}), host.steps(["ipmi"], with_daemon=False), summary)
    assert [command for command, _, did in summary.steps if did.startswith("failed")] == [f"modprobe {module}"]
    assert summary.failed is fails


@pytest.mark.parametrize(
    ("state", "order", "goes"),
    [
        ("active", f"{boot_id()}\n", True),
        ("activating", f"{boot_id()}\n", True),
        ("active", None, True),
        ("active", "-" * 36 + "\n", False),
        ("active", "none".ljust(37), False),
        ("inactive", f"{boot_id()}\n", False),
        ("", None, False),
    ],
)
async def test_nothing_is_taken_away_from_a_power_off_that_is_under_way(
    state: str, order: str | None, *, goes: bool, tmp_path: Path
) -> None:
    """The helper also runs for 30 s after a question of the daemon or of doctor: that is no power-off."""
    if order is not None:
        (tmp_path / "off").write_text(order, encoding="ascii")
    systemd = Systemd({"systemctl show powerguard-off.service": says(f"ActiveState={state}\n" if state else "")})
    assert await host.is_powering_off(systemd, tmp_path / "off") is goes


def test_an_update_of_the_package_asks_for_a_restart(tmp_path: Path) -> None:
    """`pip install` changes no unit, so that the time alone tells that the daemon runs the code of before."""
    package = tmp_path / "__init__.py"
    package.touch()
    os.utime(package, (1000.0, 1000.0))
    assert runs_older_code({"at": 1100.0, "daemon": {"uptime_s": 300.0}}, package)
    assert not runs_older_code({"at": 1100.0, "daemon": {"uptime_s": 30.0}}, package)


@pytest.mark.parametrize(
    ("state", "since_s", "older"),
    [("active", 600.0, True), ("active", 60.0, False), ("failed", 600.0, False), ("", 600.0, False)],
)
async def test_an_update_of_the_package_asks_for_a_restart_of_the_sentinel(
    state: str, since_s: float, *, older: bool
) -> None:
    """Its IPMI children would be of the new version, and it of the old one."""
    started_us = (time.clock_gettime(time.CLOCK_MONOTONIC) - since_s) * 1e6
    text = f"ActiveState={state}\nExecMainStartTimestampMonotonic={started_us:.0f}\n" if state else ""
    systemd = Systemd({"systemctl show powerguard-sentinel.service": says(text)})
    assert await host.is_older_sentinel(systemd, time.time() - 300.0) is older


def test_a_bmc_is_known_by_its_traces(tmp_path: Path) -> None:
    assert not host.has_bmc(tmp_path)
    (tmp_path / "sys/firmware/dmi/entries/38-0").mkdir(parents=True)
    assert host.has_bmc(tmp_path)


# --- Secrets --------------------------------------------------------------------------------------------------------

NAMING = """\
mode: rehearse
ups:
  a:
    sources:
      - {kind: snmp, host: 10.0.0.5, version: 3, user: pg, auth: {credential: snmp-auth}, priv: {credential: snmp-priv}}
bmc: {kind: ipmi-lan, host: 10.0.8.21, user: pg, password: {credential: bmc}}
"""
SECRET_TEXT = "correct horse\nbattery staple"


def secret(image: Path, *words: str, given: bytes = b"") -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "powerguard", "secret", *words, "--json", "--root", str(image)]
    ended = subprocess.run(argv, input=given, capture_output=True, check=False, cwd=ROOT)
    assert SECRET_TEXT.encode() not in ended.stdout + ended.stderr
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}


CTRL_D = "\x04"


def typed(*words: str, lines: Sequence[str]) -> str:
    """Run it on a terminal of its own, and type a line at each prompt; returns what the terminal shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-m", "powerguard", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
    )
    os.close(theirs)
    shown, left = "", list(lines)
    with contextlib.suppress(OSError):  # EIO: it has ended
        while part := os.read(ours, 4096):
            shown += part.decode()
            if left and shown.endswith(("not shown): ", "again: ")):
                line = left.pop(0)
                os.write(ours, line.encode() if line == CTRL_D else f"{line}\n".encode())
    os.close(ours)
    assert (process.wait(timeout=60), left) == (0, [])
    return shown


def write_settings(image: Path, text: str) -> None:
    (image / SETTINGS[1:]).parent.mkdir(parents=True, exist_ok=True)
    (image / SETTINGS[1:]).write_text(text, encoding="utf-8")


def test_the_daemon_is_handed_the_secrets_that_its_settings_name(image: Path, run: Run) -> None:
    """One that is missing keeps nothing from starting; one that another unit file passes is left to that."""
    write_settings(image, NAMING)
    theirs = image / UNITS / "powerguard.service.d/site.conf"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("[Service]\nLoadCredentialEncrypted=bmc:/etc/powerguard/secrets/bmc.cred\n", encoding="utf-8")
    code, result = run()
    assert code == 0
    drop_in = image / CREDENTIALS[1:]
    assert drop_in.read_text(encoding="utf-8").splitlines()[1:] == [
        "[Service]",
        "LoadCredential=snmp-auth:/etc/powerguard/secrets/snmp-auth",
        "SetCredential=snmp-auth:\\n",
        "LoadCredential=snmp-priv:/etc/powerguard/secrets/snmp-priv",
        "SetCredential=snmp-priv:\\n",
    ]
    missing = [line for line in result["next"] if "secret set" in line]
    assert [line.split(":")[0] for line in missing] == [
        f"powerguard secret set snmp-auth --root {image}",
        f"powerguard secret set snmp-priv --root {image}",
    ], "without the option they would be secrets of the system on which the image is made"
    sealed = theirs.rename(theirs.with_name("unused"))
    assert did(run()[1], CREDENTIALS[1:]) == "updated"
    assert "LoadCredential=bmc:" in drop_in.read_text(encoding="utf-8")
    sealed.rename(theirs.with_name("10-sealed.conf"))
    run()
    assert "LoadCredential=bmc:" not in drop_in.read_text(encoding="utf-8"), "systemd reads ours last: it would win"
    theirs.with_name("10-sealed.conf").unlink()

    write_settings(image, NAMING.replace("rehearse", "rehears"))
    code, result = run()
    assert did(result, CREDENTIALS[1:]) == "unchanged", "settings that are wrong for a moment take no secret away"
    assert any("powerguard.yaml:1:7: mode" in doubt for doubt in result["doubts"])
    write_settings(image, "mode: dry-run\nups: {a: {sources: [{kind: nut, host: 127.0.0.1, name: a}]}}\n")
    run()
    assert not drop_in.exists()


def test_a_secret_is_put_in_place_whole_and_shown_to_nobody(image: Path, run: Run, golden: Golden) -> None:
    """Read from stdin; its file is root's alone. What is no secret is refused, and the one before stands."""
    write_settings(image, NAMING)
    code, result = secret(image, "list")
    assert (code, {each["name"]: each["stands"] for each in result["secrets"]}) == (
        1,
        {"snmp-auth": "missing", "snmp-priv": "missing", "bmc": "missing"},
    )
    code, result = secret(image, "set", "bmc", given=SECRET_TEXT.encode())
    path = image / "etc/powerguard/secrets/bmc"
    assert (code, result["path"]) == (0, str(path))
    golden("secret", "\n".join(result["next"]), varies={image: "IMAGE"})
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (SECRET_TEXT.encode(), 0o400)
    assert path.parent.stat().st_mode & 0o7777 == 0o700
    for wrong, why in ((b"\n", "empty"), (b"x" * 16385, "larger than 16384")):
        code, result = secret(image, "set", "bmc", given=wrong)
        assert (code, why in result["error"], path.read_bytes()) == (64, True, SECRET_TEXT.encode())
    run()
    _, result = secret(image, "set", "bmc", given=b"another")
    assert result["next"][0].startswith("systemctl restart powerguard.service")
    golden("secret", secret(image, "set", "bmv", given=b"another")[1]["next"][0], "not named")
    theirs = image / UNITS / "powerguard.service.d/site.conf"
    for line, is_used in (
        ("LoadCredential=bmc:/etc/powerguard/secrets/bmc", True),
        ("LoadCredentialEncrypted=bmc:/etc/powerguard/secrets/bmc.cred", False),
    ):
        theirs.write_text(f"[Service]\n{line}\n", encoding="utf-8")
        (then,) = secret(image, "set", "bmc", given=b"another")[1]["next"]
        assert then.startswith("systemctl restart powerguard.service") is is_used
    assert then.startswith("/etc/systemd/system/powerguard.service.d/site.conf gives the daemon another secret")
    theirs.unlink()
    _, result = secret(image, "list")
    assert {each["name"]: each["stands"] for each in result["secrets"]}["bmc"] == "set"
    path.write_bytes(b"\n")
    _, result = secret(image, "list")
    assert {each["name"]: each["stands"] for each in result["secrets"]}["bmc"] == "missing", "as the daemon reads it"
    assert secret(image, "set", "../bmc", given=b"x")[0] == 64
    write_settings(image, NAMING.replace("rehearse", "rehears"))
    code, result = secret(image, "list")
    assert (code, f"{image}/etc/powerguard/powerguard.yaml:1:7: mode: must be" in result["error"]) == (1, True)
    assert secret(image, "set", "bmc", given=b"another")[0] == 0, "wrong settings refuse no secret"


def test_a_person_who_gives_no_answer_is_asked_for_the_next(image: Path) -> None:
    """Ctrl-D at one secret leaves out that one alone: the others, and the steps after them, follow."""
    write_settings(image, NAMING)
    result = typed("install", "--root", str(image), lines=[CTRL_D, "two-2", CTRL_D, "three-3", "three-3"])
    assert [path.name for path in (image / "etc/powerguard/secrets").iterdir()] == ["bmc"]
    said = " ".join(result.split())
    assert f"next: powerguard secret set snmp-auth --root {image}: no answer" in said
    assert f"next: powerguard secret set snmp-priv --root {image}: no answer" in said


def test_a_person_at_install_is_asked_for_what_is_missing(image: Path, golden: Golden) -> None:
    """Without echo, twice; two that differ are not written, and the rest is done all the same."""
    write_settings(image, NAMING)
    lines = ["one-1", "one-1", "two-2", "tow-2", "three-3", "three-3"]
    result = typed("install", "--root", str(image), lines=lines)
    folder = image / "etc/powerguard/secrets"
    assert {path.name: path.read_text(encoding="ascii") for path in folder.iterdir()} == {
        "snmp-auth": "one-1",
        "bmc": "three-3",
    }
    assert not [line for line in lines if line in result]
    (then,) = re.findall("next: powerguard secret set snmp-priv .*", " ".join(result.split()))
    golden("install", then, varies={image: "IMAGE"})
    result = typed("install", "--root", str(image), "--dry-run", lines=[])
    golden("install", result, "dry-run", varies={image: "IMAGE", "\r": ""})
    assert "powerguard-off.socket" not in result
