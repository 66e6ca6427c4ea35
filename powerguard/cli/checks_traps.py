"""What doctor says of the trap port, as the running daemon tells it."""

from typing import Any, Final

from powerguard.effectors.host_findings import Finding

_GUIDE: Final = "docs/guides/traps.md"
_ODD: Final = {
    "unknown_sender": (
        "came from addresses of no UPS here",
        "name them in traps.addresses, or the card's host as it is",
    ),
    "wrong_community": ("had another community", "set the card's trap community as traps.community"),
    "unknown_engine": ("came from engine ids that are not in the settings", f"traps.users.engines: {_GUIDE}"),
    "unknown_user": ("came from users that are not in the settings", "name the card's trap user in traps.users"),
    "not_authentic": ("were not authentic", "give traps.users the card's passphrase and protocol"),
    "out_of_time": ("were out of their time window", "restart the card, or let it send informs"),
    "undecipherable": ("could not be deciphered", "give traps.users the card's privacy passphrase and protocol"),
}


def trap_findings(traps: dict[str, Any] | None) -> list[Finding]:
    """Return what to say of the port; nothing where the settings have none. traps: of the status object."""
    if traps is None:
        return []
    where = traps["listen"]
    if not traps["listening"]:
        text = f"not listening at {where}: {traps['because']}; polls go on, a trap does not hasten one"
        return [Finding("traps", "WARN", text, f"see traps.listen and traps.port ({_GUIDE})")]
    results = traps["results"]
    found = [
        Finding("traps", "WARN", f"{results[word]} datagrams {text}", fix)
        for word, (text, fix) in _ODD.items()
        if results.get(word) and not results["hint"]
    ]
    if found:
        return found
    if not results["hint"]:
        text = f"listening at {where}; no trap of a UPS has come yet"
        return [Finding("traps", "PASS", text, f"send a test trap from the card ({_GUIDE})")]
    return [Finding("traps", "PASS", f"listening at {where}; {results['hint']} traps made us poll")]
