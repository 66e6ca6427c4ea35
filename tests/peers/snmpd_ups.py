"""A UPS's control group behind net-snmp's snmpd: its pass_persist protocol (snmpd.conf(5)) on standard input.

snmpd_ups.py LOG CONDUCT. LOG: each SET that was taken, as "OBJECT VALUE". CONDUCT: obeys; whole (a countdown drops by
1 after each whole second), stuck (a countdown keeps its value), late (the countdown to off shows -1 until there is a
file "shown" in LOG's folder), halves (the countdown to off runs with half of the value); refuses (every SET),
refuses-N, wrong-N and hangs-N (the SET of upsControl N: refused as not writable, as a wrong value, never answered).
The standard library alone: snmpd starts it with an environment of its own.
"""

import sys
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path

BASE = ".1.3.6.1.2.1.33.1.8"


class Card:
    """upsShutdownType, the two countdowns and upsAutoRestart."""

    def __init__(self, log: Path, conduct: str) -> None:
        self.log = log
        self.conduct = conduct
        self.fixed = {1: 1, 5: 1}
        self.value: dict[int, int] = {}
        self.ends_s: dict[int, float] = {}

    def get(self, number: int) -> int:
        if number in self.fixed:
            return self.fixed[number]
        if number not in self.ends_s:
            return -1
        left_s = self.ends_s[number] - time.monotonic()
        match self.conduct:
            case "whole":
                left_s = ceil(left_s)
            case "stuck":
                left_s = self.value[number]
            case "late" if number == 2 and not self.log.with_name("shown").exists():
                return -1
        return int(left_s) if left_s > 0 else -1

    def set(self, number: int, value: int) -> str:
        """Take one SET, and answer as the protocol wants it."""
        how, _, which = self.conduct.partition("-")
        if not which or int(which) == number:
            if how == "refuses":
                return "not-writable"
            if how == "wrong" and value >= 0:
                return "wrong-value"
            if how == "hangs":
                time.sleep(4)
        if number in self.fixed:
            self.fixed[number] = value
        elif value < 0:
            self.ends_s.pop(number, None)
        else:
            self.value[number] = value // 2 if self.conduct == "halves" and number == 2 else value
            self.ends_s[number] = time.monotonic() + self.value[number]
        with self.log.open("a", encoding="ascii") as log:
            log.write(f"{number} {value}\n")
        return "DONE"


def main() -> None:
    card = Card(Path(sys.argv[1]), sys.argv[2])
    lines = iter(sys.stdin.readline, "")
    for line in lines:
        command = line.strip()
        if command == "PING":
            print("PONG", flush=True)
        elif command in {"get", "getnext", "set"}:
            print(answer(card, command, next(lines).strip(), lines_of=lines), flush=True)


def answer(card: Card, command: str, oid: str, *, lines_of: Iterator[str]) -> str:
    """Answer one request: the object, its type and its value, each on a line."""
    value = next(lines_of).strip() if command == "set" else ""
    numbers = [1, 2, 3, 5]
    if command == "getnext":
        later = [number for number in numbers if _key(f"{BASE}.{number}.0") > _key(oid)]
        if not later:
            return "NONE"
        number = later[0]
    else:
        parts = oid.removeprefix(BASE + ".").split(".")
        if not oid.startswith(BASE + ".") or len(parts) != 2 or parts[1] != "0" or int(parts[0]) not in numbers:
            return "NONE"
        number = int(parts[0])
    if command == "set":
        return card.set(number, int(value.split(" ")[1]))
    return f"{BASE}.{number}.0\ninteger\n{card.get(number)}"


def _key(oid: str) -> tuple[int, ...]:
    return tuple(int(part) for part in oid.strip(".").split("."))


if __name__ == "__main__":
    main()
