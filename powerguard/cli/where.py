"""Where the daemon of the named settings is: its socket, its port, its journal. Loaded only where settings are named.

A command that looks at the default socket while the daemon of `--config FILE` listens at another one would call a
host unprotected that is well.
"""

import argparse
from pathlib import Path

from powerguard.settings.load import SettingsError, load

_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - who listens everywhere is asked on this host


def settle(args: argparse.Namespace) -> str:
    """Fill in what the command line left open of socket, port and journal. Return what is wrong with the settings."""
    try:
        settings = load(Path(args.config))
    except SettingsError as error:
        return "; ".join(error.problems)
    if args.socket is None:
        args.socket = str(settings.control.socket)
        listen = settings.http.listen
        args.daemon_url = f"http://{_ANY.get(listen, f'[{listen}]' if ':' in listen else listen)}:{settings.http.port}"
    if getattr(args, "journal", "") is None:
        args.journal = str(settings.journal.path)
    return ""
