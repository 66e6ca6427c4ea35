"""The command line: a module for each verb or family of verbs; only the module of the requested verb is imported.

`VERBS` lists the verbs. Those of a few lines are at the end of this file: run, sentinel, version, completion.

`powerguard event` is called by hooks while the power fails, and `powerguard status` by monitoring every minute: both
start in a few hundredths of a second, because this file, `client` and `render` import only a little of the standard
library.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any, Final, NamedTuple, NoReturn

from powerguard.cli.render import forget, say
from powerguard.cli.shared import (
    CONFIG,
    EX_CONFIG,
    EX_DOWN,
    EX_INTERRUPTED,
    EX_IOERR,
    EX_USAGE,
    SOCKET,
    MissingKeyError,
    fail,
    print_answer,
)


class Verb(NamedTuple):
    """A verb of the command line.

    text: its line of help. place: its module in powerguard/cli, "": the module has the verb's name; its functions are
    `register` and `run`, and after a colon stands what follows these names in a module of several verbs. asks: it asks
    the daemon of the settings, whose socket `client.settle` finds.
    """

    text: str
    place: str = ""
    asks: bool = False


VERBS: Final = {
    "run": Verb("run the daemon"),
    "status": Verb("show phase, battery, slack and trainers", asks=True),
    "plan": Verb("show the budget and what would happen next", place="plan.verb", asks=True),
    "battery": Verb("show what was learned of the battery; record a replacement", asks=True),
    "doctor": Verb("check every part in advance and print remedies", place="doctor.checks", asks=True),
    "discover": Verb("find UPSes and PDUs and print settings for them"),
    "abort": Verb("abort this outage's shutdown (before the commit point)", place="operate:_abort", asks=True),
    "maintenance": Verb("suspend the power-off for a while", place="operate:_maintenance", asks=True),
    "checkpoint": Verb("ask every trainer for a checkpoint now", place="operate:_checkpoint", asks=True),
    "recover": Verb("show what training waits for after a return, or start it now", asks=True),
    "checkpoints": Verb("list, verify, restore, export and prune checkpoints", place="checkpoints.verb"),
    "seal": Verb("make a checkpoint folder of any framework safe against a power cut", place="checkpoints.seal"),
    "drill": Verb("rehearse an outage on this host and measure it", asks=True),
    "notify": Verb("list the targets of messages, and what waits; send a test message", asks=True),
    "event": Verb("request a poll (for the hooks of apcupsd and NUT)", asks=True),
    "install": Verb("install units, helpers and rules", place="install.verb"),
    "secret": Verb("enter a secret without showing it; list missing ones"),
    "uninstall": Verb("remove what install has installed", place="install.uninstall"),
    "sentinel": Verb("run on a management node: power registered hosts on after an outage"),
    "config": Verb("check or show the settings"),
    "import": Verb("convert a NUT or apcupsd configuration to settings", place="imports.verb"),
    "history": Verb("list the outages in the journal; export one", place="outages.history"),
    "report": Verb("report an outage: durations, forecast and fact, advice; as text or page", place="outages.report"),
    "explain": Verb("explain each step of an outage", place="outages.explain"),
    "replay": Verb("replay a recorded outage with today's decisions", place="outages.replay"),
    "demo": Verb("play three simulated outages in a minute; without settings, root or hardware"),
    "simulate": Verb("simulate thousands of outages"),
    "completion": Verb("print a completion script for bash, zsh or fish"),
    "scheduler": Verb("print the UPSes of the fleet as Slurm features and a topology file"),
    "snmp": Verb("read a UPS or rack PDU over SNMP and decode it", place="snmp.verb"),
    "version": Verb("print the version"),
}
_VALUED: Final = ("--config", "--socket")
_SECRETS: Final = {
    "-c": "--community-file",
    "--comm": "--community-file",
    "-A": "--auth-file",
    "--auth": "--auth-file",
    "-X": "--priv-file",
    "--priv": "--priv-file",
}
"""Options for secrets in net-snmp and NUT. Here they are refused: all users can read a command line."""
_WITH_SECRETS: Final = frozenset(("snmp", "discover"))
_DAEMONS: Final = ("run", "sentinel")
"""Verbs whose log and tracebacks go to the system journal."""
_CRITICAL: Final = 50
"""`logging.CRITICAL`, which this file does not import."""
_Functions = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
_SHARED: Final = (
    ("--config", "FILE", f"settings (default: {CONFIG})"),
    ("--socket", "PATH", f"the daemon's admin socket (default: from the settings, else {SOCKET})"),
)


class Parser(argparse.ArgumentParser):
    """argparse with the exit statuses of sysexits.h and one-line errors.

    Options cannot be abbreviated: a similar option may be another program's, with a secret value.
    """

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401 - argparse's own
        """Make it without abbreviations; its verbs are made by the same class."""
        super().__init__(**{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        """Print the error and the help command."""
        say(f"{self.prog}: {message}\nSee `{self.prog} --help`.")
        self.exit(EX_USAGE)


class Verbs:
    """The command line's parser, with the verbs that were asked for."""

    def __init__(self) -> None:
        """Make the part that all verbs share."""
        self.parser = Parser(
            prog="powerguard",
            description="When the power fails, training keeps its progress and the host comes back by itself.",
            epilog="powerguard VERB --help shows more. Exit 64: wrong options; 78: wrong settings.",
        )
        self.parser.add_argument("--version", action="store_true", help="print the version")
        for option, metavar, text in _SHARED:
            self.parser.add_argument(option, metavar=metavar, help=text)
        self.subparsers = self.parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    def add(self, verb: str) -> None:
        """Add one verb in full; its file is imported here."""
        register, run = _functions(verb)
        parser = self.subparsers.add_parser(verb, help=VERBS[verb].text)
        register(parser)
        parser.set_defaults(run=run)
        _share(parser)

    def list_all(self) -> None:
        """Add all verbs by name only: for the help page."""
        for name, verb in VERBS.items():
            self.subparsers.add_parser(name, help=verb.text)


def _share(parser: argparse.ArgumentParser) -> None:
    """Accept the common options after the verb, too, and after a verb of a verb."""
    for each in _with_verbs(parser):
        known = _own_options(each)
        for option, metavar, text in _SHARED:
            if option not in known:
                each.add_argument(option, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _with_verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a verb's parser, and those of the verbs of it."""
    yield parser
    for action in parser._actions:  # noqa: SLF001 - no other way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for each in action.choices.values():
                yield from _with_verbs(each)


def _own_options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}  # noqa: SLF001 - no other way


def _functions(verb: str) -> _Functions:
    """Return what adds the verb's options, and what carries it out; its module is imported here."""
    if verb in _SHORT:
        return _SHORT[verb]
    name, _, ending = (VERBS[verb].place or verb).partition(":")
    module = import_module(f"powerguard.cli.{name}")
    return getattr(module, f"register{ending}"), getattr(module, f"run{ending}")


def verb_in(argv: Sequence[str]) -> str | None:
    """Find the verb: the first word that is neither an option nor an option's value."""
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in _VALUED:
            skip = True
        elif not word.startswith("-"):
            return word
    return None


def _unknown(parser: Parser, verb: str) -> NoReturn:
    from difflib import get_close_matches

    near = get_close_matches(verb, VERBS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    parser.error(f"unknown verb {verb!r}{hint}; the verbs are {', '.join(VERBS)}")


def _refuse_secrets(parser: Parser, arguments: Sequence[str]) -> None:
    """Refuse a secret on the command line, before a message repeats it."""
    for argument in arguments:
        option = argument.partition("=")[0]
        known = "--comm" if "--community".startswith(option) and len(option) >= len("--comm") else option
        if known in _SECRETS:
            parser.error(f"{option}: put it into a file: {_SECRETS[known]} FILE (chmod 0400)")


def _names(unknown: Sequence[str]) -> str:
    """Return the unknown options, without their values; words only if there is no option."""
    options = [word.partition("=")[0] if word.startswith("--") else word[:2] for word in unknown if word[:1] == "-"]
    return " ".join(options or unknown)


def _near(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the option of this verb, or of a verb of it, that the first unknown one is close to."""
    from difflib import get_close_matches

    name = _names(unknown[:1])
    known = set[str]().union(*map(_own_options, _with_verbs(parser))) - {name}  # it may stand at the wrong verb
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status. Ctrl-C, a closed pipe or a full disk end without a traceback."""
    _steady()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        finally:
            # The output may still be in memory: a closed pipe would otherwise show only when Python ends.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    except BrokenPipeError:
        forget(sys.stdout)
        return 141  # the reader (head, less) has closed the pipe
    except OSError as error:
        if verb_in(arguments) in _DAEMONS:
            raise
        forget(sys.stdout)
        where = "standard output" if error.filename is None else error.filename
        say(f"powerguard: error: {where}: {error.strerror or error}")
        return EX_IOERR


def _steady() -> None:
    """Make the standard streams usable: the caller may have closed them, or they may lack a letter that we print."""
    # In this order each gets its own descriptor again, which a socket would otherwise take.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - light, and kept
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    """Find the verb and carry it out."""
    command: list[str] = []
    verb = verb_in(arguments)
    if verb == "event" and "--" in arguments:
        cut = arguments.index("--")
        arguments, command = arguments[:cut], arguments[cut + 1 :]
    if verb == "help":
        return _run([*(argument for argument in arguments if argument != "help"), "--help"])
    verbs = Verbs()
    if verb in _WITH_SECRETS or (verb is not None and verb not in VERBS):
        _refuse_secrets(verbs.parser, arguments)
    if verb is None:
        verbs.list_all()
    elif verb not in VERBS:
        _unknown(verbs.parser, verb)
    else:
        verbs.add(verb)
    args, unknown = verbs.parser.parse_known_args(arguments)
    if unknown:
        # argparse would name the whole program; the verb does not know the option.
        parser = verbs.subparsers.choices[verb] if verb is not None else verbs.parser
        what = "option" if any(argument.startswith("-") for argument in unknown) else "argument"
        parser.error(f"unknown {what} {_names(unknown)}{_near(parser, unknown)}")
    if args.version and verb is None:
        args.run, args.json = _version, False
    elif verb is None:
        verbs.parser.print_help(sys.stderr)
        return EX_USAGE
    args.command = command
    named = args.config or os.environ.get("POWERGUARD_CONFIG")
    args.config = named or CONFIG
    args.nowhere = ""
    if named and verb is not None and VERBS[verb].asks and (wrong := _settle(args)):
        args.nowhere = f"{wrong}, so the daemon's address is unknown: correct the settings or give --socket PATH"
        if verb != "event":  # a hook must not fail: it only reports this
            return fail(args, verb, args.nowhere, EX_CONFIG)
    try:
        with _without_log(str(verb)):
            return int(args.run(args))
    except MissingKeyError as error:
        why = f"the daemon does not report {error.args[0]}: it is older than this command"
        return fail(args, str(verb), f"{why} (systemctl restart powerguard, unless power is out)", EX_DOWN)


@contextmanager
def _without_log(verb: str) -> Iterator[None]:
    """Drop what the parts that a verb shares with the daemon log: structlog prints it on stdout by default.

    For verbs whose module imports such parts. Others load no library at all (tests/cli/test_weight.py).
    """
    structlog = None if verb in _DAEMONS else sys.modules.get("structlog")
    if structlog is None:
        yield
        return
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _settle(args: argparse.Namespace) -> str:
    """Look the daemon up in the named settings, unless the options give its address. Return the error."""
    is_open = args.socket is None or getattr(args, "journal", "") is None
    if not is_open or getattr(args, "url", None) is not None or getattr(args, "size", False):
        return ""
    from powerguard.cli.client import settle

    wrong = settle(args)
    # doctor reports it as a finding; with an explicit address the settings are not needed.
    return "" if args.verb == "doctor" or args.socket is not None else wrong


# --- The verbs of a few lines -----------------------------------------------------------------------------------------


def _register_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the daemon in the foreground. SIGTERM stops it, SIGHUP reloads the settings. "
        "Exit 0: stopped; 69: another one runs with these settings; 78: the settings are wrong."
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings")
    parser.add_argument("--dry-run", action="store_true", help="record the power-off instead of doing it, in any mode")


def _run_daemon(args: argparse.Namespace) -> int:
    from pathlib import Path

    from powerguard.daemon import wiring

    return wiring.main(Path(args.config), dry_run=args.dry_run)


def _register_sentinel(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a sentinel in the foreground: hosts register with it at their power-off, and "
        "it powers them on once utility is stable and their BMC reports that they are off. SIGTERM stops it. It has "
        "its own settings (sample: config/sentinel.yaml). Exit 0: stopped; 69: another one uses the same state; 78: "
        "the settings are wrong."
    )
    # Not the daemon's settings, which are the default elsewhere.
    parser.add_argument("--config", metavar="FILE", dest="file", required=True, help="the sentinel's own settings")
    parser.add_argument("--dry-run", action="store_true", help="only record what it would do, in any mode")
    parser.add_argument("--check", action="store_true", help="check the settings and end")


def _run_sentinel(args: argparse.Namespace) -> int:
    from pathlib import Path

    from powerguard.sentinel import main as sentinel

    return sentinel.main(Path(args.file), dry_run=args.dry_run, check=args.check)


def _register_version(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the version."
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _version(args: argparse.Namespace) -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("powerguard")
    except PackageNotFoundError:
        own = "unknown"
    result = {"schema_version": 1, "object": "version", "version": own, "python": platform.python_version()}
    print_answer(args, result, lambda: [f"powerguard {own} (Python {result['python']})"])
    return 0


def _register_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a completion script: `powerguard completion bash > /etc/bash_completion.d/powerguard`, "
        "`powerguard completion zsh > /usr/local/share/zsh/site-functions/_powerguard`, "
        "`powerguard completion fish > ~/.config/fish/completions/powerguard.fish`."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def _completion(args: argparse.Namespace) -> int:
    import shtab

    verbs = Verbs()
    for verb in VERBS:
        verbs.add(verb)
    for parser in _with_verbs(verbs.parser):
        parser.description = None  # fish and zsh show the line of help instead, which is short
        for action in parser._actions:  # noqa: SLF001 - no other way
            if action.metavar in _COMPLETED:
                action.complete = getattr(shtab, _COMPLETED[action.metavar])  # type: ignore[attr-defined]
    print(shtab.complete(verbs.parser, args.shell))
    return 0


_COMPLETED: Final[Mapping[Any, str]] = {
    **dict.fromkeys(("FILE", "PATH", "WALK", "PROFILE.yaml", "EXPECTED.json"), "FILE"),
    **dict.fromkeys(("DIR", "FOLDER", "PLACE", "CHECKPOINT"), "DIRECTORY"),
}
"""Completion of a value, by its name in the help."""

_SHORT: Final[Mapping[str, _Functions]] = {
    "run": (_register_run, _run_daemon),
    "sentinel": (_register_sentinel, _run_sentinel),
    "version": (_register_version, _version),
    "completion": (_register_completion, _completion),
}


if __name__ == "__main__":
    sys.exit(main())
