"""One mail or one Apprise message, sent by a process of its own: JSON on stdin, JSON on stdout, then it ends.

The daemon kills it at its limit, whatever a mail server or a library does, and carries neither in its own memory.
Answer: `ok`; `answer`: what the other side said, or what went wrong; `refused`: it would be refused again.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import smtplib
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import format_datetime
from socket import getfqdn
from typing import Any, Final
from urllib.parse import urlsplit

from powerguard.daemon.notify.answer import MAX_ANSWER_BYTES, REDIRECTED, error_in, one_line

Result = dict[str, object]
NAME_S: Final = 2.0
"""Timeout for the resolver to report this host's full name."""
IN_BYTES: Final = ("wecombot", "dingtalk")
"""Services of Apprise whose limit is one of bytes, of which a Chinese letter has three; Apprise counts letters."""
GOODBYE_S: Final = 1.0
"""Timeout for a mail server's answer to QUIT."""


def main() -> int:
    """Answer one request."""
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - light
        file.write("500")
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    request = json.load(sys.stdin)
    try:
        result = mail(request) if request["kind"] == "mail" else apprise(request)
    except (OSError, smtplib.SMTPException, ValueError, LookupError, AttributeError, TypeError) as error:
        # Its text may hold what we were sent.
        result = _failed(f"{type(error).__name__}")
    os.write(out, json.dumps(result).encode())
    return 0


def _failed(answer: str, *, refused: bool = False) -> Result:
    return {"ok": False, "answer": answer, "refused": refused}


def mail(request: dict[str, Any]) -> Result:
    """Send one mail."""
    message, options = request["message"], request["options"]
    made = EmailMessage()
    made["Subject"] = message["title"]
    made["From"] = options["sender"]
    made["To"] = ", ".join(options["to"])
    made["Date"] = format_datetime(_moment(message["at"]))
    # The key has names, which may have a space, an @ or letters that no Message-ID has.
    whose = hashlib.sha256(f"{message['host']} {message['key']}".encode()).hexdigest()[:16]
    made["Message-ID"] = f"<{message['id']}.{whose}@powerguard.invalid>"
    made["Auto-Submitted"] = "auto-generated"
    made["X-Powerguard-Event"] = message["event"]
    made.set_content(f"{message['text']}\n\nhost {message['host']}, event {message['event']}\n")
    try:
        context = ssl.create_default_context(cafile=options["ca_file"])
    except OSError as error:  # of which ssl.SSLError is one
        why = "cannot be read as certificates" if isinstance(error, ssl.SSLError) else error.strerror
        return _failed(f"{options['ca_file']}: {why}")
    try:
        with _connected(options, context, float(request["limit_s"])) as server:
            if options["tls"] == "starttls":
                server.starttls(context=context)
            if options["user"] is not None:
                server.login(options["user"], request["secret"])
            refused = server.send_message(made)
    except UnicodeEncodeError:
        return _failed("its login takes only ASCII letters in user and password: give the account another password")
    except ssl.SSLCertVerificationError as error:
        return _failed(f"its certificate does not verify ({error.verify_message}): see ca_file")
    except smtplib.SMTPNotSupportedError:
        if not "".join([options["sender"], *options["to"]]).isascii():
            return _failed("it takes only ASCII letters in addresses: write a domain in its form that begins with xn--")
        return _failed("it does not offer STARTTLS or a login that we know: see tls and port")
    except smtplib.SMTPResponseException as error:
        return _failed(f"{error.smtp_code} {one_line(_bytes(error.smtp_error))}", refused=error.smtp_code >= 500)
    except smtplib.SMTPRecipientsRefused as error:
        code, text = next(iter(error.recipients.values()))
        return _failed(f"{code} {one_line(_bytes(text))}", refused=code >= 500)
    except (smtplib.SMTPException, OSError) as error:
        strerror = error.strerror if isinstance(error, OSError) and not isinstance(error, smtplib.SMTPException) else ""
        return _failed(f"no mail server answers ({strerror or type(error).__name__})")
    who = f", refused for {len(refused)} of {len(options['to'])} addresses" if refused else ""
    return {"ok": True, "answer": f"accepted{who}", "refused": False}


@contextlib.contextmanager
def _connected(options: dict[str, Any], context: ssl.SSLContext, limit_s: float) -> Iterator[smtplib.SMTP]:
    """Connect, and say goodbye at the end. By then the server has answered for the mail: no failure counts any more."""
    where, name = (options["host"], options["port"]), _own_name()
    if options["tls"] == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(*where, local_hostname=name, timeout=limit_s, context=context)
    else:
        server = smtplib.SMTP(*where, local_hostname=name, timeout=limit_s)
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):  # of which smtplib.SMTPException is one
            if server.sock is not None:
                server.sock.settimeout(GOODBYE_S)
            server.quit()
        server.close()


def _own_name() -> str:
    """Return this host's full name for the mail server, or an address in its place (RFC 5321 section 4.1.3).

    Where only DNS knows the name, it takes a resolver 20 s to report that no DNS answers, as in many an outage.
    """
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(getfqdn()), daemon=True)
    asking.start()
    asking.join(NAME_S)
    return next((name for name in found if "." in name), "[127.0.0.1]")


def _moment(at: float) -> Any:  # noqa: ANN401 - a datetime, whose module is loaded by email anyway
    from datetime import UTC, datetime  # noqa: PLC0415 - as above

    return datetime.fromtimestamp(at, UTC)


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def apprise(request: dict[str, Any]) -> Result:
    """Send one message through Apprise."""
    try:
        import requests  # noqa: PLC0415 - comes with Apprise, which is an extra
        from apprise import Apprise, AppriseAsset, NotifyType, OverflowMode  # noqa: PLC0415 - likewise
    except ImportError:
        return _failed("apprise is not installed (pip install 'powerguard[apprise]')")
    logging.disable(logging.CRITICAL)
    seen: list[Any] = []
    send = requests.Session.send

    def watched(session: Any, prepared: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the library's
        # Apprise looks at the status alone for some services, and does not return the answer.
        keywords["allow_redirects"] = False
        if urlsplit(prepared.url).hostname == "oapi.dingtalk.com":
            # Apprise 2.3 quotes the signature twice, which DingTalk answers with "sign not match".
            prepared.url = prepared.url.replace("%25", "%")
        answer = send(session, prepared, **keywords)
        seen.append(answer)
        if answer.is_redirect:
            answer.status_code = 502  # not followed, so not delivered
        elif answer.ok and error_in(answer.content[:MAX_ANSWER_BYTES]):
            answer.status_code = 422
        return answer

    vars_of: Any = requests.Session
    vars_of.send = watched
    vars_of = socket
    vars_of.getfqdn = _own_name  # smtplib asks it, for a mailto:// of Apprise
    message = request["message"]
    kinds = {"error": NotifyType.FAILURE, "warning": NotifyType.WARNING, "info": NotifyType.INFO}
    is_good = message["status"] == "end" and message["level"] == "info"
    kind = NotifyType.SUCCESS if is_good else kinds[message["level"]]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sender = Apprise(asset=AppriseAsset(async_mode=False))
        if not sender.add(request["secret"]):
            return _failed("its URL is not one that Apprise understands", refused=True)
        for service in sender:
            # Else a text that is too long, as of an outage that is reported late, is refused as a whole.
            if service.overflow_mode is OverflowMode.UPSTREAM:
                service.overflow_mode = OverflowMode.SPLIT
            service.request_rate_per_sec = 0  # Apprise pauses for 5 s between the parts: longer than limit_s
            if service.secure_protocol in IN_BYTES:
                service.body_maxlen //= 3
        ok = sender.notify(title=message["title"], body=message["text"], notify_type=kind)
    if not seen:
        return {
            "ok": bool(ok),
            "answer": "sent" if ok else "no answer: no connection, or its certificate",
            "refused": False,
        }
    last = seen[-1]
    if 300 <= last.raw.status < 400:
        return _failed(REDIRECTED, refused=True)
    line = f"{last.raw.status} {one_line(last.content)}".strip()
    status = last.raw.status
    final = last.status_code == 422 or (400 <= status < 500 and status not in (408, 425, 429))
    refused = not ok and final
    return {"ok": bool(ok), "answer": line, "refused": refused}


if __name__ == "__main__":
    sys.exit(main())
