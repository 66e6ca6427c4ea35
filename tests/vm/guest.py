"""What the virtual machine boots: Debian's own kernel and Python, unpacked once, and this checkout's programs.

Either a small system in memory, of which tests/vm/init is PID 1 (`initrd`), or a whole Debian on a disk (debian.py).
"""

import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.peers import require
from tests.peers.nspawn import IMAGE, ROOT

HERE: Final = Path(__file__).parent
GUEST: Final = IMAGE.with_name("kernel")
PACKAGES: Final = "linux-image-amd64,busybox-static,python3-minimal,libpython3-stdlib"
"""The ordinary kernel, because Debian's "cloud" one has no IPMI driver."""

_SYSTEM: Final = (
    "bin/busybox",
    "lib64/*",
    *(f"lib/x86_64-linux-gnu/{name}.so*" for name in ("ld-linux-x86-64", "libc", "libm", "libz", "libexpat")),
    "usr/lib/x86_64-linux-gnu/libffi.so*",
    "usr/bin/python3*",
)
_UNUSED: Final = {"distutils", "email", "idlelib", "lib2to3", "pydoc_data", "sqlite3", "unittest", "xml"}
_IN_MEMORY: Final = ("ipmi_msghandler", "ipmi_si", "ipmi_devintf", "ipmi_watchdog")
_FOR_DISK: Final = ("virtio_pci", "virtio_blk", "virtio_net", "crc32c_generic", "ext4")
_Entry = tuple[str, Path]


def kernel() -> Path:
    """Return the kernel, made with the rest of the guest when it is not there yet (a minute, 100 MB)."""
    if platform.machine() != "x86_64":
        pytest.skip("the guest is made for x86-64")
    if not (GUEST / "vmlinux").exists():
        _make()
    return GUEST / "vmlinux"


def initrd(to: Path) -> Path:
    """Write the guest's file system, with the programs of this checkout, and return where."""
    kernel()
    package = ROOT / "powerguard"
    ours = [(f"usr/lib/python3/dist-packages/{path.relative_to(ROOT)}", path) for path in package.rglob("*.py")]
    ours += [("usr/lib/powerguard/powerguard-disarm", ROOT / "systemd" / "powerguard-disarm")]
    ours += [("init", HERE / "init")]
    ours += [(f"usr/lib/powerguard-test/{name}", HERE / name) for name in ("agent", "alarm")]
    shutil.copyfile(GUEST / "system.cpio", to)
    with to.open("ab") as out:
        out.writelines(_cpio(ours))
    return to


def starter(to: Path) -> Path:
    """Write what mounts a disk and starts the system on it, and return where."""
    kernel()
    entries = [("init", HERE / "start"), ("bin/busybox", GUEST / "busybox")]
    # In the order of their names: that in which they can be loaded.
    entries += [
        (f"lib/modules/{number:02}-{path.name}", path)
        for number, path in enumerate(_with_what_they_need(_FOR_DISK, GUEST / "modules"))
    ]
    to.write_bytes(b"".join(_cpio(entries)))
    return to


def modules() -> Path:
    """What lies below /lib/modules on a disk of such a host."""
    kernel()
    return GUEST / "modules"


def _with_what_they_need(names: Iterable[str], tree: Path) -> list[Path]:
    """Kernel modules in the order in which they can be loaded, by what each says of itself (MODULE_INFO, "depends")."""
    files = {path.stem.replace("-", "_"): path for path in tree.rglob("*.ko")}
    found: dict[str, Path] = {}

    def add(name: str) -> None:
        match = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for needed in match[1].decode().replace("-", "_").split(",") if match else ():
            if needed and needed not in found:
                add(needed)
        found[name] = files[name]

    for name in names:
        add(name)
    return list(found.values())


def _make() -> None:
    mmdebstrap = require("mmdebstrap")
    GUEST.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pg-guest-", dir="/tmp") as scratch:
        root = Path(scratch) / "root"
        argv = ["perl", mmdebstrap, "--mode=root", "--variant=extract", f"--include={PACKAGES}", "bookworm", str(root)]
        path = os.pathsep.join([str(Path(mmdebstrap).resolve().parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
        subprocess.run(argv, env={**os.environ, "PATH": path}, capture_output=True, check=True, timeout=300)
        # Else every program would be compiled anew in each boot, and slowly.
        library = "/usr/lib/python3.11"
        compiling = ["chroot", str(root), "/usr/bin/python3.11", "-m", "compileall", "-q", library]
        subprocess.run(compiling, capture_output=True, check=True, timeout=300)
        half = GUEST.with_name(f"{GUEST.name}.half-made-{os.getpid()}")
        half.mkdir()
        shutil.copy2(root / "bin/busybox", half)
        tree = root / "lib/modules"
        listed = tree.glob("*/modules.*")  # of what is built in, for depmod
        for found in (*_with_what_they_need((*_FOR_DISK, *_IN_MEMORY), tree), *listed):
            to = half / "modules" / found.relative_to(tree)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, to)
        with (half / "system.cpio").open("wb") as out:
            out.writelines(_cpio(_system(root)))
        # A kernel that is not compressed boots in half the time here.
        (half / "vmlinux").write_bytes(_uncompressed(next((root / "boot").glob("vmlinuz-*")).read_bytes()))
        try:
            half.rename(GUEST)
        except OSError:  # somebody else has made it meanwhile
            shutil.rmtree(half)


def _system(root: Path) -> Iterator[_Entry]:
    for pattern in _SYSTEM:
        yield from ((str(path.relative_to(root)), path) for path in root.glob(pattern))
    library = root / "usr/lib/python3.11"
    for path in library.rglob("*"):
        if path.is_file() and not _UNUSED.intersection(path.relative_to(library).parts):
            yield str(path.relative_to(root)), path
    for name in _IN_MEMORY:
        yield f"lib/modules/{name}.ko", next((root / "lib/modules").rglob(f"{name}.ko"))


def _cpio(entries: Iterable[_Entry]) -> Iterator[bytes]:
    """An archive as the kernel unpacks it (its Documentation/driver-api/early-userspace/buffer-format.rst)."""
    made: set[str] = set()
    for name, path in entries:
        for folder in reversed(Path(name).parents[:-1]):
            if str(folder) not in made:
                made.add(str(folder))
                yield _member(str(folder), 0o040755, b"", 0)
        status = path.lstat()
        data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        yield _member(name, status.st_mode, data, int(status.st_mtime))
    yield _member("TRAILER!!!", 0, b"", 0)


def _member(name: str, mode: int, data: bytes, mtime: int) -> bytes:
    fields = (0, mode, 0, 0, 1, mtime, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def _uncompressed(image: bytes) -> bytes:
    """The kernel inside a bzImage (Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length)."""
    offset, length = struct.unpack_from("<II", image, 0x248)
    begin = ((image[0x1F1] or 4) + 1) * 512 + offset
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(image[begin : begin + length])
