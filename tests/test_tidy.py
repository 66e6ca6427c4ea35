"""The house rules that no linter knows, and the linters themselves, as tests."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = "powerguard"

MADE: Final = {"build", "dist", "mutants", "node_modules", "__pycache__"}
"""Folders that our own tools make; those that begin with a dot are left out too, but for .ci."""

LONGEST_FUNCTION: Final = 70

SWALLOWERS: Final[Mapping[str, str]] = {
    "powerguard/daemon/attempt.py": "the one bulkhead: a bug in an effector must not stop the shutdown",
    "powerguard/cli/doctor/checks.py": "doctor decides nothing: a broken check is a finding; the others count",
    "powerguard/daemon/journal/journal.py": "errors go from its thread to the loop; none may stop a start",
    "powerguard/daemon/log.py": "an error that cannot be shown must not become one more",
    "powerguard/effectors/bmc/worker.py": "a child process that always answers: IPMI libraries let anything escape",
    "powerguard/sim/snmp_agent.py": "what a hostile message makes pysnmp's decoder raise; the card is silent then",
    "powerguard/trainer/store/shards.py": "what fails in a thread that helps is raised in the one that waits for it",
    "powerguard/ups/snmp/engine.py": "what a hostile message makes pysnmp raise: counted, or told in one line",
    "powerguard/ups/snmp/notification.py": "what a hostile message makes pysnmp raise: counted",
    "powerguard/trainer/loop/checkpointer.py": "a checkpoint that fails must not end the training; its asker is told",
    "powerguard/trainer/log.py": "a log handler of the training's own that raises must end nothing",
}
STARTERS: Final[Mapping[str, str]] = {
    "powerguard/effectors/child.py": "the one way in which the daemon starts a program",
    "powerguard/cli/event.py": "the hook becomes the operator's own SHUTDOWNCMD unless the daemon owns the shutdown",
    "powerguard/effectors/bmc/helper.py": "a fork for each word, so that none holds another up; no program",
    "powerguard/sim/*": "the demo starts its world",
    "powerguard/trainer/tiers/upload.py": "uploads run in a child of the training that can be killed at any instant",
}
WIRE_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "cryptography": (),
    "pyghmi": ("powerguard/effectors/bmc*", "powerguard/sim/*"),
    "pyasn1": ("powerguard/ups/snmp/*", "powerguard/sim/*"),
    "pysnmp": ("powerguard/ups/snmp/*", "powerguard/sim/*"),
}
CORE_IMPORTS: Final = {"collections", "dataclasses", "enum", "math", "types", "typing"}
TRAINER_IMPORTS: Final = {"obstore", "lightning", "numpy", "torch", "transformers", "xxhash"} | set(
    sys.stdlib_module_names
)

UNFINISHED: Final = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")
FOREIGN: Final = re.compile(
    r"(?<![\w.$}])/work(?:/|\b)|/tmp/pg/|shared/(?:facts|prototypes|ups-walks)"
    r"|pypi\.org|pythonhosted\.org|registry\.npmjs|\.pkg\.dev|deb\.debian\.org"
)
HABITS: Final = (
    (re.compile(r"\b(?:fore)?(?:tells?|told|telling)\b", re.IGNORECASE), "report, log, show, ask or order"),
    (re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", re.IGNORECASE), "name the thing that acts"),
    (re.compile(r"\b(?:nought|anew|beside)\b", re.IGNORECASE), "0, again, next to"),
    (re.compile(r"(?:^|['\"}`:]|\b(?:it|that|this|which)) is no (?!longer\b|more\b)\w+", re.IGNORECASE), "is not a"),
)
"""Habits that no reader expects in a manual, each with what to write instead. docs/glossary.md has the words."""
NOT_HABITS: Final = re.compile(
    r"\b(?:tells?|told|telling)\b(?=(?: \S+){0,6} apart\b)"  # to tell two things apart
    r"|\b(?:told|beside)(?=:)|`[^`\n]*`|\b\w*[._]\w*\b"  # fields, parameters and code
)
MOCKS: Final = {"mock", "MagicMock", "AsyncMock", "Mock", "mocker", "flexmock", "create_autospec"}
MOCKING: Final = re.compile(r"[Mm]ock|patch|create_autospec")
"""A file without a match has none of these words and no patch, and need not be parsed."""
SUBPROCESS: Final = re.compile(
    r"^(?:subprocess\.\w+|asyncio\.create_subprocess_\w+|os\.(?:system|popen|fork|forkpty|posix_spawnp?|exec\w+|spawn\w+)"
    r"|multiprocessing\.\w+)$"
)


# --- Finding -------------------------------------------------------------------------------------------------------


def walk(folder: Path = ROOT) -> Iterator[Path]:
    """Every file of the project, whether git knows it already or not."""
    for entry in sorted(folder.iterdir()):
        if entry.name in MADE or entry.name.endswith(".egg-info"):
            continue
        if entry.name.startswith(".") and entry.name not in {".ci", ".gitignore"}:
            continue
        if entry.is_symlink():
            continue
        if entry.is_dir():
            yield from walk(entry)
        elif entry.is_file():
            yield entry


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules(top: str) -> list[Path]:
    return [path for path in walk(ROOT / top) if path.suffix == ".py"]


def allowed(name: str, patterns: Mapping[str, str] | tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def unfinished(name: str, source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), start=1):
        if UNFINISHED.search(line):
            yield f"{name}:{number}: unfinished: {line.strip()}"


def foreign(name: str, source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), start=1):
        if FOREIGN.search(line):
            yield f"{name}:{number}: names the machine it was written on: {line.strip()}"


@functools.lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """Parse it once for all finders that look at the same file."""
    return list(ast.walk(ast.parse(source)))


def too_long(name: str, source: str) -> Iterator[str]:
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines; split it at {LONGEST_FUNCTION}"


def swallows(name: str, source: str) -> Iterator[str]:
    if allowed(name, SWALLOWERS):
        return
    for node in nodes_of(source):
        if isinstance(node, ast.ExceptHandler) and not reraises(node):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in kinds:
                if kind is None or dotted(kind).rpartition(".")[2] in {"Exception", "BaseException"}:
                    yield f"{name}:{node.lineno}: catches everything; name what can fail here"
        elif isinstance(node, ast.Call) and dotted(node.func) == "contextlib.suppress":
            for argument in node.args:
                if dotted(argument) in {"Exception", "BaseException"}:
                    yield f"{name}:{node.lineno}: suppresses everything; name what can fail here"


def reraises(handler: ast.ExceptHandler) -> bool:
    """Tidying up, or wording it anew, and then raising swallows nothing."""
    return isinstance(handler.body[-1], ast.Raise)


def mocks(name: str, source: str) -> Iterator[str]:
    for node in nodes_of(source) if MOCKING.search(source) else ():
        found = ""
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.name.rpartition(".")[2] for alias in node.names} | {getattr(node, "module", None) or ""}
            found = next(iter(names & (MOCKS | {"unittest.mock", "pytest_mock"})), "")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in {"monkeypatch", "patcher"} and node.attr in {"setattr", "delattr"}:
                found = f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in MOCKS | {"patch"} and isinstance(node.ctx, ast.Load):
            found = node.id
        if found:
            yield f"{name}:{node.lineno}: {found}: use a real peer, or a fake at one of our own ports"


def starts_programs(name: str, source: str) -> Iterator[str]:
    if allowed(name, STARTERS):
        return
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and SUBPROCESS.match(dotted(node.func)):
            yield f"{name}:{node.lineno}: {dotted(node.func)}: programs are started by powerguard.effectors.child"


def guesses(name: str, source: str) -> Iterator[str]:
    if name.startswith(f"{PRODUCT}/trainer/"):
        for node in nodes_of(source):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "exists":
                yield f"{name}:{node.lineno}: what cannot be looked at may be there: trainer.store.disk.is_there"


def imports(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, those inside functions too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                module = ".".join([*Path(name).parts[: -node.level], *filter(None, [node.module])])
            else:
                module = node.module or ""
            for alias in node.names if module == PRODUCT else [None]:
                yield node.lineno, module if alias is None else f"{module}.{alias.name}"


def wrong_imports(name: str, source: str) -> Iterator[str]:
    for line, module in imports(name, source):
        top = module.partition(".")[0]
        ours = top == PRODUCT
        reason = ""
        if name == f"{PRODUCT}/__init__.py":
            reason = "the package itself imports nothing: hooks start in milliseconds"
        elif name.startswith(f"{PRODUCT}/core/"):
            if not (module.startswith("powerguard.core") if ours else top in CORE_IMPORTS):
                reason = "the core imports only " + ", ".join(sorted(CORE_IMPORTS))
        elif name.startswith(f"{PRODUCT}/trainer/"):
            if ours and not module.startswith(("powerguard.trainer", "powerguard.wire", "powerguard.fields")):
                reason = "the trainer's library knows only powerguard.wire and powerguard.fields"
            elif not ours and top not in TRAINER_IMPORTS:
                reason = "the trainer's library stands on the standard library, xxhash and, where there is one, torch"
        elif not allowed(name, WIRE_LIBRARIES.get(top, ("*",))):
            reason = f"{top} belongs to " + " and ".join(WIRE_LIBRARIES[top])
        if reason:
            yield f"{name}:{line}: import of {module}: {reason}"


def spoken(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and text of everything that an operator or a reader of the documents sees."""
    if name.endswith(".py"):
        for node in nodes_of(source):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value if " " in node.value else ""
    else:
        comments = name.startswith("systemd/")
        for number, line in enumerate(source.splitlines(), start=1):
            yield number, "" if comments and not line.lstrip().startswith(("#", "//", "Description=")) else line


def habits(name: str, source: str) -> Iterator[str]:
    for number, text in spoken(name, source):
        plain = NOT_HABITS.sub("", text)
        for pattern, better in HABITS:
            for found in pattern.finditer(plain):
                yield f"{name}:{number}: {found[0]!r} ({better}): {' '.join(plain.split())[:160]}"


def dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


Finder = Callable[[str, str], Iterator[str]]


def found_by(finders: Iterable[Finder], paths: list[Path]) -> list[str]:
    found: list[str] = []
    for path in paths:
        name, source = name_of(path), path.read_text(encoding="utf-8")
        found += [slip for finder in finders for slip in finder(name, source)]
    return found


# --- The rules -----------------------------------------------------------------------------------------------------


def test_product_keeps_the_rules() -> None:
    """Short functions, one bulkhead, one way to start a program, no checkpoint taken for gone, imports of one way."""
    assert found_by((too_long, swallows, starts_programs, guesses, wrong_imports), modules(PRODUCT)) == []


def test_no_modules_import_each_other() -> None:
    """Not even by imports inside functions: a cycle works until somebody imports its other end first."""
    names = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in modules(PRODUCT)
    }
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        imports = [each for each in ast.walk(ast.parse(path.read_bytes())) if isinstance(each, ast.ImportFrom)]
        wanted = {(str(each.module), f"{each.module}.{alias.name}") for each in imports for alias in each.names}
        graph[name] = {inner if inner in names else outer for outer, inner in wanted} & names.keys() - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_nothing_is_left_unfinished() -> None:
    """What is not there yet is not half there."""
    kept = ("powerguard/", "config/", "systemd/", "scripts/", "docs/", ".ci/")
    assert found_by((unfinished,), [path for path in texts() if name_of(path).startswith(kept)]) == []


def test_project_speaks_of_itself_alone() -> None:
    """No path and no host of the machine on which it was written."""
    assert found_by((foreign,), texts()) == []


def test_operators_read_plain_english() -> None:
    """Messages, help, settings, units and documents name what acts, in the words of the glossary."""
    read = ("powerguard/", "config/", "systemd/", "docs/", "README.md")
    pages = [
        path for path in texts() if name_of(path).startswith(read) and path.suffix not in {".html", ".svg", ".json"}
    ]
    assert found_by((habits,), pages) == []


def test_tests_replace_nothing_behind_our_back() -> None:
    """A patched test proves the patch."""
    assert found_by((mocks,), modules("tests")) == []


def test_allowances_are_still_needed() -> None:
    """An exception that outlived its file would let the next one through unseen."""
    names = [name_of(path) for path in modules(PRODUCT)]
    patterns = [*SWALLOWERS, *STARTERS]
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []


def test_scripts_can_be_run() -> None:
    """A script that lost its mode fails only on the machine of whoever cloned it."""
    scripts = [path for path in texts() if path.read_text(encoding="utf-8").startswith("#!")]
    assert [name_of(path) for path in scripts if not os.access(path, os.X_OK)] == []
    for path in scripts:
        shell = path.read_text(encoding="utf-8").partition("\n")[0].rpartition("/")[2]
        if shell in {"sh", "bash"}:
            ended = subprocess.run([shell, "-n", path], capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr


def test_decisions_are_listed() -> None:
    """Each has a number of its own and one line of the index, and no link there leads nowhere."""
    folder = ROOT / "docs/decisions"
    links = re.findall(r"\[([^\]]+)\]\(([^)#]+)", (folder / "README.md").read_text(encoding="utf-8"))
    listed = sorted(link for link in links if link[1][:4].isdigit())
    assert listed == sorted((path.name[:4], path.name) for path in folder.glob("[0-9]*.md"))
    assert len({number for number, _ in listed}) == len(listed), "two have one number"
    assert [target for _, target in links if not (folder / target).exists()] == []


def texts() -> list[Path]:
    """Every file that is text, less this one, which is full of what it looks for."""
    return [path for path in walk() if path != Path(__file__) and b"\0" not in path.read_bytes()[:4096]]


# --- The finders find ----------------------------------------------------------------------------------------------

SLIPS: Final = [
    (habits, "powerguard/sim/a.py", 'msg = f"{name!r} is no unit"'),
    (habits, "powerguard/sim/a.py", 'msg = "the UPS tells its charge"'),
    (habits, "powerguard/core/a.py", '"""Whoever asks waits."""'),
    (habits, "powerguard/sim/a.py", '"""Nobody waits."""'),
    (habits, "docs/a.md", "The last word counts anew."),
    (habits, "systemd/a.service", "# Nobody waits for it."),
    (unfinished, "powerguard/a.py", "# TODO: later"),
    (unfinished, "powerguard/a.py", "raise NotImplementedError"),
    (foreign, "docs/a.md", "see /work/shared"),
    (foreign, "docs/a.md", "https://pypi.org/simple"),
    (too_long, "powerguard/a.py", "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept:\n    pass"),
    (swallows, "powerguard/a.py", "with contextlib.suppress(Exception):\n    f()"),
    (mocks, "tests/test_a.py", "from unittest.mock import patch"),
    (mocks, "tests/test_a.py", "from unittest import mock"),
    (mocks, "tests/test_a.py", "def test(monkeypatch): monkeypatch.setattr(time, 'time', f)"),
    (mocks, "tests/test_a.py", "def test(mocker): mocker.spy(a, 'b')"),
    (starts_programs, "powerguard/daemon/a.py", "subprocess.run(['true'])"),
    (starts_programs, "powerguard/cli/a.py", "os.execvp('true', ['true'])"),
    (guesses, "powerguard/trainer/a.py", "if not (folder / MANIFEST).exists(): remove(folder)"),
    (wrong_imports, "powerguard/__init__.py", "import os"),
    (wrong_imports, "powerguard/core/a.py", "def f():\n    import time"),
    (wrong_imports, "powerguard/core/a.py", "from powerguard.wire import x"),
    (wrong_imports, "powerguard/core/a.py", "from ..clock import boottime_s"),
    (wrong_imports, "powerguard/trainer/a.py", "from powerguard.core.model import state as model"),
    (wrong_imports, "powerguard/trainer/a.py", "import aiohttp"),
    (wrong_imports, "powerguard/effectors/host/power.py", "from pyghmi.ipmi import command"),
    (wrong_imports, "powerguard/ups/nut/source.py", "import pysnmp.hlapi"),
]


@pytest.mark.parametrize(("finder", "name", "source"), SLIPS, ids=lambda value: getattr(value, "__name__", None))
def test_slip_is_found(finder: Finder, name: str, source: str) -> None:
    """A finder that finds nothing would keep every rule."""
    assert len(list(finder(name, source))) == 1


CLEAN: Final = [
    (habits, "powerguard/core/a.py", '''"""What tells two of them apart. told: fields."""'''),
    (habits, "powerguard/trainer/a.py", 'KEYS = {"told"}  # nobody else'),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept (OSError, TimeoutError):\n    pass"),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (swallows, "powerguard/a.py", "try:\n    f()\nexcept Exception as error:\n    raise E from error"),
    (swallows, "powerguard/daemon/attempt.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (mocks, "tests/test_a.py", "def test(monkeypatch): monkeypatch.setenv('A', 'b')"),
    (foreign, "docs/a.md", "the framework/workers do /works"),
    (guesses, "powerguard/cli/a.py", "path.exists()"),
    (starts_programs, "powerguard/effectors/child.py", "asyncio.create_subprocess_exec('true')"),
    (
        wrong_imports,
        "powerguard/core/a.py",
        "from powerguard.core.model.state import State\nimport math\nfrom .b import c",
    ),
    (wrong_imports, "powerguard/effectors/bmc_child.py", "import pyghmi.ipmi.command"),
    (wrong_imports, "powerguard/ups/snmp/engine.py", "from pysnmp.proto import api"),
    (wrong_imports, "powerguard/daemon/observe/http.py", "from aiohttp import web"),
    (
        wrong_imports,
        "powerguard/trainer/store/store.py",
        "import os\nfrom powerguard import wire\nfrom powerguard.wire import x",
    ),
]


@pytest.mark.parametrize(("finder", "name", "source"), CLEAN, ids=lambda value: getattr(value, "__name__", None))
def test_good_code_is_left_alone(finder: Finder, name: str, source: str) -> None:
    """A finder that cries wolf would be switched off."""
    assert list(finder(name, source)) == []
