"""Debian's Alertmanager on a free port. Unpacked, it runs where its templates lie over /usr/share, in a namespace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from tests.peers import UNPACKED, absent, require
from tests.peers.ports import free_port

PROGRAM = "prometheus-alertmanager"
TEMPLATE = Path("/usr/share/prometheus/alertmanager/default.tmpl")
ROUTES = "route: {receiver: none}\nreceivers: [{name: none}]\n"


def command(folder: Path, port: int) -> list[str]:
    """Write its settings; return how it is started."""
    config = folder / "alertmanager.yml"
    config.write_text(ROUTES, encoding="utf-8")
    argv = [
        require(PROGRAM),
        f"--config.file={config}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    if not TEMPLATE.exists():
        share = UNPACKED / PROGRAM / "usr/share"
        mount = f"mount -t overlay overlay -o lowerdir={share}:/usr/share /usr/share"
        argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *argv]
    return argv


@contextlib.asynccontextmanager
async def alertmanager(folder: Path) -> AsyncIterator[str]:
    """Run it without peers and receivers; yields its URL."""
    port = free_port()
    argv = command(folder, port)
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                if process.returncode is not None or await _is_ready(session, url):
                    break
                await asyncio.sleep(0.1)
        if process.returncode is not None:
            absent(f"{PROGRAM} that starts (its templates are at {TEMPLATE.parent}, or may be mounted there)")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/-/ready") as answer:
            return answer.status == 200
    return False
