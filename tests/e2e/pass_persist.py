"""The other end of snmpd's `pass_persist`: serves a table that a test keeps writing, in snmpd.conf(5)'s line protocol.

pass_persist.py TABLE       TABLE: JSON, {"1.3.6....": ["gauge", "5"]}, replaced whole and at once
"""

import json
import sys
from pathlib import Path


def key(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.strip(".").split("."))


def main() -> None:
    path = Path(sys.argv[1])
    while command := sys.stdin.readline().strip():
        answer = "NONE"
        if command == "PING":
            answer = "PONG"
        else:
            asked = sys.stdin.readline().strip().strip(".")
            table = json.loads(path.read_text(encoding="ascii"))
            if command == "getnext":
                later = [name for name in table if key(name) > key(asked)]
                asked = min(later, key=key, default="")
            if command in ("get", "getnext") and asked in table:
                kind, value = table[asked]
                answer = f".{asked}\n{kind}\n{value}"
            elif command == "set":
                sys.stdin.readline()
                answer = "not-writable"
        print(answer, flush=True)


main()
