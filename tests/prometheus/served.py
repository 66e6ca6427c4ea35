"""Prometheus and Alertmanager as processes of a test, on free ports of the loopback."""

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.peers import UNPACKED, require


@contextlib.contextmanager
def _running(program: str, command: Sequence[str], port: int, folder: Path) -> Iterator[str]:
    log = folder / f"{program}.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                    break
                assert process.poll() is None, log.read_text(encoding="utf-8")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


@contextlib.contextmanager
def prometheus(config: Path, data: Path, port: int) -> Iterator[str]:
    """Run Prometheus; yield its address."""
    command = [
        require("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with _running("prometheus", command, port, config.parent) as url:
        yield url


def _with_templates() -> list[str]:
    """Return what to run Debian's Alertmanager by: unpacked, it looks for its templates where they would be installed.

    In a mount namespace of its own /usr/share holds them, and nothing else; the machine does not change.
    """
    unpacked = UNPACKED / "prometheus-alertmanager" / "usr" / "share" / "prometheus"
    if Path("/usr/share/prometheus/alertmanager").exists() or not unpacked.exists():
        return []
    script = 'mount -t tmpfs none /usr/share && cp -r "$0" /usr/share/ && exec "$@"'
    return [require("unshare"), "--user", "--map-root-user", "--mount", "sh", "-c", script, str(unpacked)]


@contextlib.contextmanager
def alertmanager(config: Path, data: Path, port: int) -> Iterator[str]:
    """Run Alertmanager alone, without a cluster; yield its address."""
    command = [
        *_with_templates(),
        require("prometheus-alertmanager"),
        f"--config.file={config}",
        f"--storage.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with _running("prometheus-alertmanager", command, port, config.parent) as url:
        yield url
