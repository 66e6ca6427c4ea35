"""A name service for event loops that answers, or never does."""

import asyncio
from typing import Any


class NameService(asyncio.SelectorEventLoop):
    """A name service that answers while `found` is set, and else never; each look-up takes a thread for as long."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] | None = None
        self.asked = 0

    async def getaddrinfo(self, *_: object, **__: object) -> list[Any]:
        """Answer, or never."""
        self.asked += 1
        if self.found is None:
            await asyncio.Event().wait()
        return self.found or []
