"""The sentinel's settings: the sample holds, and a mistake is told with its place and what would be right."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from powerguard.sentinel.main import main, take, tls_context
from powerguard.sentinel.options import SentinelSettings, load, read_keys
from powerguard.settings.load import SettingsError
from tests.peers.ipmi import keep_secret
from tests.peers.redfish import make_certificate

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "config" / "sentinel.yaml"
LEAST = """\
mode: dry-run
ups:
  rack-a: {sources: [{kind: nut, host: 10.0.0.9, name: rack-a}]}
hosts:
  node-1:
    key: {file: KEY}
    bmc: {kind: ipmi-lan, host: 10.0.8.22, user: u, password: {credential: b}}
    feeds: [rack-a]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sentinel.yaml"
    path.write_text(text.replace("KEY", str(folder / "key")), encoding="utf-8")
    return path


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(write(folder, text))
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_the_sample_holds_and_so_does_its_alternative(tmp_path: Path) -> None:
    settings = load(SAMPLE)
    assert (settings.mode, list(settings.hosts), settings.tls is not None) == ("dry-run", ["node-1", "node-2"], True)
    rules = {name: host.rules for name, host in settings.hosts.items()}
    assert (rules["node-1"].minimum_supplies, rules["node-2"].minimum_supplies) == (1, 2)
    text = SAMPLE.read_text(encoding="utf-8")
    plain = re.sub(r"^tls:.*$", "", text, flags=re.MULTILINE).replace("#plain_http", "plain_http")
    assert load(write(tmp_path, plain)).plain_http


def test_the_reference_names_every_setting() -> None:
    page = (ROOT / "docs" / "reference" / "sentinel.md").read_text(encoding="utf-8")
    schema = SentinelSettings.model_json_schema()
    names = {
        name
        for definition in (schema, *schema["$defs"].values())
        if definition["title"] in {"SentinelSettings", "SentinelUps", "SentinelHost", "TlsOptions"}
        for name in definition["properties"]
    }
    assert sorted(name for name in names if f"`{name}`" not in page) == []
    for definition in (schema, schema["$defs"]["SentinelHost"]):
        for name, field in definition["properties"].items():
            low, high, default = field.get("minimum"), field.get("maximum"), field.get("default")
            limits = f"{low} to {high}, " if low is not None and name != "port" else ""
            is_shown = isinstance(default, int | str)
            wanted = f"`{name}` ({limits}default `{json.dumps(default).strip(chr(34))}`)"
            assert not is_shown or wanted in page, wanted


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "mode: dry-run",
            "mode: armde",
            "sentinel.yaml:1:7: mode: must be armed or dry-run, got 'armde' (write armed)",
        ),
        ("feeds: [rack-a]", "feeds: [rack-b]", "hosts.node-1.feeds[0]: unknown UPS (known: rack-a)"),
        ("feeds: [rack-a]", "feeds: [rack-a]\n    minimum_supplies: 2", "minimum_supplies is 2, but there are only 1"),
        ("feeds: [rack-a]", "feeds: []", "hosts.node-1.feeds: must be a list of 1 to 16 items"),
        ("kind: ipmi-lan", "kind: in-band", "kind in-band does not use host"),
        ("{kind: ipmi-lan, host: 10.0.8.22, user: u, password: {credential: b}}", "{kind: none}", "not none"),
        ("mode: dry-run", "mode: dry-run\nlisten: 10.0.0.2", "without tls a listener can read hosts and outages"),
        (
            "mode: dry-run",
            "mode: dry-run\nlisten: 10.0.0.2\nplain_http: true\npage_key: {credential: p}",
            "without tls a listener can read page_key",
        ),
        ("mode: dry-run", "mode: dry-run\nlisten: manager", "listen: must be an IP address of this host"),
        ("mode: dry-run", "mode: dry-run\nutility_stabel_s: 5", "did you mean 'utility_stable_s'?"),
        ("mode: dry-run", "mode: dry-run\ncharge_pct: 100", "charge_pct: must be 0 to 95, got 100"),
        (
            "hosts:\n",
            (
                "hosts:\n  node-0: {key: {credential: c}, feeds: [rack-a], bmc: "
                "{kind: ipmi-lan, host: 10.0.8.22, user: u, password: {credential: b}}}\n"
            ),
            "hosts.node-1.bmc: this is the BMC of node-0 already; give each host its own",
        ),
        ("  node-1:", "  ../node:", "as a key here must be a host's name, such as node-1"),
    ],
)
def test_a_mistake_says_what_would_be_right(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in LEAST
    problems = mistakes(tmp_path, LEAST.replace(old, new, 1))
    assert any(problem in each for each in problems), problems
    assert all(re.match(r"sentinel\.yaml:\d+:\d+: ", each) for each in problems)


FIRST = "{kind: redfish, host: bmc-1.example, system: Node1, user: u, password: {credential: b}}"


@pytest.mark.parametrize(
    ("bmc", "is_shared"),
    [
        ("{kind: ipmi-lan, host: bmc-1.example, user: u, password: {credential: b}}", True),
        ("{kind: redfish, host: BMC-1.Example., system: Node1, user: u, password: {credential: b}}", True),
        ("{kind: redfish, host: bmc-1.example, user: u, password: {credential: b}}", True),
        ("{kind: redfish, host: bmc-1.example, system: Node2, user: u, password: {credential: b}}", False),
        ("{kind: ipmi-lan, host: bmc-1.example, port: 6231, user: u, password: {credential: b}}", False),
        ("{kind: ipmi-lan, host: bmc-2.example, user: u, password: {credential: b}}", False),
    ],
)
def test_a_bmc_of_two_hosts_is_found_in_any_spelling(tmp_path: Path, bmc: str, *, is_shared: bool) -> None:
    """An intent of the one would power on the other, which may have to stay off."""
    ours = "{kind: ipmi-lan, host: 10.0.8.22, user: u, password: {credential: b}}"
    text = LEAST.replace(ours, FIRST) + f"  node-2: {{key: {{credential: c}}, feeds: [rack-a], bmc: {bmc}}}\n"
    if is_shared:
        assert any("hosts.node-2.bmc: this is the BMC of node-1 already" in each for each in mistakes(tmp_path, text))
    else:
        assert set(load(write(tmp_path, text)).hosts) == {"node-1", "node-2"}


def test_two_spellings_of_one_address_are_one_bmc(tmp_path: Path) -> None:
    bmc = "{kind: ipmi-lan, host: HOST, user: u, password: {credential: b}}"
    text = LEAST.replace(bmc.replace("HOST", "10.0.8.22"), bmc.replace("HOST", "'fd00::21'"))
    second = bmc.replace("HOST", "'FD00:0::21'")
    text += f"  node-2: {{key: {{credential: c}}, feeds: [rack-a], bmc: {second}}}\n"
    assert any("hosts.node-2.bmc: this is the BMC of node-1 already" in each for each in mistakes(tmp_path, text))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    assert "must be a map of settings" in mistakes(tmp_path, "[1]")[0]
    assert "must be a map of settings" in mistakes(tmp_path, "")[0]


def test_what_lies_in_the_daemons_conf_d_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.yaml").write_text("budget: {margin: 0.3}\n", encoding="utf-8")
    assert load(write(tmp_path, LEAST)).mode == "dry-run"


def test_each_host_has_a_key_of_its_own_that_is_long_enough(tmp_path: Path) -> None:
    second = LEAST.partition("hosts:\n")[2].replace("node-1", "node-2").replace("10.0.8.22", "10.0.8.23")
    settings = load(write(tmp_path, LEAST + second))
    with pytest.raises(SettingsError, match=r"hosts\.node-1\.key: .*No such file"):
        read_keys(settings)
    keep_secret(tmp_path / "key", "k" * 64)
    with pytest.raises(SettingsError, match=r"hosts\.node-2\.key: is also hosts\.node-1\.key"):
        read_keys(settings)
    assert read_keys(load(write(tmp_path, LEAST))) == ({"node-1": b"k" * 64}, b"")
    with pytest.raises(SettingsError, match=r"page_key: is also hosts\.node-1\.key"):
        read_keys(load(write(tmp_path, LEAST + "page_key: {file: KEY}\n")))
    keep_secret(tmp_path / "key", "k" * 31)
    with pytest.raises(SettingsError, match=r"31 bytes, at least 32 \(openssl rand -hex 32\)"):
        read_keys(load(write(tmp_path, LEAST)))
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(SettingsError, match="other users can read this secret"):
        read_keys(load(write(tmp_path, LEAST)))


def test_a_credential_that_its_unit_does_not_pass_has_a_remedy_for_a_sentinel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`powerguard install` passes secrets to the daemon only."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    settings = load(write(tmp_path, LEAST.replace("{file: KEY}", "{credential: node-1}")))
    with pytest.raises(SettingsError, match=r"credential node-1: No such file.*sentinel: LoadCredential="):
        read_keys(settings)


def test_a_certificate_and_its_key_belong_together(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, other = make_certificate(tmp_path), make_certificate(tmp_path / "b")

    def settings(certificate: Path, key: Path) -> SentinelSettings:
        key.chmod(0o600)
        text = f"{LEAST}tls: {{certificate: {certificate}, key: {{file: {key}}}}}\n"
        return load(write(tmp_path, text.replace("KEY", "/k")))

    assert tls_context(settings(one.cert, one.key)) is not None
    assert tls_context(load(write(tmp_path, LEAST))) is None
    for certificate, key, why in (
        (one.cert, other.key, "both must be PEM, and belong together"),
        (tmp_path / "none.pem", one.key, "No such file or directory"),
        (one.cert, keep_secret(tmp_path / "text", "no key at all"), "both must be PEM"),
    ):
        with pytest.raises(SettingsError) as caught:
            tls_context(settings(certificate, key))
        assert why in str(caught.value)
        assert "no key at all" not in str(caught.value)


def test_the_exit_status_says_whether_the_settings_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, LEAST + f"state: {tmp_path}\n")
    assert main(path, check=True) == 0
    assert capsys.readouterr() == (f"{path}: valid (hosts: 1, mode: dry-run)\n", "")
    write(tmp_path, LEAST + f"state: {tmp_path}/none\n")
    assert main(path) == 78
    keep_secret(tmp_path / "key", "k" * 64)
    assert main(path) == 78
    assert "none: no such f" in capsys.readouterr().err


def test_a_check_looks_at_the_state_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that systemd makes may be missing before the first start. Any other one ends that start."""
    path = write(tmp_path, LEAST + f"state: {tmp_path}/none\n")
    assert main(path, check=True) == 78
    assert "none: no such folder" in capsys.readouterr().err
    write(tmp_path, LEAST + "state: /var/lib/powerguard-of-no-test\n")
    assert main(path, check=True) == 0
    assert "no such folder yet" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("mode", "expected"), [(0o755, "this user cannot write there"), (0o700, "permission denied")])
def test_a_check_says_that_its_user_cannot_write_the_state(
    mode: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "private").mkdir(mode=mode)
        (folder / "private" / "state").mkdir()
        path = write(folder, LEAST + f"state: {folder}/private/state\n")
        keep_secret(folder / "key", "k" * 64)
        os.chown(folder / "key", 65534, 65534)
        assert take(path).settings.state == f"{folder}/private/state", "and all modules are imported now"
        try:
            os.seteuid(65534)
            code = main(path, check=True)
            assert mode == 0o755 or main(path) == 78
        finally:
            os.seteuid(0)
    assert (code, expected in capsys.readouterr().err) == (0, True)
