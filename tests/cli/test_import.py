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

from powerguard.cli.imports.nut import FILES
from powerguard.cli.imports.words import MAX_BYTES, MAX_WORDS, apcupsd_words, nut_sections, nut_words, shell_words
from powerguard.cli.main import main
from powerguard.options import Secret
from powerguard.settings.load import load
from tests.golden import Golden
from tests.peers import require
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
        told: dict[str, list[int]] = {}
        for one in self.object["warnings"]:
            line = one["where"].rpartition(":")[2]
            told.setdefault(one["name"], []).append(int(line) if line.isdecimal() else 0)
        return told


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
            "unknown_directive": [15],
            "hostsync": [0],
            "finaldelay": [14],
            "deadtime": [13],
            "upsmon_pollfreq": [11],
            "powerdownflag": [0],
            "offdelay": [2],
            "no_exec": [6],
            "timer": [4],
            "timer_never": [5],
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
        {"odd_line": [4, 11], "odd_monitor": [2, 3], "minsupplies": [5], "deadtime": [7], "no_notifycmd": [10]},
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
        {"odd_line": [9, 11, 2], "snmp_forgeable": [10], "killpower_snmp": [7]},
    ),
    "apcupsd-usb": (
        {
            "mode": "dry-run",
            "ups": {"desk-ups": {"sources": [{"kind": "apcupsd", "host": "127.0.0.1"}]}},
            "budget": {"reserve_s": 70, "blind_s": 300},
        },
        {
            "netserver_off": [16],
            "minutes": [11],
            "batterylevel": [10],
            "timeout": [12],
            "killdelay": [15],
            "sleep": [20],
            "returncharge": [19],
            "polltime": [0],
            "script_shuts_down": [0],
            "script_sleeps": [0],
            "script_suppresses": [0],
            "script_not_run": [0],
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
        {"snmp_forgeable": [5], "snmp_blind": [4], "killpower_snmp": [4], "polltime": [6], "nisip": [11]},
    ),
    "apcupsd-slave": (
        {
            "mode": "dry-run",
            "ups": {"ups": {"sources": [{"kind": "apcupsd", "host": "master.example"}]}},
            "budget": {"reserve_s": 190, "blind_s": 120},
        },
        {"net_slave": [4], "timeout": [8], "polltime": [5], "nisip": [0]},
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
    told = imported(program(name), folder / name, "--secrets-in", kept, "--json").object
    assert (ended.code, ended.out) == (0, told["yaml"])
    path = folder / "powerguard.yaml"
    path.write_text(ended.out, encoding="utf-8")
    loaded = load(path)
    assert loaded.mode == "dry-run"
    assert list(loaded.ups) == list(told["settings"]["ups"])
    for secret in told["secrets"]:
        assert secret["file"].startswith(f"{kept}/")
        Path(secret["file"]).touch(mode=0o400)
        Path(secret["file"]).chmod(0o600)
        Path(secret["file"]).write_text("kept\n", encoding="ascii")
    found = [value for ups in loaded.ups.values() for source in ups.sources for _, value in source]
    assert {secret.read() for secret in found if isinstance(secret, Secret)} <= {b"kept"}
    named = {Path(str(secret.file)).name for secret in found if isinstance(secret, Secret)}
    assert named == {secret["name"] for secret in told["secrets"]}


@pytest.mark.parametrize("name", MADE)
def test_no_secret_is_ever_told(name: str, fixture: Copy) -> None:
    """Neither to people nor to programs, and whatever is wrong with the line that it stands in."""
    of = fixture(name)
    planted = {found for file in of.glob("*.*") for found in SECRETS.findall(file.read_text(encoding="utf-8"))}
    planted |= {"example-room", "example-b"} if name in ("nut-secondary", "nut-served") else set()
    for how in ((), ("--json",), ("--secrets-in", "/etc/pg")):
        ended = imported(program(name), of, *how)
        assert [secret for secret in planted if secret in ended.out + ended.err] == []
    assert planted or name in ("apcupsd-usb", "apcupsd-slave")


def test_what_people_are_told(fixture: Copy, golden: Golden) -> None:
    """What, where, what would be right; and for each secret the file to make, closed to others."""
    of = fixture("nut-lab-snmp")
    ended = imported("nut", of)
    for level, line in (("warning", 14), ("secret", 2), ("note", 9)):
        assert re.search(rf"^{level}: .*{re.escape(str(of))}/upsmon.conf:{line}: ", ended.err, re.MULTILINE), level
    golden("import", ended.err, varies={of: "FOLDER"})
    golden("import", ended.out, "settings", varies={of: "FOLDER"})


def test_an_example_in_the_reference_is_true(fixture: Copy) -> None:
    """Whoever programs against docs/reference/import.json gets it, but for the folder."""
    of = fixture("nut-debian")
    told = imported("nut", of, "--json").out.replace(str(of), "/etc/nut")
    assert json.loads(told) == json.loads((REFERENCE / "import.json").read_text(encoding="utf-8"))


def test_times_are_held_against_the_checkpoint(fixture: Copy, golden: Golden) -> None:
    """A checkpoint of 10 s fits into HOSTSYNC 15, one of 10 minutes into nothing."""
    of = fixture("nut-debian")
    assert "hostsync" not in imported("nut", of, "--checkpoint", "10", "--json").warned
    ended = imported("nut", of, "--checkpoint", "10m")
    assert "600 s" in ended.err
    golden("import", ended.err, varies={of: "FOLDER"})
    apcupsd = fixture("apcupsd-snmp")
    assert "minutes" not in imported("apcupsd", apcupsd, "--json").warned
    assert imported("apcupsd", apcupsd, "--checkpoint", "10m", "--json").warned["minutes"] == [7]


def test_an_apcupsd_that_asks_us_already(fixture: Copy) -> None:
    """Its SHUTTING DOWN is then no order to be off; the settings say so."""
    of = fixture("apcupsd-usb")
    (of / "doshutdown").unlink()
    (of / "doshutdown").symlink_to(Path(__file__).parents[2] / "config" / "apcupsd" / "powerguard-event")
    ended = imported("apcupsd", of, "--json")
    assert ended.object["settings"]["ups"]["desk-ups"]["sources"][0]["leaves_shutdown"] is True
    assert "script_suppresses" not in ended.warned


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


def test_the_poll_interval_is_that_of_the_file(fixture: Copy) -> None:
    """Of the UPS, else of all, else NUT's default."""
    of = fixture("nut-debian")
    text = (of / "ups.conf").read_text(encoding="utf-8")
    for before, after, told in (
        ("", "", "2 s"),
        ("pollinterval = 7\n", "", "7 s"),
        ("", "pollinterval = 5\n", "5 s"),
    ):
        (of / "ups.conf").write_text(f"{before}{text}\n{after}", encoding="utf-8")
        assert re.search(rf"pollinterval \({told}\b", imported("nut", of).err)


def test_only_the_program_is_required() -> None:
    assert re.match(r"powerguard import: .*: program\n", imported().err)


def test_files_that_everybody_can_read(fixture: Copy) -> None:
    """They hold passwords: told, with the mode that would be right."""
    of = fixture("nut-lab-snmp")
    for file in of.glob("*"):
        file.chmod(0o644)
    ended = imported("nut", of, "--json")
    open_files = [one["where"] for one in ended.object["warnings"] if one["name"] == "open_file"]
    assert open_files == [f"{of}/{name}" for name in ("upsmon.conf", "upsd.users", "ups.conf")]
    apcupsd = fixture("apcupsd-snmp")
    (apcupsd / "apcupsd.conf").chmod(0o644)
    assert imported("apcupsd", apcupsd, "--json").warned["open_file"] == [0]


def test_passwords_and_roles_that_do_not_agree(fixture: Copy) -> None:
    """upsmon.conf and upsd.users are held against each other, and neither password is told."""
    of = fixture("nut-lab-snmp")
    (of / "upsd.users").write_text(
        "[primary]\npassword = example-other-password\nupsmon secondary\n[x]\nactions = SET\n"
    )
    ended = imported("nut", of, "--json")
    assert ended.warned["password_differs"] == [2, 3]
    assert ended.warned["no_password"] == [4]
    assert "example-other" not in ended.out
    (of / "upsd.users").write_text("[primary]\npassword = example-primary-password\nupsmon secondary\n")
    assert imported("nut", of, "--json").warned["not_primary"] == [2, 3]
    (of / "upsd.users").write_text("[secondary]\npassword = example-primary-password\n")
    assert imported("nut", of, "--json").warned["unknown_user"] == [2, 3]


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


async def test_a_file_that_only_root_may_read_is_told(folder: Path) -> None:
    """One file that is closed to us is left out, and the rest is read."""
    shutil.copytree(FIXTURES / "nut-two-feeds", folder / "of", copy_function=shutil.copyfile)
    os.chmod(folder, 0o755)  # noqa: PTH101 - beside the others
    (folder / "of" / "upsd.users").symlink_to("upsd.users")  # nobody can read that, root included
    ended = imported("nut", folder / "of", "--json")
    assert ended.code == 0
    (folder / "of" / "upsd.users").unlink()
    (folder / "of" / "upsd.users").mkdir()
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
    assert {":1: ", ":2: ", ":3: ", ":4: "} <= set(re.findall(r":\d: ", ended.err))
    golden("import", ended.err, "apcupsd")
    (folder / "upsmon.conf").write_bytes(b"\0\xff" * 50)
    assert imported("nut", folder).code == 65


@pytest.mark.parametrize(
    "words", [["nut", "--checkpoint", "soon"], ["nut", "--secrets-in", "here"], ["windows"], [], ["nut", *"x" * 40]]
)
def test_wrong_options(words: list[str]) -> None:
    assert imported(*words).code == 64


def test_power_values_that_say_that_nothing_is_fed(folder: Path) -> None:
    line = "MONITOR a@h 0 u p secondary\nMINSUPPLIES 0\n"
    (folder / "upsmon.conf").write_text(line, encoding="ascii")
    ended = imported("nut", folder, "--json")
    assert ended.code == 0
    assert {"nothing_feeds", "minsupplies_0", "no_shutdowncmd"} <= set(ended.warned)


def test_several_of_one_name(folder: Path) -> None:
    """Two upsds with a UPS of the same name, one of them twice; names that settings do not take are made to fit."""
    lines = ["MONITOR UPS@a 1 u p secondary", "MONITOR ups@b 1 u p secondary", "MONITOR ups@b:3493 1 u p secondary"]
    lines += [f"MONITOR {'x' * 60}@c 1 u q secondary", "MONITOR ok@[fe80::1%2] 1 u q master"]
    (folder / "upsmon.conf").write_text("\n".join(lines), encoding="ascii")
    ended = imported("nut", folder, "--json")
    assert list(ended.object["settings"]["ups"]) == ["ups", "ups-2", "x" * 28]
    assert (ended.warned["monitored_twice"], ended.warned["odd_monitor"]) == ([3], [5])


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


def test_words_of_nut(golden: Golden) -> None:
    """Each rule of parseconf.c: comments within words, =, quotes, escapes, lines that go on, and the last line."""
    read = nut_words(f"{NUT_TEXT}\xe9", "f")
    assert [(line.number, *line.words) for line in read.lines] == [
        (2, "one", "two", "three"),
        (3, "key", "=", "value", "key", "=", "value", "key", "=", "value"),
        (4, "quoted words", "plain space", "back\\slash", 'in "quotes"', "a#b", ""),
        (5, "joined", "here", "and there"),
        (8, "overlines", "end"),
        (10, "non-ascii", "caf"),
    ]
    assert [odd.where for odd in read.oddities] == ["f:4", "f:8", "f:10"]
    golden("import", "\n".join(odd.what for odd in read.oddities))


def test_words_of_nut_have_limits() -> None:
    """As in NUT: 32 words, 512 characters; a last line of one word without a newline is no line."""
    read = nut_words("w " * 40 + "\n" + "x" * 600 + " y\nalone", "f")
    assert [len(line.words) for line in read.lines] == [MAX_WORDS, 2]
    assert len(read.lines[1].words[0]) == 512
    assert [odd.where for odd in read.oddities] == ["f:1", "f:2"]


def test_words_of_apcupsd() -> None:
    """Keys in any case, text with spaces, comments after text, and a long line that becomes two."""
    read = apcupsd_words(f"  upsname My UPS # mine\n#X\n\nDEVICE\nStatfile {'a' * 300}\n", "f")
    assert [(line.number, *line.words) for line in read.lines] == [
        (1, "UPSNAME", "My UPS"),
        (4, "DEVICE", ""),
        (5, "STATFILE", "a" * 246),
        (5, "A" * 54, ""),
    ]
    assert [odd.where for odd in read.oddities] == ["f:5"]


def test_words_of_a_shell() -> None:
    text = "MODE=none # off\nexport UPSD_OPTIONS='-D #1'\n  X=\"y\" z\n=1\nnot an assignment\n"
    assert [line.words for line in shell_words(text, "f").lines] == [
        ("MODE", "none"),
        ("UPSD_OPTIONS", "-D #1"),
        ("X", "y"),
    ]


PASSWORDS: Final = (
    r'"two words"',
    r'"hash#within"',
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
    """The password that we read in upsd.users is the one that upsd wants, however it is quoted; no other is.

    Whether a bare # is one of a quoted word depends on the version, and so it is told.
    """
    text = "".join(f"[u{n}]\n\tpassword = {written}\n\tupsmon secondary\n" for n, written in enumerate(PASSWORDS))
    (folder / "upsd.users").write_text(text, encoding="ascii")
    (folder / "upsd.users").chmod(0o600)
    words = nut_words(text, "f")
    _, users, _ = nut_sections(words.lines, frozenset(("upsmon",)))
    (odd,) = words.oddities
    async with upsd(folder) as port:
        for name, user in users.items():
            assert user.place("password") == odd.where or await logs_in(port, name, user.text("password")), name
            assert not await logs_in(port, name, user.text("password") + "x")


LINES: Final = (
    ("BOGUS 1", True),
    ("MINUTES soon", True),
    ("MINUTES", False),
    ("MINUTES 3x", False),
    ("minutes +4   # in any case", False),
    ("NETSERVER maybe", True),
    ("NETSERVER", True),
    ("NETSTATUS off", False),
    ("UPSTYPE netsnmp", True),
    ("UPSCLASS netslave", True),
    ("UPSCLASS shareslave and more", False),
    ("NOLOGON never", True),
    ("UPSNAME my ups", False),
    (f"STATFILE {'a' * 300}", True),
    (f"STATFILE {'a' * 200}", False),
    ("MASTER x", True),
    ("SERVERPORT 3552", False),
    ("WAKEUP x", True),
)


async def apcupsd_refuses(folder: Path, line: str) -> bool:
    """Let apcupsd itself read a file with this line; say whether it ends over it."""
    folder.mkdir()  # noqa: ASYNC240 - in memory
    own = "".join(f"{key} {folder}\n" for key in ("LOCKFILE", "SCRIPTDIR", "PWRFAILDIR", "NOLOGINDIR"))
    events = folder / "events"
    usual = f"UPSCABLE ether\nUPSTYPE net\nDEVICE 127.0.0.1:1\nNETSERVER off\nEVENTSFILE {events}\n"
    (folder / "c.conf").write_text(f"## apcupsd.conf v1.1 ##\n{own}{usual}{line}\n", encoding="ascii")
    argv = (require("apcupsd"), "-b", "-f", str(folder / "c.conf"), "-P", str(folder / "pid"))
    quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
    child = await asyncio.create_subprocess_exec(*argv, **quiet)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60.0):
            while child.returncode is None and not (  # noqa: ASYNC110 - apcupsd tells nobody that it is up
                events.exists() and "startup succeeded" in events.read_text(encoding="ascii")
            ):
                await asyncio.sleep(0.03)
    finally:
        refused = child.returncode is not None
        if not refused:
            child.kill()
        await child.wait()
    return refused


@pytest.mark.peer("apcupsd")
async def test_apcupsd_ends_over_the_same_lines(folder: Path) -> None:
    """What we say that apcupsd ends over is what the real one ends over, and nothing else."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(apcupsd_refuses(folder / str(n), line)) for n, (line, _) in enumerate(LINES)]
    assert [(line, task.result()) for (line, _), task in zip(LINES, asked, strict=True)] == list(LINES)
    for line, refused in LINES:
        (folder / "apcupsd.conf").write_text(f"UPSTYPE net\nDEVICE h:1\n{line}\n", encoding="ascii")
        ended = imported("apcupsd", folder, "--json")
        told = {"unknown_directive", "no_number", "odd_value"} & set(ended.warned)
        assert bool(told) is refused, (line, told)


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
    told = imported("nut", tmp_path, "--json").object["settings"]["ups"]["desk"]
    assert told["runtime_table"] == {"50": 1020, "100": 240}
