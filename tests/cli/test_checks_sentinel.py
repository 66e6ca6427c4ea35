"""What doctor says of a sentinel on this host: nothing where there is none, FAIL where one is meant and not there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from powerguard.cli.doctor.comeback import sentinel_findings
from powerguard.effectors.child import Ended

SAMPLE = (Path(__file__).parents[2] / "config" / "sentinel.yaml").read_text(encoding="utf-8")


def systemctl(active: str, at_boot: str, *, status: int = 0) -> object:
    async def spawn(
        argv: Sequence[str], *, limit_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Ended:
        del stdin, env
        assert (argv[-1], limit_s <= 2.0) == ("powerguard-sentinel.service", True)
        text = f"ActiveState={active}\nUnitFileState={at_boot}\n".encode()
        return Ended(returncode=status, stdout=text, stderr=b"", timed_out=False)

    return spawn


@pytest.mark.parametrize(
    ("settings", "spawn", "verdict", "words"),
    [
        (None, systemctl("inactive", ""), None, ""),
        (SAMPLE, systemctl("inactive", "disabled"), "FAIL", "does not run: hosts that rely on it stay off"),
        (SAMPLE, systemctl("failed", "enabled"), "FAIL", "does not run"),
        (SAMPLE, systemctl("active", "disabled"), "FAIL", "does not start at boot"),
        (SAMPLE, systemctl("active", "enabled"), "WARN", "runs in dry-run"),
        (SAMPLE.replace("mode: dry-run", "mode: armed"), systemctl("active", "enabled"), "PASS", "it runs"),
        (SAMPLE, systemctl("", "", status=1), "WARN", "cannot ask systemd"),
        ("mode: maybe\n", systemctl("active", "enabled"), "FAIL", "mode"),
    ],
)
async def test_what_is_said_of_it(
    tmp_path: Path, settings: str | None, spawn: object, verdict: str | None, words: str
) -> None:
    path = tmp_path / "sentinel.yaml"
    if settings is not None:
        path.write_text(settings, encoding="utf-8")
    found = await sentinel_findings(spawn=spawn, settings=path)  # type: ignore[arg-type]
    assert [each.verdict for each in found] == ([] if verdict is None else [verdict])
    assert all(words in each.text and (each.fix or each.verdict == "PASS") for each in found)
