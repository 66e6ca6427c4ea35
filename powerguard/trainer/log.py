"""The log of the library. A handler of the training's own that raises costs the entry, and no thread or checkpoint."""

import contextlib
import logging
from typing import Any


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls never raise."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:  # noqa: ANN401 - as logging has them
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **options})


log = _Log(logging.getLogger("powerguard.trainer"))
