"""`powerguard import`: what it makes of NUT's and apcupsd's files, what it warns of, and that no secret ever shows."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerguard.cli.imports.apcupsd import apcupsd_words
from powerguard.cli.imports.draft import MAX_BYTES, source_at
from powerguard.cli.imports.nut import FILES, nut_sections, nut_words, shell_words
from powerguard.cli.imports.nut import folder as nut_folder
from powerguard.cli.install.pieces import HOOKS, LIBRARY
from powerguard.cli.main import main
from powerguard.options import Secret
from powerguard.settings.load import load
from tests.golden import Golden
from tests.peers import require
from tests.peers.machine import file_size_limit
from tests.peers.ports import free_port

FIXTURES: Final = Path(__file__).parent / "imports"
REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference"
SECRETS: Final = re.compile(r"example-[a-z-]+(?:[ #-]?(?:password|passphrase|community))")
"""Every secret of the fixtures, and nothing else in them."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def warned(self) -> dict[str, list[int]]:
        """Names of the warnings, each with its lines; 0 where it has none."""
        noted: dict[str, list[int]] = {}
        for one in self.object["warnings"]:
            line = one["where"].rpartition(":")[2]
            noted.setdefault(one["name"], []).append(int(line) if line.isdecimal() else 0)
        return noted


def imported(*words: object) -> Ended:
    """Run the verb in this process; an exit of argparse is a status as well."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["import", *map(str, words)])
        except SystemExit as left:
            code = int(left.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def folder() -> Iterator[Path]:
    made = tempfile.mkdtemp(dir="/tmp", prefix="pg ")
    yield Path(made)
    shutil.rmtree(made)


Copy = Callable[[str], Path]


@pytest.fixture
def fixture(folder: Path) -> Copy:
    """Copy a fixture, closed to others as such files should be, and return its folder."""

    def copy(name: str) -> Path:
        to = folder / name
        shutil.copytree(FIXTURES / name, to)
        for file in to.glob("*"):
            file.chmod(file.stat().st_mode & 0o770)
        return to

    return copy


# --- What is made of NUT's files --------------------------------------------------------------------------------------


def nut_source(host: str, name: str, user: str, secret: str = "upsd", **more: object) -> dict[str, Any]:
    return {"kind": "nut", "host": host, **more, "name": name, "user": user, "password": {"credential": secret}}


MADE: Final[dict[str, tuple[dict[str, Any], dict[str, list[int]]]]] = {
    "nut-debian": (
        {
            "mode": "dry-run",
            "ups": {"desk": {"sources": [nut_source("127.0.0.1", "desk", "upsmon")], "forced_shutdown_delay_s": 40}},
        },
        {"hostsync": [6], "pollfreq": [3]},
    ),
    "nut-lab-snmp": (
        {
            "mode": "dry-run",
            "ups": {
                "rack-a": {
                    "sources": [
                        {
                            "kind": "snmp",
                            "host": "10.20.0.5",
                            "version": 3,
                            "user": "nutmon",
                            "auth": {"credential": "snmp-auth"},
                            "auth_protocol": "SHA",
                            "priv": {"credential": "snmp-priv"},
                            "priv_protocol": "AES",
                        },
                        nut_source("127.0.0.1", "rack-a", "primary"),
                    ],
                    "forced_shutdown_delay_s": 85,
                },
                "printer": {
                    "sources": [
                        {
                            "kind": "snmp",
                            "host": "10.20.0.6",
                            "port": 1161,
                            "version": 1,
                            "community": {"credential": "snmp-community"},
                        },
                        nut_source("127.0.0.1", "printer", "primary"),
                    ],
                    "forced_shutdown_delay_s": 85,
                },
            },
            "feeds": {"supplies": ["rack-a"], "minimum_supplies": 1},
            "budget": {"low_battery_s": 300, "blind_s": 120},
        },
        {
            "snmp_forgeable": [16],
            "pollfreq": [3, 16],
            "killpower_snmp": [4, 17],
            "maxage": [3],
            "hostsync": [0],
            "finaldelay": [14],
            "deadtime": [13],
            "upsmon_pollfreq": [11],
            "powerdownflag": [0],
            "no_exec": [6],
            "timer": [4],
        },
    ),
    "nut-two-feeds": (
        {
            "mode": "dry-run",
            "ups": {
                "left": {"sources": [nut_source("10.30.0.9", "left", "gpu1") | {"tls": "required"}]},
                "right": {
                    "sources": [
                        nut_source("10.30.0.10", "right", "gpu1", "upsd-right", port=3494) | {"tls": "required"},
                    ]
                },
                "lamp": {
                    "sources": [
                        nut_source("10.30.0.10", "lamp", "gpu1", "upsd-right", port=3494) | {"tls": "required"},
                    ]
                },
            },
            "feeds": {"supplies": ["left", "left", "right", "right"], "minimum_supplies": 2},
        },
        {},
    ),
    "nut-secondary": (
        {
            "mode": "dry-run",
            "ups": {"room": {"sources": [nut_source("ups-host.example", "room", "observer")]}},
        },
        {"odd_monitor": [2, 3], "deadtime": [7], "no_notifycmd": [10]},
    ),
    "nut-served": (
        {
            "mode": "dry-run",
            "ups": {
                "a": {"sources": [{"kind": "nut", "host": "10.40.0.1", "port": 3500, "name": "a"}]},
                "b_side": {
                    "sources": [
                        {
                            "kind": "snmp",
                            "host": "auto",  # as NUT reads it: the section below is none
                            "version": "2c",
                            "community": {"credential": "snmp-community"},
                        },
                        {"kind": "nut", "host": "10.40.0.1", "port": 3500, "name": "B_Side"},
                    ]
                },
            },
            "feeds": {"supplies": ["a", "b_side"], "minimum_supplies": 1},
        },
        {"snmp_forgeable": [10], "killpower_snmp": [7], "feeds_presumed": [6]},
    ),
    "apcupsd-usb": (
        {
            "mode": "dry-run",
            "ups": {"desk-ups": {"sources": [{"kind": "apcupsd", "host": "127.0.0.1"}]}},
            "budget": {"reserve_s": 70, "blind_s": 300},
        },
        {
            "netserver_off": [16],
            "polltime": [0],
            "script_shuts_down": [0],
            "script_suppresses": [0],
        },
    ),
    "apcupsd-snmp": (
        {
            "mode": "dry-run",
            "ups": {
                "rack-b": {
                    "sources": [
                        {
                            "kind": "snmp",
                            "host": "10.50.0.5",
                            "version": 1,
                            "community": {"credential": "snmp-community"},
                        }
                    ]
                }
            },
            "budget": {"reserve_s": 490},
        },
        {"snmp_forgeable": [5], "killpower_snmp": [4]},
    ),
    "apcupsd-slave": (
        {
            "mode": "dry-run",
            "ups": {"ups": {"sources": [{"kind": "apcupsd", "host": "master.example"}]}},
            "budget": {"reserve_s": 190, "blind_s": 120},
        },
        {},
    ),
}


def program(name: str) -> str:
    return name.partition("-")[0]


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_configuration(name: str, fixture: Copy) -> None:
    """The settings, and each warning with the line that it is about: nothing missing and nothing more."""
    ended = imported(program(name), fixture(name), "--json")
    made, warned = MADE[name]
    assert (ended.code, ended.err, ended.object["problems"]) == (0, "", [])
    assert ended.object["settings"] == made
    assert ended.warned == warned
    assert all(one["right"] and one["what"] for one in ended.object["warnings"])


@pytest.mark.parametrize("name", MADE)
def test_the_yaml_is_the_settings(name: str, fixture: Copy, folder: Path) -> None:
    """It passes our own loader as it is printed, and every secret is found where it says that it is kept."""
    kept = folder / "secrets"
    kept.mkdir()
    ended = imported(program(name), fixture(name), "--secrets-in", kept)
    answer = imported(program(name), folder / name, "--secrets-in", kept, "--json").object
    assert (ended.code, ended.out) == (0, answer["yaml"])
    path = folder / "powerguard.yaml"
    path.write_text(ended.out, encoding="utf-8")
    loaded = load(path)
    assert loaded.mode == "dry-run"
    assert list(loaded.ups) == list(answer["settings"]["ups"])
    for secret in answer["secrets"]:
        assert secret["file"].startswith(f"{kept}/")
        Path(secret["file"]).touch(mode=0o400)
        Path(secret["file"]).chmod(0o600)
        Path(secret["file"]).write_text("kept\n", encoding="ascii")
    found = [value for ups in loaded.ups.values() for source in ups.sources for _, value in source]
    assert {secret.read() for secret in found if isinstance(secret, Secret)} <= {b"kept"}
    named = {Path(str(secret.file)).name for secret in found if isinstance(secret, Secret)}
    assert named == {secret["name"] for secret in answer["secrets"]}


@pytest.mark.parametrize("name", MADE)
def test_no_secret_is_ever_shown(name: str, fixture: Copy) -> None:
    """Neither to people nor to programs, and whatever is wrong with the line that it stands in."""
    of = fixture(name)
    planted = {found for file in of.glob("*.*") for found in SECRETS.findall(file.read_text(encoding="utf-8"))}
    planted |= {"example-room", "example-b"} if name in ("nut-secondary", "nut-served") else set()
    for how in ((), ("--json",), ("--secrets-in", "/etc/pg")):
        ended = imported(program(name), of, *how)
        assert [secret for secret in planted if secret in ended.out + ended.err] == []
    assert planted or name in ("apcupsd-usb", "apcupsd-slave")


def test_what_people_read(fixture: Copy, golden: Golden) -> None:
    """What, where, what would be right; and for each secret the file to make, closed to others."""
    of = fixture("nut-lab-snmp")
    ended = imported("nut", of)
    for level, place in (("warning", "upsd.conf:3"), ("secret", "upsmon.conf:2"), ("note", "upsmon.conf:5")):
        assert re.search(rf"^{level}: .*{re.escape(str(of))}/{place}: ", ended.err, re.MULTILINE), level
    golden("import", ended.err, varies={of: "FOLDER"})
    golden("import", ended.out, "settings", varies={of: "FOLDER"})


def test_an_example_in_the_reference_is_true(fixture: Copy) -> None:
    """Whoever programs against docs/reference/import.json gets it, but for the folder."""
    of = fixture("nut-debian")
    answer = imported("nut", of, "--json").out.replace(str(of), "/etc/nut")
    assert json.loads(answer) == json.loads((REFERENCE / "import.json").read_text(encoding="utf-8"))


def test_times_are_held_against_the_checkpoint(fixture: Copy, golden: Golden) -> None:
    """A checkpoint of 10 s fits into HOSTSYNC 15, one of 10 minutes into nothing."""
    of = fixture("nut-debian")
    assert "hostsync" not in imported("nut", of, "--checkpoint", "10", "--json").warned
    ended = imported("nut", of, "--checkpoint", "10m")
    assert "600 s" in ended.err
    golden("import", ended.err, varies={of: "FOLDER"})


def test_an_apcupsd_that_asks_us_already(fixture: Copy) -> None:
    """Its SHUTTING DOWN is then no order to be off; the settings say so."""
    of = fixture("apcupsd-usb")
    (of / "doshutdown").unlink()
    (of / "doshutdown").symlink_to(Path(__file__).parents[2] / "config" / "apcupsd" / "powerguard-event")
    ended = imported("apcupsd", of, "--json")
    assert ended.object["settings"]["ups"]["desk-ups"]["sources"][0]["leaves_shutdown"] is True
    assert "script_suppresses" not in ended.warned


def test_the_command_for_a_secret_is_one_for_a_shell(fixture: Copy) -> None:
    """A folder may have a space in its name."""
    answer = imported("apcupsd", fixture("apcupsd-snmp"), "--secrets-in", "/srv/my secrets").err
    assert "install -m 0400 -o powerguard /dev/stdin '/srv/my secrets/" in answer


def test_the_script_that_is_better_is_named_where_install_puts_it(fixture: Copy) -> None:
    """Only a checkout has a folder config."""
    found = imported("apcupsd", fixture("apcupsd-usb"), "--json").object
    listed = [one.get("right", one["what"]) for one in [*found["warnings"], *found["notes"]]]
    hooks = [text for text in listed if "powerguard-event" in text or "config/" in text]
    assert hooks
    assert all(f"{LIBRARY}/{HOOKS[0]}" in text for text in hooks)


def test_the_scripts_that_come_with_apcupsd_are_not_the_sites_own(fixture: Copy) -> None:
    """Debian's onbattery and its like send mail to root: six notes on them would hide the findings that matter."""
    of = fixture("apcupsd-usb")
    stock = "#!/bin/sh\n#\n# This shell script if placed in /etc/apcupsd\n# will be called by /etc/apcupsd/apccontrol\n"
    for name, text in (("changeme", stock), ("offbattery", "#!/bin/sh\n/usr/local/bin/page-oncall\n")):
        (of / name).write_text(text, encoding="utf-8")
        (of / name).chmod(0o755)
    notes = [one["where"] for one in imported("apcupsd", of, "--json").object["notes"] if one["name"] == "script"]
    assert str(of / "offbattery") in notes
    assert str(of / "changeme") not in notes


def test_the_scripts_of_a_copied_folder(fixture: Copy) -> None:
    """SCRIPTDIR names the folder that was copied: those of the copy are looked at, or it is told that none was."""
    of = fixture("apcupsd-usb")
    text = (of / "apcupsd.conf").read_text(encoding="utf-8")
    (of / "apcupsd.conf").write_text(f"{text}\nSCRIPTDIR /nowhere/apcupsd\n", encoding="utf-8")
    assert "script_shuts_down" in imported("apcupsd", of, "--json").warned
    alone = of / "alone"
    alone.mkdir()
    shutil.move(of / "apcupsd.conf", alone)
    ended = imported("apcupsd", alone, "--json")
    assert "script_shuts_down" not in ended.warned
    assert [one["where"].rpartition(":")[0] for one in ended.object["notes"] if one["name"] == "scripts_elsewhere"] == [
        str(alone / "apcupsd.conf")
    ]


def test_only_the_program_is_required() -> None:
    assert re.match(r"powerguard import: .*: program\n", imported().err)


# --- Files that are wrong ---------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(folder: Path, golden: Golden) -> None:
    """Told by name, with the reason; nothing hangs on a pipe, and nothing is read without end."""
    os.mkfifo(folder / "ups.conf")
    (folder / "upsmon.conf").symlink_to("/dev/zero")
    (folder / "nut.conf").mkdir()
    (folder / "upsd.conf").write_bytes(b"#" * (MAX_BYTES + 1))
    ended = imported("nut", folder)
    assert ended.code == 66
    for name, why in (("ups", "not a file"), ("upsmon", "not a file"), ("nut", "not a file"), ("upsd", "larger than")):
        assert re.search(rf"/{name}\.conf: is {why}", ended.err), name
    assert imported("nut", folder / "none").code == 66
    assert "No such file" in imported("apcupsd", folder / "none").err
    (folder / "empty").mkdir()
    (folder / "other.txt").touch()
    for program, name in (("nut", "empty"), ("apcupsd", "empty"), ("nut", "other.txt")):
        golden("import", imported(program, folder / name).err, f"{program} {name}")
    assert imported("nut", "a\0b").code == 66


@pytest.mark.root
@pytest.mark.parametrize("program", ["nut", "apcupsd"])
def test_a_folder_that_only_root_may_list(folder: Path, program: str) -> None:
    """Also of apcupsd it is not said to hold no settings."""
    imported(program, folder)  # the other user may not read the modules
    folder.chmod(0o700)
    os.seteuid(65534)
    try:
        ended = imported(program, folder)
    finally:
        os.seteuid(0)
    assert (ended.code, f"{folder}: cannot be read: Permission denied" in ended.err) == (66, True)


async def test_a_file_that_only_root_may_read_is_reported(folder: Path) -> None:
    """One file that is closed to us is left out, and the rest is read."""
    shutil.copytree(FIXTURES / "nut-two-feeds", folder / "of", copy_function=shutil.copyfile)
    os.chmod(folder, 0o755)  # noqa: PTH101 - beside the others
    (folder / "of" / "upsd.conf").symlink_to("upsd.conf")  # nobody can read that, root included
    ended = imported("nut", folder / "of", "--json")
    assert ended.code == 0
    (folder / "of" / "upsd.conf").unlink()
    (folder / "of" / "upsd.conf").mkdir()
    ended = imported("nut", folder / "of", "--json")
    assert (ended.code, ended.warned["unreadable"]) == (0, [0])


def test_nothing_to_be_made(folder: Path, golden: Golden) -> None:
    """Comments only, an UPSTYPE that is none: 65, what was looked for, and everything that was odd."""
    (folder / "upsmon.conf").write_text("# nothing\nMONITOR secret-in-the-wrong-place\n", encoding="ascii")
    ended = imported("nut", folder)
    assert (ended.code, ended.out) == (65, "")
    assert f"{folder}/upsmon.conf:2: MONITOR: " in ended.err
    assert "secret-in" not in ended.err
    golden("import", ended.err)
    (folder / "apcupsd.conf").write_text("UPSTYPE banana\nDEVICE x\n", encoding="ascii")
    assert imported("apcupsd", folder).code == 65
    (folder / "apcupsd.conf").write_text(
        "UPSTYPE snmp\nDEVICE :161:APC:secret-in\nX 1\nMINUTES soon\n", encoding="ascii"
    )
    ended = imported("apcupsd", folder, "--json")
    assert (ended.code, ended.object["object"]) == (65, "error")
    ended = imported("apcupsd", folder)
    assert ":2: " in ended.err
    golden("import", ended.err, "apcupsd")
    (folder / "upsmon.conf").write_bytes(b"\0\xff" * 50)
    assert imported("nut", folder).code == 65


@pytest.mark.parametrize(
    "words",
    [
        ["nut", "--checkpoint", "soon"],
        ["nut", "--secrets-in", "here"],
        ["nut", "--secrets-in", "/etc/powerguard/secrets/"],
        ["windows"],
        [],
        ["nut", *"x" * 40],
    ],
)
def test_wrong_options(words: list[str]) -> None:
    assert imported(*words).code == 64


def test_power_values_that_say_that_nothing_is_fed(folder: Path) -> None:
    line = "MONITOR a@h 0 u p secondary\nMINSUPPLIES 0\n"
    (folder / "upsmon.conf").write_text(line, encoding="ascii")
    ended = imported("nut", folder, "--json")
    assert ended.code == 0
    assert {"nothing_feeds", "minsupplies_0"} <= set(ended.warned)


def test_several_of_one_name(folder: Path) -> None:
    """Two upsds with a UPS of the same name, one of them twice; names that settings do not take are made to fit."""
    lines = ["MONITOR UPS@a 1 u p secondary", "MONITOR ups@b 1 u p secondary", "MONITOR ups@b:3493 1 u p secondary"]
    lines += [f"MONITOR {'x' * 60}@c 1 u q secondary", "MONITOR ok@[fe80::1%2] 1 u q master"]
    (folder / "upsmon.conf").write_text("\n".join(lines), encoding="ascii")
    ended = imported("nut", folder, "--json")
    assert list(ended.object["settings"]["ups"]) == ["ups", "ups-2", "x" * 28]
    assert ended.warned["odd_monitor"] == [5]


@pytest.mark.parametrize("place", ["etc/nut", "etc/ups", "usr/local/ups/etc"])
def test_the_folder_of_each_package_is_known(tmp_path: Path, place: str) -> None:
    """Debian's, that of Red Hat and SUSE, and that of NUT's own sources: for import, and for discover as well."""
    assert nut_folder(tmp_path) == tmp_path / "etc/nut"
    (tmp_path / place).mkdir(parents=True)
    assert nut_folder(tmp_path) == tmp_path / place


def test_several_apcupsds_do_not_say_which_of_them_feeds_this_host(folder: Path) -> None:
    """Two desk UPSes with their own hosts are no two feeds of this one: that must not go unsaid."""
    for name, port in (("a", 3551), ("b", 3552)):
        text = f"UPSNAME {name}\nUPSTYPE usb\nNISPORT {port}\nPOLLTIME 1\n"
        (folder / f"apcupsd.{name}.conf").write_text(text, encoding="ascii")
    ended = imported("apcupsd", folder, "--json")
    assert ended.object["settings"]["feeds"] == {"supplies": ["a", "b"], "minimum_supplies": 1}
    assert list(ended.warned) == ["feeds_presumed"]


@pytest.mark.parametrize("port", ["0", "0.5", "161.5", "65536", "9" * 30])
def test_what_is_no_port_is_not_rounded_to_one(port: str) -> None:
    assert source_at("snmp", "10.0.0.5", port, 161) is None
    assert source_at("snmp", "10.0.0.5", "1161", 161) == {"kind": "snmp", "host": "10.0.0.5", "port": 1161}


# --- Words, as the programs read them ---------------------------------------------------------------------------------

NUT_TEXT: Final = r"""# a comment
one two	three#four
 key=value  key = value key= value
"quoted words" plain\ space back\\slash "in \"quotes\"" "a#b" ""
joined \
here "and \
there"
"over
lines" end
non-ascii caf"""


def test_words_of_nut() -> None:
    """Each rule of parseconf.c: comments within words, =, quotes, escapes, lines that go on, and the last line."""
    assert [(line.number, *line.words) for line in nut_words(f"{NUT_TEXT}\xe9", "f")] == [
        (2, "one", "two", "three"),
        (3, "key", "=", "value", "key", "=", "value", "key", "=", "value"),
        (4, "quoted words", "plain space", "back\\slash", 'in "quotes"', "a#b", ""),
        (5, "joined", "here", "and there"),
        (8, "overlines", "end"),
        (10, "non-ascii", "caf"),
    ]


@pytest.mark.parametrize(("minutes", "reserve_s"), [("-1", None), ("0", None), ("+10", 490), ("10 # min", 490)])
def test_minutes_below_zero_are_never_reached(folder: Path, minutes: str, reserve_s: float | None) -> None:
    """As apcupsd reads it (`apcaccess` shows -1 Minutes): it was taken for its default of 5 minutes."""
    (folder / "apcupsd.conf").write_text(f"UPSTYPE usb\nMINUTES {minutes}\n", encoding="ascii")
    settings = imported("apcupsd", folder, "--json").object["settings"]
    assert settings.get("budget", {}).get("reserve_s") == reserve_s


def test_words_of_apcupsd() -> None:
    """Keys in any case, text with spaces, and comments after text."""
    read = apcupsd_words("  upsname My UPS # mine\n#X\n\nDEVICE\n", "f")
    assert [(line.number, *line.words) for line in read] == [(1, "UPSNAME", "My UPS"), (4, "DEVICE", "")]


def test_words_of_a_shell() -> None:
    text = "MODE=none # off\nexport UPSD_OPTIONS='-D #1'\n  X=\"y\" z\n=1\nnot an assignment\n"
    assert [line.words for line in shell_words(text, "f")] == [
        ("MODE", "none"),
        ("UPSD_OPTIONS", "-D #1"),
        ("X", "y"),
    ]


PASSWORDS: Final = (
    r'"two words"',
    r'"hash\#escaped"',
    r"cut#here",
    r"back\\slash",
    r"plain\ space",
    r'"say \"it\""',
    r'mid"quote',
)


@contextlib.asynccontextmanager
async def upsd(folder: Path) -> AsyncIterator[int]:
    """NUT's own server on the files in a folder."""
    (folder / "nut.conf").write_text("MODE=standalone\n", encoding="ascii")
    (folder / "ups.conf").write_text("[d]\ndriver = dummy-ups\nport = d.dev\n", encoding="ascii")
    port = free_port()
    (folder / "upsd.conf").write_text(f"LISTEN 127.0.0.1 {port}\n", encoding="ascii")
    names = ("NUT_CONFPATH", "NUT_STATEPATH", "NUT_ALTPIDPATH")
    child = await asyncio.create_subprocess_exec(
        *(require("upsd"), "-F", "-u", "root"),
        env={**os.environ, **dict.fromkeys(names, str(folder))},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def logs_in(port: int, user: str, password: str) -> bool:
    """Say whether upsd takes this password."""
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            await asyncio.sleep(0.05)
        quoted = re.sub(r'[\\"#]', r"\\\g<0>", password)  # upsd reads no bare # from the network, quoted or not
        for line in (f"USERNAME {user}", f'PASSWORD "{quoted}"', "LOGIN d"):
            writer.write(f"{line}\n".encode())
            answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return b"ACCESS-DENIED" not in answer


@pytest.mark.peer("upsd")
@pytest.mark.root
async def test_upsd_reads_the_same_words(folder: Path) -> None:
    """The password that we read in upsd.users is the one that upsd wants, however it is quoted; no other is."""
    text = "".join(f"[u{n}]\n\tpassword = {written}\n\tupsmon secondary\n" for n, written in enumerate(PASSWORDS))
    (folder / "upsd.users").write_text(text, encoding="ascii")
    (folder / "upsd.users").chmod(0o600)
    _, users = nut_sections(nut_words(text, "f"))
    assert len(users) == len(PASSWORDS)
    async with upsd(folder) as port:
        for name, user in users.items():
            assert await logs_in(port, name, user.text("password")), name
            assert not await logs_in(port, name, user.text("password") + "x")


# --- Whatever is in the files -----------------------------------------------------------------------------------------

NUT_PIECES: Final = (
    "MONITOR", "ups@host", "ups@[::1]:3493", "1", "user", "primary", "slave", "HOSTSYNC", "MINSUPPLIES", "NOTIFYFLAG",
    "ONBATT", "SYSLOG+EXEC", "NOTIFYCMD", "AT", "*", "START-TIMER", "CMDSCRIPT", "[ups]", "[", "driver", "snmp-ups",
    "=", "port", "10.0.0.1:161", "secLevel", "authPriv", "authProtocol", "SHA256", "community", "LISTEN", "MODE",
    "pollfreq", "99999999999", "-1", "1e9", '"', "\\", "#", "\n", "\t", "\0", "\xff", "'", "nan", "ignorelb",
    "override.battery.runtime.low", "x" * 600,
)  # fmt: skip
APC_PIECES: Final = (
    "UPSTYPE", "snmp", "net", "usb", "dumb", "pcnet", "DEVICE", "10.0.0.5:161:APC:c", "host:99999", "::", "MINUTES",
    "TIMEOUT", "3", "-7", "nan", "1e400", "UPSNAME", "a b", "SCRIPTDIR", "/", "\0", "NISIP", "0.0.0.0", "NISPORT", "#",
    "\n", "\xff", "KILLDELAY", "SLEEP", "RETURNCHARGE", "UPSCLASS", "x" * 300, "NETSERVER", "off", "POLLTIME",
)  # fmt: skip


def texts(pieces: tuple[str, ...]) -> st.SearchStrategy[str]:
    anything = st.text(st.characters(max_codepoint=255), max_size=80)
    shuffled = st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=4)), max_size=60).map(" ".join)
    return st.one_of(anything, shuffled, st.lists(st.sampled_from(pieces), max_size=40).map(" ".join))


def quiet(ended: Ended) -> None:
    """It ends with a status of its own, says why, and makes settings that hold or says that they do not."""
    assert ended.code in (0, 1, 65, 66)
    if ended.code in (0, 1):
        assert (ended.object["problems"] == []) is (ended.code == 0)
        assert ended.object["settings"]["mode"] == "dry-run"
    else:
        assert ended.object["object"] == "error"


@settings(max_examples=80, deadline=None)
@given(files=st.dictionaries(st.sampled_from(FILES), texts(NUT_PIECES), min_size=1))
def test_whatever_nut_files_hold(files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg ") as name:
        for file, text in files.items():
            (Path(name) / file).write_bytes(text.encode("latin-1", "replace"))
        quiet(imported("nut", name, "--json"))


@settings(max_examples=80, deadline=None)
@given(text=texts(APC_PIECES))
def test_whatever_an_apcupsd_conf_holds(text: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg ") as name:
        (Path(name) / "apcupsd.conf").write_bytes(text.encode("latin-1", "replace"))
        quiet(imported("apcupsd", name, "--json"))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_secret_shows_in_a_file_that_was_damaged(data: st.DataObject) -> None:
    """One word of each line is lost, or a quote is: whatever the rest then means, the secret is not told."""
    name = data.draw(st.sampled_from(["nut-debian", "nut-lab-snmp", "nut-two-feeds", "nut-secondary", "nut-served"]))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg ") as made:
        for file in (FIXTURES / name).glob("*"):
            lines = SECRETS.sub("SECRETWORD", file.read_text(encoding="utf-8")).splitlines()
            damaged = []
            for line in lines:
                words = line.split(" ")
                lost = data.draw(st.integers(0, 12))
                if lost < len(words) and "SECRET" not in words[lost]:
                    del words[lost]
                damaged.append(" ".join(words))
            (Path(made) / file.name).write_text("\n".join(damaged) + "\n", encoding="utf-8")
        for how in ((), ("--json",)):
            ended = imported("nut", made, *how)
            assert "SECRET" not in ended.out + ended.err


@pytest.mark.parametrize(
    "lines", ['desc = "CyberPower PR1500ELCD"', 'vendor = "CPS"\n  product = "PR1500ELCD"', 'product = "PR1500ELCD"']
)
def test_a_model_that_is_known_brings_its_table(tmp_path: Path, lines: str, golden: Golden) -> None:
    """ups.conf names the model, as nut-scanner writes it: the settings have its runtimes, and say where from."""
    (tmp_path / "ups.conf").write_text(f"[desk]\n  driver = usbhid-ups\n  port = auto\n  {lines}\n", encoding="ascii")
    (tmp_path / "upsmon.conf").write_text("MONITOR desk@localhost 1 mon x primary\n", encoding="ascii")
    (tmp_path / "upsmon.conf").chmod(0o600)
    ended = imported("nut", tmp_path)
    assert ended.code == 0
    golden("import", ended.out)
    path = tmp_path / "powerguard.yaml"
    path.write_text(ended.out, encoding="utf-8")
    ups = load(path).ups["desk"]
    assert (ups.runtime_table, ups.rating_w) == ({50.0: 1020.0, 100.0: 240.0}, 1350.0)
    assert "#runtime_table" not in ended.out
    answer = imported("nut", tmp_path, "--json").object["settings"]["ups"]["desk"]
    assert answer["runtime_table"] == {"50": 1020, "100": 240}


def test_it_needs_no_disk(fixture: Copy) -> None:
    """It changes nothing, so a disk that is full or read-only does not matter."""
    where = fixture("nut-debian")
    with file_size_limit(0):
        ended = imported("nut", where)
    assert ended == imported("nut", where)
    assert ended.code == 0
