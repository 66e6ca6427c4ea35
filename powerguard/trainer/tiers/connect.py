"""How an object store is reached, and what its errors mean. The only module that knows obstore's settings and texts."""

import configparser
import os
import re
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powerguard.trainer.tiers.base import Kind, Remote, TierError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

CONNECT_TIMEOUT: Final = timedelta(seconds=5)
PUT_TIMEOUT: Final = timedelta(seconds=300)
"""For one part: 32 MiB need 112 kB/s and connection. Nothing is heard while a body goes up, so nothing finer tells."""

GET_TIMEOUT: Final = timedelta(seconds=60)
"""For everything else: the longest is to read one chunk of 8 MiB."""

MAX_CREDENTIALS_BYTES: Final = 1 << 20

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_KEYS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_BY_CODE: Final = {
    "SlowDown": (Kind.THROTTLED, "asks us to slow down"),
    "RequestLimitExceeded": (Kind.THROTTLED, "asks us to slow down"),
    "Throttling": (Kind.THROTTLED, "asks us to slow down"),
    "TooManyRequests": (Kind.THROTTLED, "asks us to slow down"),
    "NoSuchBucket": (Kind.ABSENT, "there is no such bucket (make it, or correct the URL)"),
    "RequestTimeTooSkewed": (Kind.CLOCK, "this host's clock is off by more than 15 minutes (set it: timedatectl)"),
    "InvalidAccessKeyId": (Kind.DENIED, "the access key is not known there (check the credentials)"),
    "SignatureDoesNotMatch": (Kind.DENIED, "the secret key is wrong, or a proxy changes requests"),
    "ExpiredToken": (Kind.DENIED, "the session token has expired (renew the credentials)"),
    "InvalidToken": (Kind.DENIED, "the session token is not valid (renew the credentials)"),
    "AccessDenied": (Kind.DENIED, "access is denied (get, put, list and delete are needed below this URL)"),
    "AuthorizationHeaderMalformed": (Kind.UNUSABLE, "the bucket is in another region (set region)"),
    "PermanentRedirect": (Kind.UNUSABLE, "the bucket is in another region (set region)"),
    "QuotaExceeded": (Kind.FULL, "the quota is used up"),
    "XMinioStorageFull": (Kind.FULL, "the store is full"),
    "BadDigest": (Kind.NETWORK, "a part arrived with other bytes than were sent"),
    "XAmzContentChecksumMismatch": (Kind.NETWORK, "a part arrived with other bytes than were sent"),
    "XAmzContentSHA256Mismatch": (Kind.NETWORK, "a part arrived with other bytes than were sent"),
    "RequestTimeout": (Kind.NETWORK, "the connection stalled"),
    "IncompleteBody": (Kind.NETWORK, "the connection was cut"),
}


def opened(remote: Remote, url: str, timeout: timedelta = GET_TIMEOUT) -> "ObjectStore":
    """Make the client of an object store; nothing is sent yet. Raises TierError."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        msg = f"{url}: needs obstore (pip install '.[s3]' in a checkout of powerguard)"
        raise TierError(Kind.UNUSABLE, msg) from None
    client: ClientConfig = {"timeout": timeout, "connect_timeout": CONNECT_TIMEOUT}
    config: dict[str, Any] = {}
    if url.startswith("s3"):
        if remote.checksum:  # the server checks each part's sha256; signing it too would compute it twice
            config |= {"checksum_algorithm": "SHA256", "unsigned_payload": True}
        if remote.region is not None:
            config["region"] = remote.region
    if remote.endpoint is not None:
        config["endpoint"] = remote.endpoint
        client["allow_http"] = remote.endpoint.startswith("http://")
    if remote.credentials_file is not None:
        config |= credentials(Path(remote.credentials_file), remote.profile)
    try:
        # Retries are ours: obstore's would be invisible, and each connection's own.
        open_url: Callable[..., ObjectStore] = from_url  # its overloads know one kind of config each
        return open_url(url, config=config, client_options=client, retry_config={"max_retries": 0})
    except (BaseError, ValueError) as error:
        raise told(error, url) from None


def credentials(path: Path, profile: str) -> dict[str, str]:
    """Read one profile of a file as ~/.aws/credentials. Raises TierError, which never quotes the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_IMODE(mode) & 0o077 or not stat.S_ISREG(mode):
                msg = f"{path}: others can read these credentials (chmod 0400 {path})"
                raise TierError(Kind.DENIED, msg)
            text = file.read(MAX_CREDENTIALS_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        msg = f"{path}: credentials cannot be read ({reason})"
        raise TierError(Kind.DENIED, msg) from None
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
        section = dict(parser[profile])
    except (configparser.Error, KeyError):
        msg = f"{path}: has no readable profile [{profile}]"
        raise TierError(Kind.DENIED, msg) from None
    found = {ours: section[theirs] for theirs, ours in _KEYS.items() if section.get(theirs)}
    if not {"access_key_id", "secret_access_key"} <= found.keys():
        msg = f"{path}: [{profile}] needs aws_access_key_id and aws_secret_access_key"
        raise TierError(Kind.DENIED, msg)
    return found


def code_of(error: Exception) -> str:
    """The word by which an S3 server names its error; "" when it gave none."""
    match = _CODE.search(str(error))
    return "" if match is None else match[1]


def told(error: Exception, where: str) -> TierError:
    """Say what a store's error means, in our words: its own text quotes requests, with all that is in them."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    match = _STATUS.search(text)
    status = 0 if match is None else int(match[1])
    code = code_of(error)
    if code in _BY_CODE:
        kind, meaning = _BY_CODE[code]
    elif status in {429, 503}:
        kind, meaning = Kind.THROTTLED, "asks us to slow down"
    elif status in {408, 409}:
        kind, meaning = Kind.NETWORK, "asks us to try again"
    elif status >= 500:
        kind, meaning = Kind.SERVER, "the server failed"
    elif status in {401, 403} or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        kind, meaning = Kind.DENIED, "access is denied (check the credentials and what they may do)"
    elif isinstance(error, FileNotFoundError):
        kind, meaning = Kind.ABSENT, "is not there"
    elif status:
        kind, meaning = Kind.UNUSABLE, "the request was refused"
    elif "redential" in text or "token" in text.lower():
        kind, meaning = (
            Kind.DENIED,
            "no credentials were found (set credentials_file, or what the cloud's own tools use)",
        )
    else:
        kind, meaning = Kind.NETWORK, "no answer (is the address right, and the network there?)"
    source = " ".join(filter(None, [str(status) if status else "", code]))
    return TierError(kind, f"{where}: {meaning}" + (f" [{source}]" if source else ""))
