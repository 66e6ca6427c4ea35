"""An Event for the training thread: an interrupt while it is set or awaited leaves no lock behind."""

from threading import Condition, Event, Lock


class Flag(Event):
    """As threading.Event; which enters a Condition by `with`, and a Ctrl-C between that one's lines keeps its lock."""

    def __init__(self) -> None:
        super().__init__()
        self._plain = Lock()
        self._news = Condition(self._plain)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._plain:
            self._is_set = True
            self._news.notify_all()

    def clear(self) -> None:
        with self._plain:
            self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or timeout seconds have passed; return whether it is."""
        with self._plain:
            if not self._is_set:
                self._news.wait(timeout)
            return self._is_set
