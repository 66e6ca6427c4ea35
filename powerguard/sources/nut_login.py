"""The login at upsd: what a primary counts on, and what must never cost a reading."""

import asyncio
from typing import Final

from powerguard.clock import Clock
from powerguard.options import SecretError
from powerguard.protocols.nut import Answer, Err, NutError, Ok, encode
from powerguard.sources.nut_link import LateError, Link, LinkError
from powerguard.sources.nut_options import NutOptions

TRY_AGAIN_S: Final = 300.0
"""After a refused login, or a certificate that was not believed: the other end may have been put right."""
_NOT_NOW_S: Final = 1.0
_MOST_BREAKS: Final = 2
_AFTER_BREAKS_S: Final = 60.0
"""upsd asks the name service who logs in, where it was built with tcp wrappers, and answers nobody meanwhile: in an
outage that can take longer than a source may be silent."""
_NOT_NOW: Final = frozenset(("DATA-STALE", "DRIVER-NOT-CONNECTED"))


class Login:
    """Logs in once for each connection. The login ends with the connection; we never log out.

    problem: why upsd refuses it, in one line for the operator; "" while it does not. delayed: likewise, why it is not
    tried for a while. is_held: a primary waits for us.
    """

    def __init__(self, options: NutOptions, clock: Clock) -> None:
        """Say nothing yet."""
        self.problem = ""
        self.delayed = ""
        self.is_held = False
        self._options = options
        self._clock = clock
        self._is_sent = False
        self._at_s = 0.0
        self._breaks = 0

    def begin(self) -> None:
        """Start anew with a new connection; later, where logging in has cost the last ones: readings come first."""
        self.problem, self.is_held, self._is_sent = "", False, False
        self._at_s = 0.0 if self._breaks < _MOST_BREAKS else self._clock() + _AFTER_BREAKS_S

    def is_worth_a_new_connection(self) -> bool:
        """Whether a refused login may be tried again: upsd takes one password for each connection."""
        return bool(self.problem) and not self.is_held and self._clock() >= self._at_s

    def is_due(self) -> bool:
        """Whether there is a login to be made now."""
        return self._options.user is not None and not self.is_held and not self.problem and self._clock() >= self._at_s

    async def make(self, link: Link, *, limit_s: float) -> None:
        """Log in, or find out why not (`problem`); where upsd cannot say now, it is due again in a second."""
        self._at_s = self._clock() + TRY_AGAIN_S
        try:
            await self._make(link, limit_s)
        except (SecretError, NutError) as error:
            self.problem = f"no login: {error}"
        except (LateError, LinkError) as error:
            self._at_s = self._clock() + _NOT_NOW_S
            self._breaks += 1
            if self._breaks >= _MOST_BREAKS:
                how = "is not answered" if isinstance(error, LateError) else "ends the connection"
                self.delayed = (
                    f"the login {how}, and is tried again in {_AFTER_BREAKS_S:g} s only: readings come first, and a "
                    "primary does not wait for this host (do upsd's host access checks wait for the name service?)"
                )
        else:
            self._breaks, self.delayed = 0, ""

    async def _make(self, link: Link, limit_s: float) -> None:
        options = self._options
        if not self._is_sent and options.user is not None and options.password is not None:
            password = (await asyncio.to_thread(options.password.read)).decode("utf-8", "surrogateescape")
            requests = (encode("USERNAME", options.user), encode("PASSWORD", password))
            self._is_sent = True
            for answer in await link.ask(*requests, limit_s=limit_s):
                if not isinstance(answer, Ok):
                    self.problem = f"user and password are not taken ({_code(answer)})"
                    return
        answer = (await link.ask(encode("LOGIN", options.name), limit_s=limit_s))[0]
        if isinstance(answer, Err) and answer.code in _NOT_NOW:
            self._at_s = self._clock() + _NOT_NOW_S
            return
        if not isinstance(answer, Ok) and _code(answer) != "ALREADY-LOGGED-IN":  # by a request that we gave up on
            self.problem = (
                f"login as {options.user} is refused ({_code(answer)}): check password and the upsmon line in "
                "upsd.users; readings go on, but a primary does not wait for this host"
            )
            return
        self.is_held = True
        if options.role == "primary":
            await self._become_primary(link, limit_s)

    async def _become_primary(self, link: Link, limit_s: float) -> None:
        answer: Answer = Err("")
        for word in ("PRIMARY", "MASTER"):  # NUT before 2.8.0 knows only the second
            answer = (await link.ask(encode(word, self._options.name), limit_s=limit_s))[0]
            if isinstance(answer, Ok):
                return
        self.problem = (
            f"{self._options.user} is logged in and may not be primary ({_code(answer)}): write `upsmon primary` in "
            "upsd.users"
        )


def _code(answer: Answer) -> str:
    return answer.code if isinstance(answer, Err) else "an answer that makes no sense"
