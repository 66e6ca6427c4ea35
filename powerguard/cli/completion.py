"""`powerguard completion`: a completion script for a shell, made from the parsers themselves."""

import argparse
from typing import Final

from powerguard.cli.operate import Subparsers

SHELLS: Final = ("bash", "zsh", "fish")
FILES: Final = frozenset(
    (
        *("--config", "--socket", "--journal", "--html", "--keep", "--conf-d", "--site"),
        *("--to", "--into", "--undo", "--credentials-file", "--root", "--prefix"),
        *("--save", "--community-file", "--auth-file", "--priv-file"),
    )
)
"""Options whose value is a file."""


def register(subparsers: Subparsers) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script",
        description="Print a completion script: `powerguard completion bash > /etc/bash_completion.d/powerguard`, "
        "`powerguard completion zsh > /usr/local/share/zsh/site-functions/_powerguard`, "
        "`powerguard completion fish > ~/.config/fish/completions/powerguard.fish`.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb."""
    words = words_of_verbs()
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](words), end="")
    return 0


def words_of_verbs() -> dict[str, list[str]]:
    """Return the options and further verbs that each verb takes."""
    from powerguard.cli.main import VERBS, Verbs

    verbs = Verbs()
    for verb in VERBS:
        verbs.add(verb)
    return {verb: sorted(_words(verbs.subparsers.choices[verb])) for verb in VERBS}


def _words(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        found.update(option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, inner in action.choices.items():
                found |= {name} | _words(inner)
        elif action.choices is not None and not action.option_strings:
            found.update(str(choice) for choice in action.choices)
    return found


def bash(words: dict[str, list[str]]) -> str:
    """Return the script for bash; files complete after --config and the like."""
    cases = "\n".join(f"        {verb}) words='{' '.join(options)}' ;;" for verb, options in words.items())
    return f"""# powerguard completion for bash
_powerguard() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb='' words='' word
    case $previous in
        {"|".join(sorted(FILES))}) mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
    esac
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in {"|".join(words)}) verb=$word; break ;; esac
    done
    case $verb in
        '') words='{" ".join(words)} --config --socket --version --help' ;;
{cases}
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _powerguard powerguard
"""


def zsh(words: dict[str, list[str]]) -> str:
    """Return the script for zsh."""
    from powerguard.cli.main import VERBS

    verbs = "\n".join(f"        '{verb}:{VERBS[verb].replace(chr(39), '').replace(':', ' -')}'" for verb in words)
    cases = "\n".join(f"        {verb}) compadd -- {' '.join(options)} ;;" for verb, options in words.items())
    return f"""#compdef powerguard
_powerguard() {{
    local -a verbs
    verbs=(
{verbs}
    )
    if (( CURRENT == 2 )); then
        _describe verb verbs
        return
    fi
    case $words[CURRENT-1] in
        {"|".join(sorted(FILES))}) _files; return ;;
    esac
    case $words[2] in
{cases}
    esac
}}
_powerguard "$@"
"""


def fish(words: dict[str, list[str]]) -> str:
    """Return the script for fish."""
    from powerguard.cli.main import VERBS

    lines = ["# powerguard completion for fish", "complete -c powerguard -f"]
    for verb, options in words.items():
        text = VERBS[verb].replace("'", "")
        lines.append(f"complete -c powerguard -n __fish_use_subcommand -a {verb} -d '{text}'")
        for option in options:
            what = f"-l {option[2:]}" if option.startswith("--") else f"-a {option}"
            file = " -r -F" if option in FILES else ""
            lines.append(f"complete -c powerguard -n '__fish_seen_subcommand_from {verb}' {what}{file}")
    return "\n".join(lines) + "\n"
