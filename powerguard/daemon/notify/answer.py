"""How the other side answered: its first line for people, and whether a status of success hides an error."""

import json
from typing import Final

from powerguard.fields import clean_text

MAX_ANSWER_BYTES: Final = 4096
REDIRECTED: Final = "redirects elsewhere: not followed (store the new address)"
_LINE: Final = 160
_GOOD: Final = (0, 200, "0", "200", "ok", None)
_REDACTED: Final = "[redacted]"


def first_line(body: bytes) -> str:
    """Return the first line of an answer, fit for a terminal."""
    text = body[:MAX_ANSWER_BYTES].decode("utf-8", "replace").strip()
    return clean_text(text.partition("\n")[0].strip(), _LINE)


def error_in(body: bytes) -> bool:
    """Say whether an answer with a status of success reports an error all the same.

    DingTalk and WeCom: `errcode` is not 0. Feishu and Lark: `code` is not 0, with `msg`. Slack's API: `ok` is false.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(told, dict):
        return False
    if told.get("errcode") not in _GOOD or told.get("ok") is False:
        return True
    return "msg" in told and told.get("code") not in _GOOD


def redact(text: str, secrets: list[str]) -> str:
    """Return text without secrets, nor any longer part of a secret URL: the other side may echo what it was sent."""
    parts = {part for secret in secrets for part in [secret, *_parts(secret)] if len(part) >= 6}
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, _REDACTED)
    return text


def _parts(secret: str) -> list[str]:
    for mark in "?&=@:":
        secret = secret.replace(mark, "/")
    return secret.split("/")
