"""Apprise in its child, against servers that answer as the services do."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.notify.post import Clock, began, ended, note, options, post, secret
from tests.peers.chat import Services

URLS = {
    "dingtalk": ("dingtalk://abc123token/", "oapi.dingtalk.com"),
    "dingtalk-signed": ("dingtalk://SECabc123@abc123token/", "oapi.dingtalk.com"),
    "feishu": ("feishu://abc-token-1", "open.feishu.cn"),
    "wecom": ("wecombot://good-key-1", "qyapi.weixin.qq.com"),
    "slack": ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#ops", "hooks.slack.com"),
    "ntfy": ("ntfy://powerguard-ops", "ntfy.sh"),
    "wxpusher": ("wxpusher://AT_appid/123", "wxpusher.zjiecode.com"),
    "pagerduty": ("pagerduty://0123456789abcdef0123456789abcdef@key/gpu-01", "events.pagerduty.com"),
}


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with Services(tmp_path).running() as running:
        yield running


def target(services: Services, tmp_path: Path, name: str, **more: object) -> dict[str, Any]:
    url = secret(tmp_path, f"url-{name}", URLS[name][0])
    ca = str(services.authority.pem)
    return {"kind": "apprise", "url": url, "proxy": services.proxy, "ca_file": ca, "limit_s": 30, **more}


async def test_each_service_takes_the_message(services: Services, tmp_path: Path) -> None:
    """The start of an outage reaches all of them, with its text."""
    targets = {name: target(services, tmp_path, name) for name in URLS}
    async with post(options(**targets), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: all(view.delivered for view in made.messenger.views()), "all deliveries")
        assert {host for host, _ in services.taken} == {host for _, host in URLS.values()}
        assert all("Utility power failed" in json.dumps(body) for _, body in services.taken)
        assert made.view("slack").answer == "200 ok"
        assert all(view.failed == 0 for view in made.messenger.views())
        assert made.view("pagerduty").answer.startswith('202 {"status": "success"')


REFUSED = [
    ("dingtalk", {"errcode": 310000, "errmsg": "keywords not in content"}),
    ("dingtalk", {"errcode": 130101, "errmsg": "send too fast, exceed 20 times per minute"}),
    ("feishu", {"code": 19024, "msg": "Key Words Not Found", "data": {}}),
    ("feishu", {"code": 1000, "msg": "of WxPusher alone a success", "data": {}}),
    ("wecom", {"errcode": 45009, "errmsg": "api freq out of limit"}),
    ("wxpusher", {"code": 1001, "msg": "invalid appToken", "data": None, "success": False}),
]


@pytest.mark.parametrize(("name", "body"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_an_error_with_status_200_is_no_delivery(
    services: Services, tmp_path: Path, name: str, body: object
) -> None:
    """The bots answer 200 for a message that nobody sees; it is sent again until it is taken."""
    services.refusals.append((200, body))
    async with post(options(**{name: target(services, tmp_path, name)}), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view(name).failed, "the refusal")
        assert made.view(name).answer.startswith("200 {")
        assert made.view(name).since is not None
        await made.until(lambda: made.view(name).delivered, "the second try")
        assert (made.view(name).since, made.view(name).queued, len(services.taken)) == (None, 0, 1)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", ["wecom", "pagerduty", "dingtalk"])
async def test_a_late_outage_with_many_alarms_is_split(
    services: Services, tmp_path: Path, name: str, language: str
) -> None:
    """All its messages become one, which is longer than the service takes, and must not be refused as a whole."""
    clock = Clock()
    services.refusals.extend([(503, "away")] * 100)
    services.keyword = "gpu-01"
    async with post(options(language, **{name: target(services, tmp_path, name)}), tmp_path, clock) as made:
        made.hear(*began())
        for number in range(12):
            made.hear(note("power_on_blocked", because=f"cause {number}: " + "没有电 " * 40, method=f"m{number}"))
        made.hear(*ended())
        await made.until(lambda: made.view(name).queued == 14 and made.view(name).failed, "the first try")
        failed = made.view(name).failed
        clock.passed_s += 700.0
        services.refusals.clear()
        await made.until(lambda: not made.view(name).queued or made.view(name).failed > failed + 1, "the delivery")
        assert made.view(name).queued == 0, made.view(name).answer
        texts = json.dumps([body for _, body in services.taken])
        assert all(f"cause {number}:" in texts for number in range(12))


async def test_a_wrong_signature_is_reported(services: Services, tmp_path: Path) -> None:
    services.secret = "SECother"
    async with post(options(bot=target(services, tmp_path, "dingtalk-signed")), tmp_path) as made:
        result = await made.messenger.test(["bot"], 30.0)
        assert result["bot"] == (False, '200 {"errcode": 310000, "errmsg": "sign not match"}')


async def test_a_redirect_is_not_followed(services: Services, tmp_path: Path) -> None:
    services.refusals.append((307, ""))
    async with post(options(bot=target(services, tmp_path, "slack")), tmp_path) as made:
        result = await made.messenger.test(["bot"], 30.0)
        assert result["bot"] == (False, "redirects elsewhere: not followed (store the new address)")


async def test_a_certificate_of_nobody_is_not_believed(services: Services, tmp_path: Path) -> None:
    """Without ca_file the system's authorities count, and they know nothing of the test's."""
    async with post(options(bot=target(services, tmp_path, "slack", ca_file=None)), tmp_path) as made:
        result = await made.messenger.test(["bot"], 30.0)
        assert result["bot"] == (False, "no answer: no connection, or its certificate")
    assert services.taken == []


async def test_a_service_that_hangs_is_left_at_the_limit(services: Services, tmp_path: Path) -> None:
    services.delay_s = 60.0
    async with post(options(bot=target(services, tmp_path, "slack", limit_s=3)), tmp_path) as made:
        assert (await made.messenger.test(["bot"], 30.0))["bot"] == (False, "no answer within 3 s")


@pytest.mark.parametrize("url", ["nonsense", "dingtalk://", "unknownservice://token"])
async def test_an_url_that_apprise_does_not_know_is_reported_without_it(tmp_path: Path, url: str) -> None:
    made_options = options(bot={"kind": "apprise", "url": secret(tmp_path, "url", url), "limit_s": 30})
    async with post(made_options, tmp_path) as made:
        assert (await made.messenger.test(["bot"], 30.0))["bot"] == (
            False,
            "its URL is not one that Apprise understands",
        )


async def test_a_webhook_goes_through_the_proxy_too(services: Services, tmp_path: Path) -> None:
    """Many GPU hosts reach the Internet only so; the certificate is still the service's own."""
    template = tmp_path / "slack.json"
    template.write_text('{"text": "*$title*\\n$text"}', encoding="utf-8")
    hook = {
        "kind": "webhook",
        "url": secret(
            tmp_path, "hook", "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
        ),
        "template": str(template),
        "proxy": services.proxy,
        "ca_file": str(services.authority.pem),
        "limit_s": 30,
    }
    async with post(options(chat=hook), tmp_path) as made:
        made.hear(*began())
        await made.until(lambda: made.view("chat").delivered)
    ((host, body),) = services.taken
    assert host == "hooks.slack.com"
    assert isinstance(body, dict)
    assert body["text"].startswith("*gpu-01: on battery*\nUtility power failed")
