"""`powerguard checkpoints list` and `verify`: everything that lies there, each with what is known of it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.checkpoints.found import PlaceError, entries_at, tier_at, tier_of_folder, verified
from powerguard.cli.checkpoints.verb import places_of
from powerguard.cli.main import main
from powerguard.cli.render import Bar
from powerguard.trainer.seal.folder import seal
from powerguard.trainer.seal.manifest import SEAL
from powerguard.trainer.store.manifest import MANIFEST
from powerguard.trainer.store.store import Store
from tests.cli.checkpoint_sites import IDS, flip, save
from tests.golden import FIGURES, Golden
from tests.trainer.checkpoints import break_description

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """A folder for each job: one native, one of Transformers, and what else gathers in such places."""
    top = tmp_path / "nas"
    for step in (30, 40):
        save(top / "llm", step)
    (top / "llm" / "step-000000000050-0123abcd").mkdir()
    (top / "llm" / "bad-step-000000000020-0123abcd").mkdir()
    (top / "llm" / "newer-step-000000000060-0123abcd").mkdir()
    for step in (100, 200):
        folder = top / "hf" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(5000))
    seal(top / "hf" / "checkpoint-100")
    (top / "hf" / "runs").mkdir()
    (top / "notes.txt").write_text("nothing of ours")
    (top / "loop").symlink_to(top)
    return top


def states(place: Path) -> list[tuple[int | None, str]]:
    return [(each.step, each.state) for each in entries_at(str(place))]


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


def test_everything_below_a_folder_is_reported(nas: Path) -> None:
    """The highest step first; what is no checkpoint is left out, and no link is followed."""
    assert states(nas) == [
        (200, "not_sealed"),
        (100, "complete"),
        (60, "set_aside"),
        (50, "unfinished"),
        (40, "complete"),
        (30, "complete"),
        (20, "set_aside"),
    ]
    native = next(each for each in entries_at(str(nas)) if each.step == 40)
    assert (native.kind, native.job, native.reason, native.tier) == ("native", "llm", "periodic", "local")
    assert native.created_s is not None


def test_a_checkpoint_may_be_named_itself(nas: Path) -> None:
    path = next((nas / "llm").glob("step-000000000040-*"))
    assert states(path) == [(40, "complete")]
    assert states(nas / "hf" / "checkpoint-100") == [(100, "complete")]
    assert states(nas / "hf" / "checkpoint-200") == [(200, "not_sealed")]


WHY = "chunk 3 of shard-00000"


def test_what_names_and_sizes_show_needs_no_reading(nas: Path, golden: Golden) -> None:
    shard = next((nas / "llm").glob("step-000000000040-*")) / "shard-00000"
    os.truncate(shard, 4096)
    (nas / "hf" / "checkpoint-100" / "model.safetensors").write_bytes(b"")
    found = {each.step: each for each in entries_at(str(nas))}
    assert found[40].state == "corrupt"
    assert "4096" in found[40].because
    assert found[100].state == "corrupt"
    golden("checkpoints", f"{found[40].because}\n{found[100].because}", varies={nas: "NAS", **IDS})


def test_only_reading_finds_a_flipped_bit(nas: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    shard = next((nas / "llm").glob("step-000000000040-*")) / "shard-00000"
    flip(shard)
    flip(nas / "hf" / "checkpoint-100" / "model.safetensors", 17)
    assert main(["checkpoints", "list", str(nas)]) == 0
    assert capsys.readouterr().out.count(" complete ") == 3
    for words in (["verify"], ["list", "--verify"]):
        assert main(["checkpoints", *words, str(nas)]) == 1
        out = capsys.readouterr().out
        assert f"{shard}: " in out
        golden("checkpoints", out, " ".join(words), varies={nas: "NAS", **IDS, **FIGURES})
        assert out.count(" verified ") == 1


def test_verify_says_yes_only_when_all_is_read_and_right(
    nas: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was set aside or never finished does not count: nobody would resume from it. What is not sealed does."""
    assert main(["checkpoints", "verify", str(nas / "llm")]) == 0
    assert capsys.readouterr().out.count(" verified ") == 2
    assert main(["checkpoints", "verify", str(nas / "hf" / "checkpoint-100")]) == 0
    assert main(["checkpoints", "verify", str(nas)]) == 1
    assert main(["checkpoints", "verify", str(tmp_path / "gone")]) == 1
    (tmp_path / "empty").mkdir()
    assert main(["checkpoints", "verify", str(tmp_path / "empty")]) == 1
    assert "no checkpoint there" in capsys.readouterr().err


def test_verify_says_no_where_nothing_can_be_resumed_from(nas: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that goes on after a yes would have no checkpoint at all."""
    root = nas / "llm"
    alone = [root / each.name for each in entries_at(str(root)) if each.state in ("unfinished", "set_aside")]
    assert alone
    for each in entries_at(str(root)):
        if each.is_whole:
            shutil.rmtree(each.path)
    for place in (root, *alone):
        assert main(["checkpoints", "verify", str(place)]) == 1
        assert f"{place}: no checkpoint there that training could resume from" in capsys.readouterr().err
    assert main(["checkpoints", "list", str(root)]) == 0


def test_what_training_prunes_before_it_is_read_is_no_damage(nas: Path) -> None:
    """A weekly `verify` beside a training must not fail for what the training itself has removed."""
    whole = [each for each in entries_at(str(nas)) if each.is_whole]
    assert {each.kind for each in whole} == {"native", "sealed"}
    for each in whole:
        shutil.rmtree(each.path)
        read = verified(each, Bar("", quiet=True))
        assert (read.state, read.because) == ("unfinished", "it was removed meanwhile")


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_shard_is_read(tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "r", 7, ranks=ranks)
    assert main(["checkpoints", "verify", str(path)]) == 0
    flip(path / f"shard-{ranks - 1:05d}")
    assert main(["checkpoints", "verify", str(path)]) == 1
    assert f"shard-{ranks - 1:05d}" in capsys.readouterr().out


def test_a_shard_with_a_wrong_description_is_corrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest itself verifies; the shard's part of it says what is wrong, in every verb that reads it."""
    path = save(tmp_path / "r", 7, ranks=3)
    break_description(path, 2)
    assert main(["checkpoints", "verify", str(path)]) == 1
    assert f"{path}/{MANIFEST}: shard-00002 of " in capsys.readouterr().out
    assert main(["checkpoints", "restore", str(path), "--to", str(tmp_path / "new")]) == 1
    assert f"{path}/{MANIFEST}: shard-00002 of " in capsys.readouterr().err


def test_object_of_checkpoints(nas: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """What the reference shows is what programs get."""
    assert main(["checkpoints", "list", str(nas), str(nas / "gone"), "--json"]) == 1
    got = shown(capsys)
    example = json.loads((ROOT / "docs/reference/checkpoints.json").read_text(encoding="utf-8"))
    assert list(got) == list(example)
    assert {tuple(each) for each in got["checkpoints"]} == {tuple(each) for each in example["checkpoints"]}
    (trouble,) = got["trouble"]
    assert trouble["place"] == str(nas / "gone")
    golden("checkpoints", trouble["because"], varies={nas: "NAS"})
    assert main(["checkpoints", "list", "/dev/null"]) == 1
    golden("checkpoints", capsys.readouterr().err, "no folder")
    known = {"complete", "verified", "corrupt", "unreadable", "unfinished", "set_aside", "not_sealed"}
    assert {each["state"] for each in got["checkpoints"]} <= known


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b"[" * 50_000, b'{"schema": "of.another/v2"}'])
@pytest.mark.parametrize("name", [MANIFEST, SEAL])
def test_a_hostile_manifest_is_one_line(
    tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("step-000000000009-0123abcd" if name == MANIFEST else "checkpoint-9")
    folder.mkdir()
    (folder / name).write_bytes(content)
    assert states(tmp_path) == [(9, "corrupt")]
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    assert "Traceback" not in capsys.readouterr().out


def test_a_manifest_of_another_powerguard_is_no_damage(tmp_path: Path) -> None:
    manifest = save(tmp_path / "llm", 9) / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"powerguard.checkpoint/v3", b"powerguard.checkpoint/v9"))
    assert states(tmp_path) == [(9, "unreadable")]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint-9\x1b[31m"
    folder.mkdir()
    (folder / "a").touch()
    assert main(["checkpoints", "list", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("mark", ["bad-", "old-"])
def test_a_sealed_one_that_no_resume_looks_at_is_set_aside(tmp_path: Path, mark: str) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "model").write_bytes(b"weights")
    seal(tmp_path / "checkpoint-9")
    assert states(tmp_path) == [(9, "complete")]
    (tmp_path / "checkpoint-9").rename(tmp_path / f"{mark}checkpoint-9")
    assert states(tmp_path) == [(9, "set_aside")]


def test_what_a_training_left_behind_is_set_aside(tmp_path: Path) -> None:
    """Of one name each, as copies may bring back. No resume looks at these, and no seal is missing."""
    for number in ("", "2-"):
        path = save(tmp_path, 9)
        path.rename(tmp_path / "step-000000000009-0123abcd")
        with Store(tmp_path, job="llm") as store:
            store.leave_behind(5)
        assert (tmp_path / f"old-{number}step-000000000009-0123abcd").is_dir()
    assert states(tmp_path) == [(9, "set_aside")] * 2


def test_a_seal_of_a_newer_powerguard_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / SEAL).write_text('{"schema": "powerguard.seal/v9"}')
    assert states(tmp_path) == [(9, "unreadable")]


def test_a_marked_one_is_set_aside(tmp_path: Path) -> None:
    """As a slower tier marks what did not verify."""
    path = save(tmp_path / "llm", 5)
    (path / "SET-ASIDE").write_text(f"{WHY}\n")
    (entry,) = entries_at(str(tmp_path))
    assert (entry.state, entry.because.partition(": ")[2]) == ("set_aside", WHY)


# --- Places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s3://bucket", "s3:///x", "s3://", "ftp://a/b", "s3://key:secret@bucket/llm"])
def test_an_address_that_means_none(url: str) -> None:
    """What would be right, and never a secret that stands in it."""
    with pytest.raises(PlaceError) as error:
        tier_at(url)
    assert "Traceback" not in str(error.value)


def test_a_mount_is_distinguished_from_a_disk() -> None:
    assert tier_of_folder("/tmp") == "local"
    assert tier_of_folder("/proc/self") == "local"


SETTINGS = """\
mode: dry-run
ups: {{a: {{sources: [{{kind: nut, host: 127.0.0.1, name: a}}]}}}}
trainer_sockets: {sockets}
trainers:
  - {{name: mute, url: "unix:{sockets}/mute.sock", checkpoint_dir: {mute}}}
  - {{name: far, url: "http://127.0.0.1:9"}}
"""


@contextmanager
def trainer(path: Path, answer: bytes) -> Iterator[None]:
    """A trainer that answers each question with the same bytes."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + answer)
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_unix_server(serve, path))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_places_are_what_settings_and_trainers_name(
    tmp_path: Path, nas: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a place: where the settings say, and where a running trainer says it has just saved."""
    sockets = tmp_path / "s"
    sockets.mkdir()
    (sockets / "no-socket.sock").touch()
    config = tmp_path / "pg.yaml"
    config.write_text(SETTINGS.format(sockets=sockets, mute=nas / "hf"), encoding="utf-8")
    path = next((nas / "llm").glob("step-000000000040-*"))
    status = {"job": "llm", "last_committed": {"step": 40, "age_s": 3.0, "path": str(path)}}
    with trainer(sockets / "llm.sock", json.dumps(status).encode()):
        assert places_of(str(config)) == ([str(nas / "hf"), str(nas / "llm")], "")
        assert main(["checkpoints", "list", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "checkpoint-100" in out
    assert str(path) in out
    with trainer(sockets / "odd.sock", b"not json"):
        assert places_of(str(config))[0] == [str(nas / "hf")]


def test_folders_of_the_settings_are_listed_and_each_checkpoint_once(
    tmp_path: Path, nas: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's own folder may lie in one of `checkpoint_dirs`."""
    config = tmp_path / "pg.yaml"
    text = SETTINGS.format(sockets=tmp_path / "none", mute=nas / "hf")
    config.write_text(f'{text}\ncheckpoint_dirs: ["{nas}"]\n', encoding="utf-8")
    assert places_of(str(config))[0] == [str(nas), str(nas / "hf")]
    assert main(["checkpoints", "list", "--json", "--config", str(config)]) == 0
    paths = [each["path"] for each in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert any("/llm/" in path for path in paths)
    assert len(paths) == len(set(paths))


def test_what_the_daemons_parts_log_is_not_in_the_output(tmp_path: Path, nas: Path) -> None:
    """In a process of its own: on a host without the folder of sockets, a log line stood before the object."""
    config = tmp_path / "pg.yaml"
    config.write_text(SETTINGS.format(sockets=tmp_path / "none", mute=nas / "hf"), encoding="utf-8")
    command = [sys.executable, "-m", "powerguard", "checkpoints", "list", "--json", "--config", str(config)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    assert json.loads(ended.stdout)["object"] == "checkpoints"


def test_no_place_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", "--config", str(tmp_path / "none.yaml")]) == 64
    assert "name a folder" in capsys.readouterr().err


def test_settings_with_a_mistake_are_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not wrong options: a script must not report a typing error of the operator."""
    config = tmp_path / "powerguard.yaml"
    config.write_text("mode: armedd\n", encoding="utf-8")
    assert main(["checkpoints", "list", "--config", str(config)]) == 78
    assert "powerguard.yaml:1:1: ups: is required" in capsys.readouterr().err
