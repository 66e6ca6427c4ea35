"""snmpsim as a card that becomes another one: `show` puts a walk in its place, in mid-test as well.

It tells walks apart by community in versions 1 and 2c, by the context's name in version 3. Cards have no contexts: the
walk without a name (its file is called "self") is what version 3 sees, and a file beside it is the community's.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powerguard.ups.profiles.vocabulary import parts
from powerguard.ups.snmp.engine import MessageError, answered, hello
from tests.peers import require
from tests.peers.ports import free_port

COMMUNITY, AUTH, PRIV = "public-of-the-tests", "authpass-of-the-tests", "privpass-of-the-tests"
USERS: Final[Mapping[str, tuple[str, ...]]] = {
    "nobody": (),
    "md5": ("MD5",),
    "sha": ("SHA",),
    "sha512": ("SHA-512",),
    "des": ("MD5", "DES"),
    "aes": ("SHA", "AES"),
    "aes192": ("SHA-224", "AES-192"),
    "aes256": ("SHA-256", "AES-256"),
    "lengthened": ("SHA", "AES-256"),
    "strongest": ("SHA-512", "AES-256"),
}
"""Users of version 3: their protocols, as our settings name them. With SHA the key of AES-256 has to be lengthened."""

Records = Mapping[str, tuple[str, str]]
"""A walk: for each OID the tag, behind a colon the module of snmpsim that makes the value up, and the value."""
_START_LIMIT_S: Final = 60.0
_LIFE_S: Final = 3600
"""It ends by itself after that, should whoever started it be killed."""


@dataclass(slots=True)
class Snmpsim:
    """A running snmpsim, on a port of 127.0.0.1."""

    port: int
    data: Path
    changed_s: int

    def show(self, walk: str) -> None:
        """Answer with this walk, in the form of snmprec, from the next request on."""
        # It reads a walk anew when its time of change, in whole seconds, is another one and not before its index's.
        self.changed_s = max(self.changed_s, int(time.time())) + 1
        for name in (COMMUNITY, "self"):
            new = self.data / f"{name}.new"
            new.write_text(walk, encoding="ascii")
            os.utime(new, (self.changed_s, self.changed_s))
            new.rename(self.data / f"{name}.snmprec")


def read_records(path: Path) -> dict[str, tuple[str, str]]:
    """Read a walk, with the tags that our own reader does not keep."""
    records = {}
    for line in path.read_text(encoding="latin-1").split("\n"):
        if "|" in line and not line.startswith("#"):
            oid, tag, value = line.rstrip("\r").split("|", 2)
            # snmpsim strips lines, and takes what is not Latin for its own.
            is_plain = value.isascii() and value.isprintable() and value == value.strip()
            hexed = tag == "4" and not is_plain
            records[oid.strip().removeprefix(".")] = ("4x", value.encode("latin-1").hex()) if hexed else (tag, value)
    return records


def written(records: Records) -> str:
    """Return the walk as snmpsim wants it: in order."""
    return "".join(f"{oid}|{'|'.join(records[oid])}\n" for oid in sorted(records, key=parts))


def _options(port: int, data: Path) -> Iterator[str]:
    """Tell one engine; in a file, for passphrases do not belong into arguments."""
    yield f"--v3-engine-id=80001f88{secrets.token_hex(8)}"
    for name, protocols in USERS.items():
        yield f"--v3-user={name}"
        for kind, secret, protocol in zip(("auth", "priv"), (AUTH, PRIV), protocols, strict=False):
            yield f"--v3-{kind}-key={secret}"
            yield f"--v3-{kind}-proto={protocol.replace('-', '')}"
    yield f"--agent-udpv4-endpoint=127.0.0.1:{port}"
    yield f"--data-dir={data}"
    yield f"--timeout={_LIFE_S}"


def _answers(port: int) -> bool:
    """Whether an engine answers there; that needs neither user nor community."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.2)
        asking.connect(("127.0.0.1", port))
        try:
            asking.send(hello(3, 1))
            return answered(asking.recv(65535)) == (3, 1)
        except (OSError, MessageError):
            return False


@contextmanager
def snmpsim() -> Iterator[Snmpsim]:
    """Run it until the block ends; it shows nothing yet. Ends the process and removes its folder."""
    program = require("snmpsim-command-responder")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg-snmpsim-"))
    try:
        (folder / "data").mkdir()
        port, log = free_port(), folder / "log"
        peer = Snmpsim(port, folder / "data", 0)
        peer.show("1.3.6.1.2.1.1.1.0|4|no card yet\n")
        (folder / "options").write_text("\n".join(_options(port, peer.data)), encoding="ascii")
        argv = [
            *(program, "--log-level=error", f"--logging-method=file:{log}", f"--cache-dir={folder / 'cache'}"),
            f"--args-from-file={folder / 'options'}",
        ]
        with _running(argv, folder) as child:
            _wait(child, port, folder)
            yield peer
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(argv: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    # It would keep its folder in the home, and as root be somebody else; its Python may lie where nobody else may look.
    environment = {**os.environ, "HOME": str(folder), "SNMPSIM_ALLOW_ROOT": "true"}
    with (
        (folder / "said").open("wb") as said,
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def _wait(child: "subprocess.Popen[bytes]", port: int, folder: Path) -> None:
    until_s = time.monotonic() + _START_LIMIT_S
    while not _answers(port):
        is_late = time.monotonic() > until_s
        if child.poll() is not None or is_late:
            said = [path.read_text(errors="replace") for path in (folder / "said", folder / "log") if path.exists()]
            msg = f"snmpsim {'does not answer' if is_late else f'has ended: {child.returncode}'}: {''.join(said)}"
            raise AssertionError(msg)
        time.sleep(0.02)
