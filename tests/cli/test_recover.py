"""`powerguard recover`: what a return waits for, gate by gate; a person's word; and what is left without a daemon."""

import asyncio
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powerguard.cli.main import main
from powerguard.core.model.events import RecoverNow
from powerguard.daemon.control.admin import admin_server
from powerguard.daemon.observe.port import ReturnView
from tests.cli.checkpoint_sites import save
from tests.daemon.test_returning import LESS, WHOLE, back, seen
from tests.daemon.watched import NOW_S, Watched, scene
from tests.golden import Golden

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SETTINGS = """\
mode: armed
ups: {{rack-a: {{sources: [{{kind: snmp, host: 127.0.0.1, version: 2c}}], runtime_table: {{50: 1620, 100: 720}}}}}}
checkpoint_dirs: ["{folder}/ckpt"]
resume: {{command: [{program}]}}
gpu: {{socket: "{folder}/gpu.sock"}}
journal: {{path: "{folder}/journal.sqlite"}}
control: {{socket: "{folder}/s.sock"}}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="pg "))
    (made / "pg.yaml").write_text(SETTINGS.format(folder=made, program="/bin/true"), encoding="utf-8")
    yield made
    shutil.rmtree(made)


async def recover(folder: Path, *words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(["recover", "--config", str(folder / "pg.yaml"), *words])

    async with asyncio.timeout(60.0):
        return await asyncio.to_thread(run), out.getvalue(), err.getvalue()


def by_command(daemon: Watched) -> Watched:
    daemon.returning = replace(daemon.returning, target=None, command=("/bin/true",))
    return daemon


async def test_a_dry_run_reports_every_gate_and_starts_nothing(folder: Path, golden: Golden) -> None:
    daemon = by_command(back(for_s=3.0))
    async with admin_server(daemon, path=f"{folder}/s.sock"):
        code, out, err = await recover(folder, "--dry-run")
        assert (code, err, daemon.events) == (1, "", [])
        golden("recover", out)
        lines = out.splitlines()
        assert [line.split()[:2] for line in lines[1:6]] == [
            ["waiting", "utility"],
            ["ok", "countdown"],
            ["ok", "charge"],
            ["ok", "host"],
            ["ok", "target"],
        ]
        assert lines[6].endswith(": /bin/true")
        daemon.state = by_command(back()).state
        assert (await recover(folder, "--dry-run"))[0] == 0
        answer = json.loads((await recover(folder, "--dry-run", "--json"))[1])
    example = json.loads((REFERENCE / "recovery.json").read_text(encoding="utf-8"))
    assert (list(answer), [list(gate) for gate in answer["gates"]]) == (
        list(example),
        [list(gate) for gate in example["gates"]],
    )


async def test_a_persons_word_goes_to_the_daemon(folder: Path, golden: Golden) -> None:
    daemon = by_command(back(for_s=3.0))
    async with admin_server(daemon, path=f"{folder}/s.sock"):
        code, out, err = await recover(folder)
        (event,) = daemon.events
        assert (code, err) == (0, "")
        golden("recover", out)
        assert event == RecoverNow(at_s=NOW_S, who=getattr(event, "who", ""))
        daemon.returning = ReturnView(target="powerguard-resume.target", seen=seen(LESS))
        code, _, err = await recover(folder)
        assert (code, len(daemon.events)) == (1, 1)
        golden("recover", err, "refused")
        assert (await recover(folder, "--unchecked"))[0] == 0
        answer = json.loads((await recover(folder, "--unchecked", "--json"))[1])
        assert (answer["object"], answer["unchecked"]) == ("accepted", True)


async def test_there_is_nothing_to_recover_from(folder: Path, golden: Golden) -> None:
    async with admin_server(by_command(scene("online")), path=f"{folder}/s.sock"):
        code, _, err = await recover(folder)
        _, out, _ = await recover(folder, "--dry-run")
    assert code == 1
    golden("recover", err)
    golden("recover", out, "dry-run")


async def test_without_a_daemon_it_looks_for_itself_and_starts_nothing(folder: Path, golden: Golden) -> None:
    save(folder / "ckpt", 100)
    code, out, _ = await recover(folder)
    assert code == 4
    golden("recover", out)
    assert [line.split()[:2] for line in out.splitlines()[1:6]] == [
        ["?", "utility"],
        ["?", "countdown"],
        ["?", "charge"],
        ["ok", "host"],
        ["ok", "target"],
    ]
    answer: dict[str, Any] = json.loads((await recover(folder, "--json"))[1])
    assert list(answer) == list(json.loads((REFERENCE / "recovery.json").read_text(encoding="utf-8")))
    assert "not running" in answer["refused"]
    (folder / "pg.yaml").write_text("mode: perhaps\n", encoding="utf-8")
    assert (await recover(folder))[0] in (4, 78)


async def test_a_command_that_is_not_there_is_a_closed_gate(folder: Path, golden: Golden) -> None:
    daemon = back()
    daemon.returning = replace(daemon.returning, target=None, command=("/nowhere/start",), seen=seen(WHOLE))
    async with admin_server(daemon, path=f"{folder}/s.sock"):
        code, out, _ = await recover(folder, "--dry-run")
    assert code == 1
    golden("recover", out)


async def test_with_a_scheduler_no_unit_is_named_or_waited_for(folder: Path, golden: Golden) -> None:
    """resume: {by: scheduler}: powerguard starts nothing, so a target without units is no closed gate."""
    daemon = back()
    daemon.returning = ReturnView(target=None, seen=seen(WHOLE))
    async with admin_server(daemon, path=f"{folder}/s.sock"):
        code, out, _ = await recover(folder, "--dry-run")
        assert code == 0
        golden("recover", out)
        answer = json.loads((await recover(folder, "--dry-run", "--json"))[1])
    assert answer["starts"] == {"target": None, "command": []}
    settings = (folder / "pg.yaml").read_text(encoding="utf-8")
    (folder / "pg.yaml").write_text(re.sub(r"(?m)^resume:.*$", "resume: {by: scheduler}", settings), encoding="utf-8")
    code, out, _ = await recover(folder, "--dry-run")
    assert (code, "systemctl start powerguard-resume.target" in out, "by hand" in out) == (4, False, False)
    assert "would start: nothing, because the scheduler starts training" in out
