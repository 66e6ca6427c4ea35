"""Five secrets, made up and unique, through a whole outage with faults: none of them shows anywhere."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from tests.e2e.peers import Mischief, Trainer
from tests.e2e.rig import LIMIT_S, Rig, rig
from tests.peers.sim_bmc import SimBmc
from tests.peers.snmp_agent import Fault, SimUser, SnmpAgent


class Watcher:
    """Looks over the shoulder of the daemon and of every process that it starts, all the time.

    found: (process name, which file, secret) of everything that showed. seen: numbers of the processes looked at.
    looked_off: is made once the power-off was among them; until then the power-off waits.
    """

    def __init__(self, secrets_: dict[str, str], looked_off: Path) -> None:
        self._secrets = secrets_
        self._looked_off = looked_off
        self.found: set[tuple[str, str, str]] = set()
        self.seen: set[int] = set()

    def look(self, root: int) -> None:
        for pid in _family(root):
            with contextlib.suppress(OSError):
                for name in ("cmdline", "environ"):
                    content = Path(f"/proc/{pid}/{name}").read_bytes()
                    for what, secret in self._secrets.items():
                        if secret.encode() in content:
                            self.found.add((str(pid), name, what))
                    if str(self._looked_off).encode() in content:
                        self._looked_off.touch()
                self.seen.add(pid)


def _family(root: int) -> list[int]:
    """A process and everything that it has started, however deep."""
    family = [root]
    for pid in family:
        with contextlib.suppress(OSError):  # Whoever ends meanwhile: the next look comes at once.
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                family += [int(child) for child in task.read_text().split()]
    return family


@contextlib.asynccontextmanager
async def watching(world: Rig, watcher: Watcher) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            if world.process is not None and world.process.returncode is None:
                watcher.look(world.process.pid)
            await asyncio.sleep(0.005)

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def polled_with(agent: SnmpAgent, fault: Fault, world: Rig) -> None:
    """Let the card misbehave for some polls."""
    agent.fault, before = fault, agent.requests
    await world.until(lambda: agent.requests > before + 2, "some polls")


async def test_no_secret_shows_anywhere() -> None:
    """Not in an argument or the environment of any process, not in log, journal, metrics or status; faults included."""
    hidden = {
        name: f"{name}-{secrets.token_hex(4)}"[:20]
        for name in ("auth-key", "priv-key", "bmc-pass", "token-one", "token-two")
    }
    user = SimUser("pg", hidden["auth-key"].encode(), hidden["priv-key"].encode())
    good, bad = Trainer("good", write_s=0.5), Trainer("bad", mischief=Mischief.REFUSES)
    good.token, bad.token = hidden["token-one"], hidden["token-two"]
    async with rig(good, bad, user=user) as world, SimBmc("powerguard", hidden["bmc-pass"]) as bmc:
        assert world.agent is not None
        keys = {"auth": world.secret("auth", hidden["auth-key"]), "priv": world.secret("priv", hidden["priv-key"])}
        world.add_snmp(world.agent.port, version=3, user="pg", **keys)
        password = world.secret("bmc", hidden["bmc-pass"])
        for trainer, name in zip(world.settings["trainers"], ("token-one", "token-two"), strict=True):
            trainer["token"] = world.secret(name, hidden[name])
        world.settings["bmc"] = {
            "kind": "ipmi-lan",
            "host": bmc.host,
            "port": bmc.port,
            "user": "powerguard",
            "password": password,
        }
        world.settings["log"]["level"] = "debug"
        # Two texts that do show, or the watcher would be blind.
        shown_texts = {"argument": str(world.config), "variable": "canary-of-the-tests"}
        watcher = Watcher({**hidden, **shown_texts}, world.folder / "looked")
        wait = ["sh", "-c", 'until test -e "$0"; do sleep 0.05; done; exec "$@"', str(world.folder / "looked")]
        world.settings["host"]["command"] = [*wait, *world.settings["host"]["command"]]
        async with watching(world, watcher):
            await world.start(env={"POWERGUARD_CANARY": "canary-of-the-tests"})
            await bmc.wait_until(lambda: bmc.policy == "always-on", LIMIT_S)
            for fault in (Fault.GARBAGE, Fault.TRUNCATED, Fault.NONE):
                await polled_with(world.agent, fault, world)
            # A password that the BMC refuses: a fault that is told, and the password does not show.
            world.secret("bmc", hidden["bmc-pass"][::-1])
            world.ups.utility = False
            await world.off()
            await world.note("power_off_accepted")
        assert good.refused == bad.refused == 0
        assert len(good.checkpoints) == 1
        assert len(watcher.seen) >= 3, "the daemon, the IPMI worker and the power-off were looked at"
        assert {(name, what) for _, name, what in watcher.found} == {("cmdline", "argument"), ("environ", "variable")}
        shown = {
            "log": world.log_path.read_bytes(),
            "settings": world.config.read_bytes(),
            **{path.name: path.read_bytes() for path in world.journal.parent.iterdir()},
        }
        for path in ("/metrics", "/api/v1/status", "/api/v1/plan", "/readyz", "/healthz"):
            code, text = await world.get(path)
            assert code in (200, 503)
            shown[path] = text.encode()
        turned = {**hidden, "the refused password": hidden["bmc-pass"][::-1]}
        assert [
            (where, what) for where, text in shown.items() for what, secret in turned.items() if secret.encode() in text
        ] == []
        assert world.notes("action_failed", action="EnsurePolicy"), "the refused password was a fault that is told"
        world.no_traceback()
