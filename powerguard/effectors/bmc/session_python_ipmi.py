"""A login through python-ipmi's own RMCP+ client, in the worker's process alone (decision 0168).

It has timeouts of its own; what decision 0010 gives beside them (a deadline for the whole operation, a secret that is
nowhere but on stdin) it needs as well.
"""

import logging
from typing import Final

import pyipmi
from pyipmi.errors import AuthenticationError, CompletionCodeError, MessageStatusCodeError, RetryError
from pyipmi.interfaces.rmcpplus import RmcpPlus

from powerguard.effectors.bmc.exchange import BmcFailure, Session, silence
from powerguard.effectors.bmc.ipmi import Command, Failure

_BMC: Final = pyipmi.Target(ipmb_address=0x20)
_ANSWER_S: Final = 1.0
"""After so long a packet is sent again; a late answer to the first one still counts."""
_RETRIES: Final = 30
"""More than any limit of ours has room for: the worker's deadline ends it, and says what was waited for."""

_STATUS: Final = {
    0x01: Failure.BUSY,
    0x0B: Failure.BUSY,
    0x09: Failure.PRIVILEGE,
    0x0A: Failure.PRIVILEGE,
    0x0D: Failure.AUTH,
    0x0F: Failure.AUTH,
}
"""RMCP+ status codes of a refused login (IPMI 2.0 table 13-15): no resources, role, name and password."""


class _Interface(RmcpPlus):
    """Without the RMCP ping before the login: IPMI over LAN does not need it, and some BMCs do not answer it."""

    def ping(self) -> None:
        """Send nothing."""


def log_in(host: str, port: int, user: bytes, password: bytes) -> Session:
    """Log in as Operator, with cipher suite 17 or else 3. Raises BmcFailure, and whatever python-ipmi lets escape."""
    logging.disable()  # it formats its session, password included, into a debug record
    interface = _Interface(keep_alive_interval=0, max_retries=_RETRIES)
    connection = pyipmi.create_connection(interface)
    connection.session.set_session_type_rmcp(host, port=port)
    connection.session.set_auth_type_user(user, password)
    connection.session.set_priv_level("operator")
    interface.open()
    interface.set_timeout(_ANSWER_S)
    try:
        connection.session.establish()
    except ConnectionRefusedError:
        raise BmcFailure(Failure.UNREACHABLE, "nothing listens on that UDP port") from None
    except (RetryError, TimeoutError):
        raise BmcFailure(Failure.UNREACHABLE, "no answer to the login") from None
    except AuthenticationError as error:
        raise BmcFailure(Failure.AUTH, str(error)) from None
    except MessageStatusCodeError as error:
        raise BmcFailure(_STATUS.get(error.msc, Failure.PROTOCOL), str(error)) from None
    except CompletionCodeError as error:  # of Set Session Privilege Level, which is part of the login
        raise BmcFailure(Failure.PRIVILEGE, str(error)) from None

    def send(command: Command) -> tuple[int, bytes]:
        try:
            told = interface.send_and_receive_raw(_BMC, 0, command.netfn, bytes([command.number]) + command.data)
        except (RetryError, TimeoutError, ConnectionRefusedError):
            raise silence(command) from None
        return told[0], bytes(told[1:])

    return Session(send, connection.session.close)
