"""What the tests of the snmp source share: options, secrets in files, simulated cards of both families."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from powerguard.options import Secret
from powerguard.sim import snmp_values as sim
from powerguard.sim.snmp_values import SimValue
from powerguard.ups.profiles.vocabulary import Answer, Missing, Oid
from powerguard.ups.profiles.walk import parse_walk
from powerguard.ups.snmp.options import SnmpOptions
from powerguard.ups.snmp.port import CardPort
from tests.peers.snmp_agent import OnSet, SimUser, SnmpAgent

A = "1.3.6.1.4.1.318.1.1.1"
U = "1.3.6.1.2.1.33.1"
WALKS = Path(__file__).parents[1] / "profiles" / "walks"


def walk(name: str) -> dict[str, Answer]:
    path = WALKS / f"{name}.walk"
    return parse_walk(path.read_text(encoding="utf-8"), path.name)


def as_sim(answer: Answer) -> SimValue:
    match answer:
        case Oid():
            return sim.oid(answer)
        case bytes():
            return sim.octets(answer)
        case Missing():
            return sim.NULL_VALUE
        case int():
            return sim.integer(answer) if answer < 2**31 else sim.gauge(answer)


def table(name: str) -> dict[str, SimValue]:
    """Return a made walk as a card serves it; change it, and the card's next answer changes."""
    return {oid: as_sim(answer) for oid, answer in walk(name).items()}


def secret(folder: Path, name: str, text: str) -> Secret:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o400)
    return Secret(file=str(path))


def options(port: int, **more: object) -> SnmpOptions:
    return SnmpOptions.model_validate({"kind": "snmp", "host": "127.0.0.1", "port": port, "timeout_s": 0.5, **more})


@asynccontextmanager
async def port_to(agent: SnmpAgent, *, retries: int = 0, **more: object) -> AsyncIterator[CardPort]:
    """Open a port with the longest time-out: a test of silence sets one of its own."""
    port = CardPort(options(agent.port, **{"timeout_s": 5.0, **more}), retries=retries)
    try:
        yield port
    finally:
        await port.close()


class NarrowCard(SnmpAgent):
    """Drops every request with more objects than `most`, as a CyberPower UPS-IPCARD does with 1."""

    def __init__(self, values: dict[str, SimValue], most: int, **more: object) -> None:
        super().__init__(lambda: values, **more)  # type: ignore[arg-type]
        self.most = most

    def _respond(self, pdu: Any, *, v1: bool, may_write: bool) -> Any:  # noqa: ANN401 - the agent's own type is private
        return super()._respond(pdu, v1=v1, may_write=may_write) if len(pdu.varbinds) <= self.most else None


@asynccontextmanager
async def card(
    values: dict[str, SimValue], *, user: SimUser | None = None, on_set: OnSet | None = None, seed: int = 0
) -> AsyncIterator[SnmpAgent]:
    async with SnmpAgent(lambda: values, user=user, on_set=on_set, seed=seed) as agent:
        yield agent
