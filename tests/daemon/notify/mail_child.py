"""Run as `unshare -n -u -m python mail_child.py FOLDER KIND`: a host without DNS sends a mail; prints the JSON answer.

The resolver's server takes questions and answers none. The process is killed at LIMIT_S[KIND], as the daemon does it.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Sink

LIMIT_S = {"mail": 15.0, "apprise": 19.0}
"""More than a busy machine needs, and far less than the 60 s until this resolver gives up. Apprise is slow to load."""


def main(folder: Path, kind: str) -> None:
    resolver, hosts = folder / "resolv.conf", folder / "hosts"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:30\n")
    hosts.write_text("127.0.0.1 localhost\n")
    for argv in (
        ("ip", "link", "set", "lo", "up"),
        ("hostname", "gpu1"),
        ("mount", "--bind", str(resolver), "/etc/resolv.conf"),
        ("mount", "--bind", str(hosts), "/etc/hosts"),
    ):
        subprocess.run(argv, check=True)
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 53))
    server = Controller(Sink(), hostname="127.0.0.1", port=2525, server_hostname="mail.example", ready_timeout=60.0)
    server.start()
    options = {"sender": "a@b.example", "to": ["c@d.example"], "ca_file": None, "tls": "none", "user": None}
    message = {"title": "t", "at": 0.0, "host": "gpu1", "key": "k", "id": "1", "event": "e", "text": "x"}
    request = {
        "kind": kind,
        "message": {**message, "level": "info", "status": "end"},
        "limit_s": LIMIT_S[kind],
        "options": {**options, "host": "127.0.0.1", "port": 2525},
        "secret": "mailto://127.0.0.1:2525?from=a@b.example&to=c@d.example&mode=insecure",
    }
    argv = [sys.executable, "-P", "-m", "powerguard.daemon.notify.child"]
    try:
        ended = subprocess.run(argv, input=json.dumps(request).encode(), stdout=-1, timeout=LIMIT_S[kind], check=True)
        print(ended.stdout.decode())
    except subprocess.TimeoutExpired:
        print(json.dumps({"ok": False, "answer": "killed"}))
    server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
