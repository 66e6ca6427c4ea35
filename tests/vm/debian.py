"""A host of the tests: a whole Debian 12 on a disk, with powerguard installed on it as docs/guides/install.md says."""

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.peers import require
from tests.peers.nspawn import IMAGE, ROOT, bootstrapped, disk, keep
from tests.peers.nspawn import PACKAGES as SMALL
from tests.vm.guest import modules

HERE: Final = Path(__file__).parent
PACKAGES: Final = f"{SMALL},udev,kmod,python3-venv"
DISK_BYTES: Final = 900_000_000
"""Of which 400 MB are used; the rest is a hole in the file."""
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_UNITS: Final = "etc/systemd/system"
_NOT_HERE: Final = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "ldconfig.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-pcrphase.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-timesyncd.service",
)
"""What takes seconds on a processor that is interpreted, and has to do with nothing here."""


@contextmanager
def host(settings: str) -> Iterator[Path]:
    """Yield the disk of such a host. settings: the daemon's."""
    with disk(_bare()) as root, tempfile.TemporaryDirectory(prefix="pg-host-", dir="/tmp") as scratch:
        _install(root, Path(scratch), settings)
        made = Path(scratch) / "disk"
        with made.open("wb") as file:
            file.truncate(DISK_BYTES)
        _run(require("mkfs.ext4"), "-q", "-F", "-E", "lazy_itable_init=1", "-d", str(root), str(made))
        yield made


def _bare() -> Path:
    """Return the root of a Debian with all that powerguard needs, and without it: made once (two minutes, 330 MB)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"]
    recipe = hashlib.sha256("\n".join([PACKAGES, *needed]).encode()).hexdigest()[:8]
    place = IMAGE.with_name(f"host-{recipe}")
    if not place.exists():
        with bootstrapped(PACKAGES) as made:
            wheels = made / "wheels"
            _download(wheels, needed)
            _inside(made, "python3", "-m", "venv", "/opt/powerguard")
            _pip_inside(made, *needed)
            shutil.rmtree(wheels)
            shutil.copytree(modules(), made / "lib/modules", dirs_exist_ok=True)
            for version in modules().iterdir():
                _inside(made, "depmod", version.name)
            keep(made, place)
    return place


def _download(to: Path, needed: list[str]) -> None:
    """Get what Debian 12's Python can use, which need not be the present one the tests."""
    platforms = [f"--platform=manylinux{kind}_x86_64" for kind in ("2014", "_2_17", "_2_28")]
    kind = ["--python-version=3.11", "--implementation=cp", "--only-binary=:all:"]
    _run(sys.executable, "-m", "pip", "download", "--quiet", *kind, *platforms, f"--dest={to}", *needed)


def _install(root: Path, scratch: Path, settings: str) -> None:
    """Put this checkout's powerguard on that disk, and what the tests want of a host."""
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={root / 'wheels'}", ".")
    _pip_inside(root, "--no-deps", "powerguard")
    shutil.rmtree(root / "wheels")
    _put(root, "etc/machine-id", f"{secrets.token_hex(16)}\n")  # else it is a first boot, which enables all there is
    _put(root, "etc/hostname", "gpu07\n")
    (root / "var/log/journal").mkdir(exist_ok=True)
    for unit in _NOT_HERE:
        (root / _UNITS / unit).unlink(missing_ok=True)
        (root / _UNITS / unit).symlink_to("/dev/null")
    ours = root / "usr/lib/powerguard-test"
    ours.mkdir()
    shutil.copy2(HERE / "agent", ours)
    shutil.copy2(ROOT / "examples/plain_numpy_free.py", ours / "train")
    for unit in ("train.service", "powerguard-test-agent.service"):
        shutil.copy2(HERE / "host" / unit, root / _UNITS)
    (root / _UNITS / "multi-user.target.wants" / unit).symlink_to(f"/{_UNITS}/{unit}")
    _put(root, "usr/lib/sysusers.d/train.conf", "u train - - /var/lib/train\n")
    _put(root, "usr/lib/tmpfiles.d/train.conf", "d /var/lib/train 2770 train powerguard -\n")
    _put(root, "etc/powerguard/powerguard.yaml", settings)
    _inside(root, "/opt/powerguard/bin/powerguard", "install", "--with", "ipmi", "--resume-unit", "train.service")


def _put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def _pip_inside(root: Path, *words: str) -> None:
    _inside(root, "/opt/powerguard/bin/pip", "install", "--quiet", "--no-index", "--find-links=/wheels", *words)


def _inside(root: Path, *argv: str) -> None:
    _run("chroot", str(root), "/usr/bin/env", "-i", f"PATH={_PATH}", "LC_ALL=C.UTF-8", *argv)


def _run(*argv: str) -> None:
    path = os.pathsep.join([os.environ["PATH"], _PATH])
    ended = subprocess.run(
        argv, env={**os.environ, "PATH": path}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == 0, f"{argv}: {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
