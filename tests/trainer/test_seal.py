"""A sealed folder: whole to the last byte, or told by name, chunk and offset what is not."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import powerguard.trainer.seal
from powerguard.trainer.seal.folder import Finding, newest_whole, prune, saved_in, seal, sealed_in, verify
from powerguard.trainer.seal.manifest import SEAL, UNBORN, Seal, SealedFile, SealError, read_seal, step_in
from powerguard.trainer.store.disk import Disk, FolderLock
from powerguard.trainer.store.items import Buffer
from powerguard.trainer.store.store import Store
from tests.trainer.checkpoints import save
from tests.trainer.toy import short_folder

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as a framework leaves it: shards of several chunks, small files, a link, an empty folder."""
    made = tmp_path / "checkpoint-1200"
    (made / "rank 0" / "empty").mkdir(parents=True)
    blob = random.Random(1).randbytes(20 * MIB)
    (made / "rank 0" / "model.bin").write_bytes(blob)
    (made / "rank 0" / "exact.bin").write_bytes(blob[: 16 * MIB])
    (made / "nothing").touch()
    (made / os.fsdecode(b"not utf-8 \xff.txt")).write_text("named by somebody else")
    (made / "latest").symlink_to("rank 0")
    return made


def found_in(folder: Path, *, direct: bool = True) -> list[tuple[str, str, int | None, int | None, int]]:
    verdict = verify(folder, direct=direct)
    assert verdict.is_whole == (not verdict.findings)
    return [(f.path, f.kind, f.chunk, f.offset_bytes, f.chunks) for f in verdict.findings]


# --- Whole ------------------------------------------------------------------------------------------------------------


def test_a_sealed_folder_verifies(folder: Path) -> None:
    found: list[tuple[int, int | None]] = []
    sealed = seal(folder, progress=lambda done, total: found.append((done, total)))
    assert sealed.is_new
    assert (sealed.seal.step, len(sealed.seal.files), sealed.seal.size_bytes) == (1200, 4, 36 * MIB + 22)
    assert found[-1] == (36 * MIB + 22, 36 * MIB + 22)
    verdict = verify(folder)
    assert (verdict.is_whole, verdict.read_bytes, verdict.seal) == (True, 36 * MIB + 22, sealed.seal)
    assert verify(folder, direct=False).is_whole


def test_a_training_goes_on_sealing_after_the_main_thread(folder: Path) -> None:
    """The script has started its training in a thread and come to its end: an executor would take no more work."""
    script = (
        "import sys, threading\nfrom powerguard.trainer.seal import seal, verify\n"
        "def train():\n"
        "    threading.main_thread().join()\n"
        "    print(seal(sys.argv[1]).is_new, verify(sys.argv[1]).is_whole)\n"
        "threading.Thread(target=train).start()\n"
    )
    argv = [sys.executable, "-c", script, folder]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_sealing_again_what_is_unchanged_changes_nothing(folder: Path) -> None:
    """Whoever is not sure whether it was done does it again: also a cut between two lines of a script."""
    first = seal(folder)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    second = seal(folder)
    assert not second.is_new
    assert second.digest == first.digest
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_changed_folder_is_sealed_only_on_demand(folder: Path) -> None:
    """A seal that follows every change would hide the one that nobody made."""
    seal(folder)
    with (folder / "rank 0" / "model.bin").open("r+b") as file:
        file.seek(9 * MIB)
        file.write(b"!")
    with pytest.raises(SealError, match=r"rank 0/model.bin: changed at chunk 1, offset 8388608 \(--again"):
        seal(folder)
    (folder / "more").touch()
    with pytest.raises(SealError, match="more: extra"):
        seal(folder)
    assert seal(folder, again=True).is_new
    assert verify(folder).is_whole


def test_a_step_reported_once_stays(folder: Path) -> None:
    assert seal(folder, step=7).seal.step == 7
    assert not seal(folder).is_new
    with pytest.raises(SealError, match="sealed with 7, now 8"):
        seal(folder, step=8)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-1200", 1200),
        ("global_step300", 300),
        ("iter_0000500", 500),
        ("step-000000001234-9f86d081", 1234),
        ("epoch=3-step=4500", 4500),
        ("ckpt_68", 68),
        ("ckpt-epoch_3-step_70", 70),
        ("iteration_100", 100),
        ("epoch_242", 242),
        ("epoch=3-ckpt=5", 5),
        ("model_68", 68),
        ("my-model_68", 68),
        ("68", 68),
        ("model-00001-of-00004", None),
        ("model_7b", None),
        ("run-68", None),
        ("pytorch_model", None),
        ("version_3", None),
        ("llama-7b", None),
        ("final", None),
        ("misstep7", None),
    ],
)
def test_step_is_read_from_the_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


# --- Not whole --------------------------------------------------------------------------------------------------------


def _flip(path: Path, *offsets: int) -> None:
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))


DAMAGE: list[tuple[Callable[[Path], object], list[tuple[str, str, int | None, int | None, int]]]] = [
    (lambda f: _flip(f / "rank 0/model.bin", 3), [("rank 0/model.bin", "changed", 0, 0, 1)]),
    (
        lambda f: _flip(f / "rank 0/model.bin", 9 * MIB, 20 * MIB - 1),
        [("rank 0/model.bin", "changed", 1, 8 * MIB, 2)],
    ),
    (lambda f: os.truncate(f / "rank 0/model.bin", 17 * MIB), [("rank 0/model.bin", "truncated", 2, 17 * MIB, 0)]),
    (lambda f: os.truncate(f / "rank 0/model.bin", 0), [("rank 0/model.bin", "truncated", 0, 0, 0)]),
    (lambda f: os.truncate(f / "rank 0/model.bin", 30 * MIB), [("rank 0/model.bin", "grown", 2, 20 * MIB, 0)]),
    (lambda f: os.truncate(f / "rank 0/exact.bin", 40 * MIB), [("rank 0/exact.bin", "grown", 2, 16 * MIB, 0)]),
    (lambda f: (f / "nothing").write_text("x"), [("nothing", "grown", 0, 0, 0)]),
    (lambda f: (f / "rank 0/model.bin").unlink(), [("rank 0/model.bin", "missing", None, None, 0)]),
    (lambda f: (f / "rank 0/empty").rmdir(), [("rank 0/empty", "missing", None, None, 0)]),
    (lambda f: (f / "rank 0/empty/late").touch(), [("rank 0/empty/late", "extra", None, None, 0)]),
    (lambda f: os.mkfifo(f / "pipe"), [("pipe", "extra", None, None, 0)]),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_reported_by_name_chunk_and_offset(
    folder: Path, damage: Callable[[Path], object], expected: list[tuple[str, str, int | None, int | None, int]]
) -> None:
    seal(folder)
    damage(folder)
    assert found_in(folder) == expected
    assert found_in(folder, direct=False) == expected


def test_what_turned_into_something_else_is_reported(folder: Path) -> None:
    """A link in the place of a file could show bytes that lie elsewhere; a pipe would be waited for without end."""
    seal(folder)
    (folder / "nothing").unlink()
    (folder / "nothing").symlink_to("latest")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("rank 0/empty")
    (folder / "rank 0/exact.bin").unlink()
    os.mkfifo(folder / "rank 0/exact.bin")
    assert [found[:2] for found in found_in(folder)] == [
        ("latest", "changed"),
        ("nothing", "changed"),
        ("rank 0/exact.bin", "changed"),
    ]


def test_a_file_that_cannot_be_read_is_reported(folder: Path) -> None:
    seal(folder)
    (folder / "nothing").chmod(0)
    found = found_in(folder)
    if os.geteuid() == 0:
        assert found == []  # root reads everything
    else:
        assert found == [("nothing", "unreadable", None, None, 0)]


def test_every_single_bit_counts(tmp_path: Path) -> None:
    """No loader of torch notices one; here every one of a file is refused, and of the seal itself."""
    folder = tmp_path / "step-5"
    folder.mkdir()
    (folder / "a.bin").write_bytes(random.Random(2).randbytes(100))
    seal(folder)
    for path in (folder / "a.bin", folder / SEAL):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 1 if path.name == "a.bin" else 5):
            path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ (1 << bit % 8)]) + whole[bit // 8 + 1 :])
            try:
                refused = not verify(folder, direct=False).is_whole
            except SealError:
                refused = True
            assert refused, f"{path.name}: bit {bit}"
        for length in range(0, len(whole), 3):
            path.write_bytes(whole[:length])
            try:
                refused = not verify(folder, direct=False).is_whole
            except SealError:
                refused = True
            assert refused, f"{path.name}: cut to {length}"
        path.write_bytes(whole)
    assert verify(folder).is_whole


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_what_a_seal_cannot_cover_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SealError, match="no such folder"):
        seal(tmp_path / "gone")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with pytest.raises(SealError, match="has no file to seal"):
        seal(folder)
    with pytest.raises(SealError, match="not sealed"):
        verify(folder)
    (folder / "a").write_text("a")
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(SealError, match="out: a link that leads out of the folder"):
        seal(folder)
    (folder / "out").unlink()
    (folder / "round").symlink_to("nowhere")
    (folder / "up").symlink_to("round/../../elsewhere")
    with pytest.raises(SealError, match="up: a link that leads out"):
        seal(folder)
    (folder / "up").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(SealError, match="pipe: neither file, folder nor link"):
        seal(folder)
    assert read_seal(folder) is None


def test_what_needs_no_seal_is_refused(tmp_path: Path) -> None:
    """A store of ours goes on being written, so a seal of it would be broken by the next save; and a file is a file."""
    with Store(tmp_path / "ck", job="a") as store:
        native = Path(save(store, 7, [Buffer("w", bytes(10))]).path)
    for folder in (tmp_path / "ck", native):
        with pytest.raises(
            SealError, match=f"^{native}: a checkpoint of powerguard's own.*checkpoints verify {folder}`"
        ):
            seal(folder)
        assert not (folder / SEAL).exists()
    (tmp_path / "hf" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "hf" / "checkpoint-1" / "model").write_bytes(b"1")
    sealed, above = tmp_path / "hf" / "checkpoint-1", tmp_path / "hf"
    seal(sealed)
    with pytest.raises(SealError, match=rf"^{above}: checkpoint-1 in it is sealed by itself"):
        seal(above)
    (sealed / SEAL).unlink()
    seal(above)
    with pytest.raises(SealError, match=rf"^{sealed}: {above} is sealed as a whole"):
        seal(sealed)
    assert verify(above).is_whole
    with pytest.raises(SealError, match=r"^/dev/null: is not a folder"):
        seal("/dev/null")


def test_a_socket_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pg") as name, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{name}/s")
        (Path(name) / "a").write_text("a")
        with pytest.raises(SealError, match="s: neither file"):
            seal(name)


class _Meddling(Disk):
    """Does something at the first flush of a file."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle: Callable[[], object] | None = meddle
        self._lock = threading.Lock()

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        with self._lock:
            meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()


@pytest.mark.parametrize(
    ("meddle", "named"),
    [
        (lambda f: (f / "late").write_text("still writing"), "late"),
        (lambda f: (f / "rank 0/exact.bin").write_bytes(b"again"), "rank 0/exact.bin"),
        (lambda f: (f / "nothing").unlink(), "nothing"),
        (lambda f: (f / "rank 0/empty").rmdir(), "rank 0/empty"),
    ],
)
def test_a_folder_that_is_still_written_is_not_sealed(
    folder: Path, meddle: Callable[[Path], object], named: str
) -> None:
    """A seal over half of a checkpoint would be worse than none."""
    with pytest.raises((SealError, FileNotFoundError), match=named):
        seal(folder, disk=_Meddling(lambda: meddle(folder)))
    assert read_seal(folder) is None
    seal(folder)
    assert verify(folder).is_whole


class _Full(Disk):
    """A disk that has no room for one more byte."""

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        os.pwrite(descriptor, content[:10], offset)
        raise OSError(28, "No space left on device")


def test_two_do_not_seal_it_at_once(folder: Path) -> None:
    """As all ranks of a script that calls it on each: one took the file away that another was about to put in place."""
    with FolderLock(folder), pytest.raises(SealError, match=r"another process is sealing it.*of several ranks, on one"):
        seal(folder)
    assert seal(folder).is_new


def test_a_full_disk_leaves_no_half_seal(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        seal(folder, disk=_Full())
    assert not {SEAL, UNBORN} & {path.name for path in folder.iterdir()}


def test_a_resume_from_what_has_no_seal_is_refused_with_the_way_out(folder: Path) -> None:
    """As of a training that gets its PowerguardCallback only now, with `resume_from_checkpoint` of before."""
    with pytest.raises(SealError, match=r"written without powerguard \(`powerguard seal`"):
        saved_in(folder, 7)
    seal(folder)
    assert saved_in(folder, 7).step == 7


def test_what_a_killed_seal_left_is_no_seal(folder: Path) -> None:
    """Killed between writing the seal and putting it into its place: not sealed, and the next try succeeds."""
    (folder / UNBORN).write_bytes(b'{"schema": "powerguard.seal/v1"')
    with pytest.raises(SealError, match="not sealed"):
        verify(folder)
    assert seal(folder).is_new
    assert not (folder / UNBORN).exists()


# --- A hostile seal ---------------------------------------------------------------------------------------------------

GOOD = Seal(files=(SealedFile(path="a", size_bytes=1, digests="0" * 32),), sealed_at="2026-11-21T04:12:09Z")


def _with(**changes: object) -> bytes:
    whole = {"files": GOOD.files, "sealed_at": GOOD.sealed_at, **changes}
    return Seal(**whole).to_json()  # type: ignore[arg-type]


def _file(path: object = "a", size: object = 1, digests: object = "0" * 32) -> tuple[SealedFile, ...]:
    return (SealedFile(path=path, size_bytes=size, digests=digests),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        GOOD.to_json()[:-2],
        GOOD.to_json() + b" ",
        GOOD.to_json().replace(b"seal/v1", b"seal/v2"),
        _with(files=_file("../a")),
        _with(files=_file("/a")),
        _with(files=_file("b//a")),
        _with(files=_file("a/./b")),
        _with(files=_file("a\0")),
        _with(files=_file("")),
        _with(files=_file(3)),
        _with(files=_file(SEAL)),
        _with(files=_file(size=-1)),
        _with(files=_file(size=2**70, digests="")),
        _with(files=_file(size=True)),
        _with(files=_file(size=9 << 20)),
        _with(files=_file(digests="0" * 31)),
        _with(files=_file(digests="G" * 32)),
        _with(files=_file(digests=None)),
        _with(files=_file() * 2),
        _with(chunk_bytes=0),
        _with(chunk_bytes=4097),
        _with(chunk_bytes=2**40),
        _with(step=-1),
        _with(step="1"),
        _with(sealed_at=1),
        _with(links=(("../x", "y"),)),
        _with(links=(("x", 1),)),
        _with(folders=("..",)),
        _with(folders=("a",)),
    ],
)
def test_a_hostile_seal_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / SEAL).write_bytes(content)
    with pytest.raises(SealError, match=SEAL):
        verify(tmp_path)


def test_a_seal_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe must not be waited for, a link not be followed."""
    (tmp_path / "a").write_bytes(b"x")
    os.mkfifo(tmp_path / SEAL)
    with pytest.raises(SealError, match="not readable"):
        verify(tmp_path)
    (tmp_path / SEAL).unlink()
    (tmp_path / SEAL).symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        verify(tmp_path)


def test_a_good_seal_comes_back_as_it_was() -> None:
    seal_ = Seal(
        files=(*_file(os.fsdecode(b"\xff")), SealedFile(path="b", size_bytes=0, digests="")),
        links=(("l", "b"),),
        folders=("f",),
        step=4,
        sealed_at="2026-11-21T04:12:09Z",
    )
    assert Seal.parse(seal_.to_json()) == seal_


def test_findings_are_words() -> None:
    assert str(Finding(kind="missing", path="a")) == "a: missing"
    assert (
        str(Finding(kind="changed", path="a", chunk=2, offset_bytes=16777216, chunks=3))
        == "a: changed at chunk 2, offset 16777216 (3 chunks in all)"
    )


# --- Many in one folder -------------------------------------------------------------------------------------------


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir()
        (root / name / "model").write_bytes(name.encode() * 1000)
        seal(root / name)


def there(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_all_that_the_guide_imports_is_there() -> None:
    for name in powerguard.trainer.seal.__all__:
        assert callable(getattr(powerguard.trainer.seal, name)), name
    with pytest.raises(AttributeError):
        powerguard.trainer.seal.nothing  # noqa: B018


def test_a_link_to_a_checkpoint_counts_for_none(tmp_path: Path) -> None:
    made(tmp_path, "checkpoint-10", "checkpoint-12")
    (tmp_path / "latest").symlink_to("checkpoint-12")
    (tmp_path / "best").symlink_to("checkpoint-10")
    prune(tmp_path, 2)
    assert [folder.name for folder in sealed_in(tmp_path)] == ["checkpoint-12", "checkpoint-10"]


def test_nothing_is_removed_that_others_have_sealed(tmp_path: Path) -> None:
    made(tmp_path, "final-export", "checkpoint-1", "checkpoint-2", "checkpoint-3", "other-2")
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / SEAL).write_text("of a newer version")
    prune(tmp_path, 2, "checkpoint-*")
    assert there(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-9", "final-export", "other-2"]
    prune(tmp_path, 1, "checkpoint-*", spare="checkpoint-2")
    assert there(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-9", "final-export", "other-2"]


def test_what_is_damaged_is_set_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, "checkpoint-1", "checkpoint-2")
    (tmp_path / "checkpoint-2" / "model").write_bytes(b"short")
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-1"
    assert there(tmp_path) == ["bad-checkpoint-2", "checkpoint-1"]
    assert "checkpoint-2: kept as bad-checkpoint-2: model: truncated" in caplog.text


def test_where_all_are_damaged_training_does_not_begin_again(tmp_path: Path) -> None:
    """An indexer, or a NAS, puts a file into each folder: all are set aside, and weeks of training would be too."""
    assert newest_whole(tmp_path) is None
    made(tmp_path, "checkpoint-1", "checkpoint-2", "other-3")
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / name / ".DS_Store").touch()
    for _ in range(2):
        with pytest.raises(
            SealError, match=r"no checkpoint there is whole: bad-checkpoint-1, bad-checkpoint-2 changed"
        ):
            newest_whole(tmp_path, "checkpoint-*")
    assert newest_whole(tmp_path) == tmp_path / "other-3"
    for name in ("bad-checkpoint-1", "bad-checkpoint-2"):
        shutil.rmtree(tmp_path / name)
    assert newest_whole(tmp_path, "checkpoint-*") is None


def test_checkpoints_of_a_run_without_seals_are_named_where_training_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It began at step 0 without a word, and its own `checkpoint-500` would be written over theirs."""
    for name in ("checkpoint-500", "checkpoint-1000", "runs", "bad-checkpoint-7"):
        (tmp_path / name).mkdir()
    assert newest_whole(tmp_path) is None
    assert "without a seal are passed over: checkpoint-1000, checkpoint-500 (never finished" in caplog.text
    caplog.clear()
    (tmp_path / "checkpoint-500" / "model").touch()
    seal(tmp_path / "checkpoint-500")
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-500"
    assert not caplog.text


@pytest.mark.root
def test_what_cannot_be_read_is_left_where_it_is() -> None:
    """It may be good, and the cause a passing one: too many open files, a mount that is not there yet, another user."""
    with short_folder() as root:
        made(root, "checkpoint-1", "checkpoint-2")
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, -1)
        (root / "checkpoint-2" / "model").chmod(0)
        os.seteuid(65534)
        try:
            assert newest_whole(root) == root / "checkpoint-1"
            (root / "checkpoint-1" / "model").chmod(0)
            with pytest.raises(OSError, match=r"no older checkpoint is whole .* model: .*Permission denied"):
                newest_whole(root)
        finally:
            os.seteuid(0)
        assert there(root) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.root
def test_a_seal_that_cannot_be_read_is_left_where_it_is() -> None:
    """As one that root has written with a umask of 077: it keeps neither a start nor a save from its end."""
    with short_folder() as root:
        made(root, "checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4")
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, -1)
        for name in ("checkpoint-1", "checkpoint-4"):
            (root / name / SEAL).chmod(0)
        os.seteuid(65534)
        try:
            assert newest_whole(root) == root / "checkpoint-3"
            prune(root, 1)
            assert there(root) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
            shutil.rmtree(root / "checkpoint-3")
            with pytest.raises(OSError, match=rf"no older checkpoint is whole .*{SEAL}: .*Permission denied"):
                newest_whole(root)
        finally:
            os.seteuid(0)


@pytest.mark.root
def test_a_folder_that_cannot_be_entered_is_no_missing_one() -> None:
    """As when a training that has run as root runs as a user of its own: it must not begin at step 0."""
    with short_folder() as root:
        made(root, "checkpoint-1", "checkpoint-2")
        (root / "lost+found").mkdir(mode=0o700)
        (root / "checkpoint-2").chmod(0o700)
        root.chmod(0o711)
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                newest_whole(root)
        finally:
            os.seteuid(0)
        root.chmod(0o755)
        os.seteuid(65534)
        try:
            assert newest_whole(root) == root / "checkpoint-1"
            os.seteuid(0)
            shutil.rmtree(root / "checkpoint-1")
            os.seteuid(65534)
            with pytest.raises(OSError, match=r"no older checkpoint is whole .*checkpoint-2: .*Permission denied"):
                newest_whole(root)
            os.seteuid(0)
            shutil.rmtree(root / "checkpoint-2")
            os.seteuid(65534)
            assert newest_whole(root) is None
        finally:
            os.seteuid(0)


def test_what_a_newer_powerguard_sealed_is_left_where_it_is(tmp_path: Path) -> None:
    """After a way back to an older version it is no damage; the next version takes it again."""
    made(tmp_path, "checkpoint-1", "checkpoint-2")
    newer = (tmp_path / "checkpoint-2" / SEAL).read_bytes().replace(b"powerguard.seal/v1", b"powerguard.seal/v9")
    (tmp_path / "checkpoint-2" / SEAL).write_bytes(newer)
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-1"
    assert there(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(OSError, match=r"no older checkpoint is whole .* schema is 'powerguard.seal/v9'"):
        newest_whole(tmp_path)


@pytest.mark.root
def test_an_old_checkpoint_of_another_user_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be removed costs room; the new one is durable, and the other old ones go."""
    with short_folder() as root:
        made(root, "checkpoint-1", "checkpoint-2", "checkpoint-3")
        root.chmod(0o777)
        for path in (root / "checkpoint-1", *(root / "checkpoint-1").iterdir()):
            os.chown(path, 65534, -1)
        os.seteuid(65534)
        try:
            prune(root, 1)
        finally:
            os.seteuid(0)
        assert there(root) == ["checkpoint-2", "checkpoint-3"]
        assert "checkpoint-2: cannot be removed, and takes room: " in caplog.text
