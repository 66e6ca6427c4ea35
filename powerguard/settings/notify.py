"""The settings of messages to people: targets by kind, and the check of a webhook's template."""

import json
import re
from pathlib import Path
from string import Template
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from powerguard.options import AbsolutePath, Host, Options, Secret

PLACEHOLDERS: Final = ("title", "text", "host", "event", "level", "status", "outage", "because", "mode", "at", "id")
"""Names that a template may use, each as $name or ${name}."""
MAX_TEMPLATE_BYTES: Final = 16384
JSON: Final = "application/json"


def _plain_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        msg = "must be http://HOST[:PORT][/PATH] or https://..., without user, password and query (those are secrets)"
        raise ValueError(msg)
    return text.rstrip("/")


PlainUrl = Annotated[str, AfterValidator(_plain_url), Field(max_length=1024)]
"""A URL without a secret in it. It may be logged."""
Address = Annotated[
    str,
    Field(
        pattern=r"^[^\s@<>,;]+@[^\s@<>,;]+$",
        max_length=254,
        json_schema_extra={"x-wanted": "a mail address, such as ops@example.org"},
    ),
]
_CA: Final = "PEM file of the authorities that may sign the certificate of the other side. Not set: the system's."
_PROXY: Final = "HTTP proxy for this target. Proxies from the environment are not used."


class _Target(Options):
    alarms: Literal["warning", "error", "none"] = Field(
        default="warning",
        description="Lowest level of alarms that this target gets. It always gets start and end of an outage, "
        "emergency checkpoint, power-off and return.",
        examples=["error"],
    )
    limit_s: float = Field(
        default=10,
        ge=1,
        le=60,
        description="Seconds for one delivery; then it has failed and is retried.",
        examples=[5],
    )


class WebhookOptions(_Target):
    """A program that takes messages as HTTP POST.

    url: where its URL is kept. A URL of a webhook is a secret: everyone who has it can post.
    authorization: where the value of the Authorization header is kept, such as `Bearer ...`.
    template: file with the body. It may name $title, $text, $host, $event, $level, $status, $outage, $because, $mode,
        $at and $id; `$$` is a dollar sign. Not set: a JSON object with all fields.
    content_type: type of the body. In application/json, and in types that end with +json, the values are escaped for
        JSON strings.
    """

    kind: Literal["webhook"]
    url: Secret = Field(examples=[{"credential": "slack-url"}])
    authorization: Secret | None = Field(default=None, examples=[{"credential": "hook-authorization"}])
    template: AbsolutePath | None = Field(default=None, examples=["/etc/powerguard/slack.json"])
    content_type: str = Field(
        default=JSON, pattern=r"^[a-z]+/[A-Za-z0-9.+-]+(; ?charset=[A-Za-z0-9-]+)?$", examples=["text/plain"]
    )
    proxy: PlainUrl | None = Field(default=None, description=_PROXY, examples=["http://10.0.0.3:3128"])
    ca_file: AbsolutePath | None = Field(default=None, description=_CA, examples=["/etc/powerguard/site-ca.pem"])


class AlertmanagerOptions(_Target):
    """A Prometheus Alertmanager (API v2). Alerts are sent again every minute while they last.

    url: its address, without a secret.
    authorization: where the value of the Authorization header is kept.
    labels: further labels of every alert.
    """

    kind: Literal["alertmanager"]
    url: PlainUrl = Field(examples=["http://10.0.0.4:9093"])
    authorization: Secret | None = Field(default=None, examples=[{"credential": "alertmanager-authorization"}])
    labels: dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], str] = Field(
        default_factory=dict, max_length=16, examples=[{"site": "berlin"}]
    )
    ca_file: AbsolutePath | None = Field(default=None, description=_CA, examples=["/etc/powerguard/site-ca.pem"])


class MailOptions(_Target):
    """Mail by SMTP.

    host: the mail server.
    port: TCP port: 587 for starttls, 465 for tls, 25 for none.
    tls: starttls: the connection is encrypted before the login. tls: from the start. none: never, and no password.
    user: account of the mail server. Not set: no login.
    password: where its password is kept.
    sender: address that the mail comes from.
    to: addresses that get it.
    """

    kind: Literal["mail"]
    host: Host = Field(examples=["mail.example.org"])
    port: int = Field(default=587, ge=1, le=65535)
    tls: Literal["starttls", "tls", "none"] = Field(default="starttls")
    user: str | None = Field(default=None, min_length=1, max_length=254, examples=["powerguard"])
    password: Secret | None = Field(default=None, examples=[{"credential": "mail"}])
    sender: Address = Field(examples=["powerguard@example.org"])
    to: list[Address] = Field(min_length=1, max_length=16, examples=[["ops@example.org"]])
    ca_file: AbsolutePath | None = Field(default=None, description=_CA, examples=["/etc/powerguard/site-ca.pem"])

    @model_validator(mode="after")
    def _login_is_whole(self) -> Self:
        if (self.user is None) != (self.password is None):
            msg = "give user and password, or neither"
            raise ValueError(msg)
        if self.password is not None and self.tls == "none":
            msg = "a password needs tls: starttls or tls: without it everyone on the network can read the password"
            raise ValueError(msg)
        return self


class CommandOptions(_Target):
    """A program of yours. It gets the message as JSON on stdin; exit status 0 means that it is delivered.

    command: program and arguments; no shell. It runs as the daemon's user and is killed at `limit_s`.
    """

    kind: Literal["command"]
    command: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, max_length=32, examples=[["/usr/local/bin/page-oncall"]]
    )


class AppriseOptions(_Target):
    """A service that Apprise knows: Slack, Teams, DingTalk, Feishu, Lark, WeCom, ntfy, PagerDuty, Telegram and more.

    url: where its Apprise URL is kept, such as `dingtalk://SECRET@TOKEN`.
    """

    kind: Literal["apprise"]
    url: Secret = Field(examples=[{"credential": "dingtalk-url"}])
    proxy: PlainUrl | None = Field(default=None, description=_PROXY, examples=["http://10.0.0.3:3128"])
    ca_file: AbsolutePath | None = Field(default=None, description=_CA, examples=["/etc/powerguard/site-ca.pem"])


TargetOptions = Annotated[
    WebhookOptions | AlertmanagerOptions | MailOptions | CommandOptions | AppriseOptions, Field(discriminator="kind")
]


class NotifyOptions(Options):
    """Messages to people about outages and alarms."""

    language: Literal["en", "zh"] = Field(
        default="en", description="Language of the messages: English or Chinese.", examples=["zh"]
    )
    targets: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")], TargetOptions] = Field(
        default_factory=dict,
        max_length=16,
        description="The targets of messages, by name. Empty: no messages.",
        examples=[{"ops": {"kind": "alertmanager", "url": "http://10.0.0.4:9093"}}],
        json_schema_extra={"x-keys": "a name of small letters, digits, dots and dashes, such as ops-chat"},
    )


class TemplateError(Exception):
    """A template that cannot be used: where, what is wrong, and the fix."""


def read_template(options: WebhookOptions) -> Template:
    """Read and check a webhook's template. Raises TemplateError; OSError where the file cannot be read."""
    path = Path(str(options.template))
    if path.exists() and not path.is_file():  # a pipe would block
        msg = f"{path}: is not a file (name the file with the body)"
        raise TemplateError(msg)
    with path.open("rb") as file:
        data = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(data) > MAX_TEMPLATE_BYTES:
        msg = f"{path}: is longer than {MAX_TEMPLATE_BYTES} bytes (name the file with the body)"
        raise TemplateError(msg)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        msg = f"{path}: is not UTF-8"
        raise TemplateError(msg) from None
    for match in re.finditer(Template.pattern, text):
        name = match["named"] or match["braced"]
        if match["escaped"] is None and name not in PLACEHOLDERS:
            line = text.count("\n", 0, match.start()) + 1
            known = ", ".join(PLACEHOLDERS)
            what = f"unknown placeholder ${name}" if name else "a lone $"
            msg = f"{path}:{line}: {what} (known: {known}; write $$ for a dollar sign)"
            raise TemplateError(msg)
    made = Template(text)
    if _is_json(options.content_type):
        try:
            json.loads(fill(made, dict.fromkeys(PLACEHOLDERS, 'a "b"\n'), options.content_type))
        except (ValueError, RecursionError) as error:
            msg = f"{path}: gives no JSON: {error} (put each placeholder inside quotes)"
            raise TemplateError(msg) from None
    return made


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0]
    return kind in (JSON, "text/json") or kind.endswith("+json")


def fill(template: Template, values: dict[str, str], content_type: str) -> str:
    """Fill a checked template in."""
    if _is_json(content_type):
        values = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}
    return template.substitute(values)
