"""A login through pyghmi, in the worker's process alone (decision 0010)."""

import hashlib
from collections.abc import Callable
from typing import Any, Final

from pyghmi.exceptions import IpmiException
from pyghmi.ipmi.command import Command as Connection
from pyghmi.ipmi.private.session import Session as PyghmiSession

from powerguard.effectors.bmc.exchange import BmcFailure, Session, silence
from powerguard.effectors.bmc.ipmi import OPERATOR, Command, Failure

_TEXTS: Final = (
    ("incorrect password", Failure.AUTH),
    ("unauthorized name", Failure.AUTH),
    ("invalid integrity check value", Failure.AUTH),
    ("rakp4 integrity code", Failure.AUTH),
    ("unauthorized role", Failure.PRIVILEGE),
    ("invalid role", Failure.PRIVILEGE),
    ("privilege", Failure.PRIVILEGE),
    ("privelege", Failure.PRIVILEGE),
    ("insufficient resources", Failure.BUSY),
    ("session no longer connected", Failure.UNREACHABLE),
    ("timeout", Failure.UNREACHABLE),
)
"""Texts of pyghmi.ipmi.private (IPMI 2.0 table 13-15) that show how a login failed, in lower case."""


_SHA1: Final = bytes((0, 0, 0, 8, 1))
"""The authentication payload for RAKP-HMAC-SHA1, as in cipher suite 3 (IPMI 2.0 table 13-18)."""


def _heeding_the_answer(opened: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Return pyghmi's handler of the open-session answer, made to take the algorithms that the BMC names.

    pyghmi 1.6.19 goes on with the cipher suite that it asked for. The login at a BMC that answers a proposal of suite
    17 with suite 3, such as pyghmi's own server, then fails with "pack expected 32 items".
    """

    def taken(session: Any, data: Any) -> object:  # noqa: ANN401 - pyghmi has no types
        if data[1] == 0 and bytes(data[12:17]) == _SHA1:
            session.attemptedhash, session.currhashlib, session.currhashlen = 1, hashlib.sha1, 12
        return opened(session, data)

    return taken


PyghmiSession._got_rmcp_response = _heeding_the_answer(PyghmiSession._got_rmcp_response)  # noqa: SLF001


def log_in(host: str, port: int, user: bytes, password: bytes) -> Session:
    """Log in as Operator. Raises BmcFailure, and whatever pyghmi lets escape."""
    try:
        # Bytes, never str: with str a session leaks and blocks the next one.
        connection = Connection(bmc=host, userid=user, password=password, port=port, privlevel=OPERATOR)
    except IpmiException as error:
        raise _failure(str(error)) from None

    def send(command: Command) -> tuple[int, bytes]:
        try:
            reply = connection.raw_command(netfn=command.netfn, command=command.number, data=list(command.data))
        except IpmiException:
            raise silence(command) from None
        if reply is None or reply.get("error") == "timeout":
            raise silence(command)
        return int(reply["code"]), bytes(reply["data"])

    return Session(send, connection.ipmi_session.logout)


def _failure(text: str) -> BmcFailure:
    """Classify what pyghmi raises from a login. It has no text if there was no answer."""
    if text in ("", "None"):
        return BmcFailure(Failure.UNREACHABLE, "no answer to the login")
    for part, failure in _TEXTS:
        if part in text.lower():
            return BmcFailure(failure, text)
    return BmcFailure(Failure.PROTOCOL, text)
