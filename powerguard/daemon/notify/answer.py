"""How the other side answered: one line for people, and whether a status of success hides an error."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Final

from powerguard.fields import clean_text

MAX_ANSWER_BYTES: Final = 4096
REDIRECTED: Final = "redirects elsewhere: not followed (store the new address)"
_LINE: Final = 160
_GOOD: Final = (0, 200, "0", "200", "ok", None)
_SUCCESS: Final = re.compile(
    r"\s*(ok|success|successful|succeeded|succeed|成功|操作成功|请求成功)[.!]?\s*", re.IGNORECASE
)
"""A `msg` that reports a success, whatever the `code`: 1, 20000 and SUCCESS are such codes."""
_REDACTED: Final = "[redacted]"
_SECRET: Final = 6
"""Characters of a part that is a secret by itself: shorter ones are found in every text."""


def one_line(body: bytes, secrets: Sequence[str] = ()) -> str:
    """Return the beginning of an answer in one line, fit for a terminal, without secrets."""
    text = redact(body[:MAX_ANSWER_BYTES].decode("utf-8", "replace"), secrets)
    return clean_text(" ".join(text.split()), _LINE)


def error_in(body: bytes) -> bool:
    """Say whether an answer with a status of success reports an error all the same.

    DingTalk and WeCom: `errcode` is not 0. Feishu and Lark: `code` is not 0, with `msg`. Slack's API: `ok` is false.
    WxPusher: `code` is 1000 for a success, with `success`. Other services have codes of their own for a success.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    if answer.get("errcode") not in _GOOD or answer.get("ok") is False:
        return True
    if "msg" not in answer or answer.get("code") in (*_GOOD, *range(200, 300)) or answer.get("success") is True:
        return False
    return _SUCCESS.fullmatch(str(answer["msg"])) is None


def redact(text: str, secrets: Sequence[str]) -> str:
    """Return text without secrets, nor any longer part of one: the other side may echo what it was sent.

    In upper or lower case, with what a Basic authorization encodes, and with one that a limit has cut at the end.
    """
    is_cut = len(text) >= _LINE
    whole = [each for secret in secrets for each in (secret, _decoded(secret))]
    parts = {part for secret in whole for part in [secret, *_parts(secret)] if len(part) >= _SECRET}
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(re.escape(part), _REDACTED, text, flags=re.IGNORECASE)
        shown, sought = text.lower(), part.lower()
        begun = next((n for n in range(len(part) - 1, _SECRET - 1, -1) if shown.endswith(sought[:n])), 0)
        if is_cut and begun:
            text = text[:-begun] + _REDACTED
    return text


def _decoded(secret: str) -> str:
    scheme, _, encoded = secret.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "replace")
    except ValueError:
        return ""


def _parts(secret: str) -> list[str]:
    return re.split(r"[/?&=@:\s]", secret)
