"""`powerguard notify`: the targets of messages, what waits for them, and a test message."""

import argparse
import json
from typing import Any

from powerguard.cli.client import DownError, RefusedError, add_options, get, post
from powerguard.cli.render import Paint, clean, duration, fold, moment, table, waiting
from powerguard.cli.shared import EX_DOWN, EX_REFUSED, fail

TEST_S = 65.0
"""The daemon gives each target its own `limit_s`: 10 s unless set, and 60 s at most."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the verb to the command line."""
    parser.description = (
        "Show the targets of messages and what waits for them, or send a test message. "
        "Exit 0: all is well; 1: a target was not reached; 4: the daemon is down."
    )
    verbs = parser.add_subparsers(dest="notify_verb", metavar="test|list|pending", required=True)
    test = verbs.add_parser(
        "test",
        help="send a test message",
        description="Have the daemon send a test message, and show what the other side has answered.",
    )
    test.add_argument("target", nargs="?", default="", metavar="TARGET", help="one target (default: all)")
    shown = verbs.add_parser("list", help="show the targets", description="Show each target and its last delivery.")
    pending = verbs.add_parser(
        "pending", help="show what waits", description="Show the messages that wait for delivery, the oldest first."
    )
    for each in (test, shown, pending):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")
        add_options(each)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    try:
        if args.notify_verb == "test":
            with waiting("each target has its limit_s to answer", quiet=args.json):
                response = post(args, "notify-test", {"target": args.target}, TEST_S)
            return _test(args, response)
        response = get(args, "/api/v1/notify")
    except DownError as error:
        return fail(args, "notify", str(error), EX_DOWN)
    except RefusedError as error:
        return fail(args, "notify", str(error), EX_REFUSED)
    if args.json:
        print(json.dumps(response, indent=2, ensure_ascii=False))
    else:
        print("\n".join(fold(_pending(response) if args.notify_verb == "pending" else _list(response))))
    return EX_REFUSED if any(target["since"] is not None for target in response["targets"]) else 0


def _test(args: argparse.Namespace, response: dict[str, Any]) -> int:
    if args.json:
        print(json.dumps(response, indent=2, ensure_ascii=False))
    else:
        paint = Paint()
        for each in response["results"]:
            word = paint("delivered", "green") if each["delivered"] else paint("FAILED", "red")
            print("\n".join(fold([f"{clean(each['target'])}: {word}: {clean(each['answer'])}"])))
    return 0 if all(each["delivered"] for each in response["results"]) else EX_REFUSED


def _list(response: dict[str, Any]) -> list[str]:
    if not response["targets"]:
        return ["no target: outages cause no message (notify.targets in the settings)"]
    rows: list[tuple[str, ...]] = [("target", "kind", "delivered", "failed", "waiting", "last answer")]
    for each in response["targets"]:
        answer = clean(each["answer"]) or "nothing sent yet"
        if each["since"] is not None:
            answer = f"FAILING for {duration(response['at'] - each['since'])}: {answer}"
        counts = (str(each[key]) for key in ("delivered", "failed", "queued"))
        rows.append((clean(each["name"]), clean(each["kind"]), *counts, answer))
    trouble = [f"messages may be lost: {clean(response['trouble'])}"] if response["trouble"] else []
    return [*table(rows), *trouble]


def _pending(response: dict[str, Any]) -> list[str]:
    rows = [("target", "since", "message")]
    rows += [(clean(each["target"]), moment(each["at"]), clean(each["title"])) for each in response["pending"]]
    left = sum(each["queued"] for each in response["targets"]) - len(response["pending"])
    more = [f"and {left} more"] if left > 0 else []
    return [*table(rows), *more] if len(rows) > 1 else ["nothing waits"]
