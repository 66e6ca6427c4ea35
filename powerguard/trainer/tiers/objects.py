"""A tier in an object store, over obstore: S3 and what speaks it, Google's and Azure's.

    <url>/<job>/step-000000001234-9f86d081/shard-00000/<part> ...   first
                                           MANIFEST.json            created if absent, last: the commit
                                           SET-ASIDE                a marker: never load this again

Parts are objects of their own, not parts of S3's multipart uploads: they can be listed, taken up again by any process,
and read one by one; nothing invisible is left behind that costs money; and it is the same on every store.

This is the only module that knows obstore's settings and what its errors mean.
"""

import configparser
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powerguard.trainer.store.folders import Found
from powerguard.trainer.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, Shard, step_of
from powerguard.trainer.store.shards import digest_of
from powerguard.trainer.tiers.base import (
    MAX_REASON_BYTES,
    NEWEST,
    SET_ASIDE,
    Kind,
    Listed,
    Part,
    Remote,
    Seen,
    Source,
    TierError,
    conflict,
    digest_there,
    folder_of,
    newest_first,
    outdated,
    part_of,
    parts_of,
    unfinished,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore


CONNECT_TIMEOUT: Final = timedelta(seconds=5)
PUT_TIMEOUT: Final = timedelta(seconds=300)
"""Limit for one part: 32 MiB need 112 kB/s and connection. While a body goes up the server does not answer."""

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
        msg = f"{url}: needs obstore, which is not installed ({sys.executable} -m pip install 'obstore>=0.12')"
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
        config |= credentials(Path(remote.credentials_file).expanduser(), remote.profile)
    try:
        # Retries are ours: obstore's would be invisible, and each connection's own.
        open_url: Callable[..., ObjectStore] = from_url  # its overloads know one kind of config each
        return open_url(url, config=config, client_options=client, retry_config={"max_retries": 0})
    except (BaseError, ValueError) as error:
        raise tier_error(error, url) from None


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
        reason = error.strerror if isinstance(error, OSError) else "is not text"
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


def tier_error(error: Exception, where: str) -> TierError:
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


_PART: Final = re.compile(r"(\d{8})-(\d{1,8})-[0-9a-f]{32}")


class ObjectTier:
    """One job's checkpoints in an object store. Opens no connection until it is asked for something."""

    def __init__(self, remote: Remote, job: str) -> None:
        self.word = remote.url.partition("://")[0]
        self.url = f"{remote.url.rstrip('/')}/{folder_of(job)}"
        self._part_bytes = remote.part_bytes
        self._store = opened(remote, self.url)
        self._slow = opened(remote, self.url, PUT_TIMEOUT)

    # --- Writing ---------------------------------------------------------------------------------------------------

    def committed(self, name: str) -> str | None:
        return digest_there(self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES))

    def missing(self, name: str, shard: Shard, seen: Seen) -> list[Part]:  # noqa: ARG002 - one answer has all
        present = self._chunks(name, shard)
        return [
            part
            for part in parts_of(shard, self._part_bytes)
            if any(part.first + number not in present for number in range(len(part.digests)))
        ]

    def put(self, name: str, part: Part, content: memoryview) -> None:
        import obstore

        with self._worded(f"{part.file} part {part.first}"):
            obstore.put(self._slow, f"{name}/{part.file}/{part.name}", content, use_multipart=False)

    def finish(self, name: str, shard: Shard, seen: Seen) -> None:
        """Nothing is left to do: an object is there as a whole, and with its checksum, or not at all."""

    def absent(self, name: str, manifest: Manifest) -> list[int]:
        shards = (packed.unpacked() for packed in manifest.shards)  # one at a time: all of them may fill the memory
        return [shard.rank for shard in shards if len(self._chunks(name, shard)) < len(shard.digests)]

    def commit(self, name: str, manifest: Manifest) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        content = manifest.to_json()
        with self._worded(MANIFEST):
            try:
                obstore.put(self._store, f"{name}/{MANIFEST}", content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                found = self.committed(name)
                if found == manifest.digest:
                    return False
                raise conflict(self.url, name, found, manifest.digest) from None
        return True

    def prune(self, keep: int, keep_days: int, spare: str) -> list[str]:
        names = outdated(self._listed(), keep, keep_days, spare)
        self._remove(names)
        return names

    def clear(self, spare: str) -> bool:
        names = unfinished(self._listed(), spare)
        self._remove(names)
        return bool(names)

    def remove(self, name: str) -> None:
        """Remove this one."""
        self._remove([name])

    def remove_stale(self) -> None:
        """Remove what was never committed and is a day older than a newer one."""
        self.prune(sys.maxsize, 0, "")

    def _remove(self, names: Sequence[str]) -> None:
        import obstore

        for name in names:
            with self._worded(name):
                # The manifest goes first and alone: a half-removed checkpoint must not look whole.
                if self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES) is not None:
                    obstore.delete(self._store, f"{name}/{MANIFEST}")
                for page in obstore.list(self._store, name):
                    obstore.delete(self._store, [entry["path"] for entry in page])

    # --- Reading ---------------------------------------------------------------------------------------------------

    def found(self, most: int | None = NEWEST) -> list[Found]:
        """See `Tier.found`. most: None: all of them."""
        found: list[Found] = []
        refused = ""
        for name in newest_first(self.by_commit()):
            if len(found) == most:
                break
            try:
                each = self.looked_at(name)
            except TierError as error:
                if error.kind is not Kind.CORRUPT:
                    raise
                refused = refused or str(error)
            else:
                found += [] if each is None else [each]  # None: removed meanwhile
        if refused and not found:  # else training would begin at step 0
            raise TierError(Kind.UNUSABLE, refused)
        return found

    def looked_at(self, name: str) -> Found | None:
        """Read a manifest; None: there is none. Raises TierError (corrupt) for one that does not hold."""
        content = self._content(f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)
        if content is None:
            return None
        try:
            manifest = Manifest.parse(content)
        except ManifestError as error:
            raise TierError(Kind.CORRUPT, f"{self.url}/{name}/{MANIFEST}: {error}") from None
        if manifest.step != step_of(name):
            msg = f"{self.url}/{name}/{MANIFEST}: is of step {manifest.step}, which is not the folder's"
            raise TierError(Kind.CORRUPT, msg)
        return Found(
            step=manifest.step,
            name=name,
            path=f"{self.url}/{name}",
            manifest=manifest,
            digest=manifest.digest,
            tier=self.word,
        )

    def open_shard(self, found: Found, shard: Shard) -> Source:
        where = self._chunks(found.name, shard)
        missing = next((index for index in range(len(shard.digests)) if index not in where), None)
        if missing is not None:
            msg = f"{found.path}/{shard.file}: the part with chunk {missing} is missing"
            raise TierError(Kind.CORRUPT, msg)
        return _ObjectShard(self, shard, where)

    def read(self, path: str, start: int, target: memoryview) -> None:
        """Fill the target from an object, from byte `start` on."""
        import obstore

        with self._worded(path):
            content = memoryview(obstore.get_range(self._store, path, start=start, length=len(target)))
        if len(content) != len(target):
            msg = f"{self.url}/{path}: the answer was cut short"
            raise TierError(Kind.NETWORK, msg)
        target[:] = content

    def set_aside(self, found: Found, reason: str) -> None:
        import obstore

        with self._worded(found.name):
            obstore.put(self._store, f"{found.name}/{SET_ASIDE}", reason.encode()[:MAX_REASON_BYTES])

    def aside(self, most: int | None = NEWEST) -> list[str]:
        return [name for name in self._names()[:most] if self._is_aside(name)]

    def _is_aside(self, name: str) -> bool:
        return self._content(f"{name}/{SET_ASIDE}", MAX_REASON_BYTES) is not None

    # --- What both sides need --------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All checkpoints' names, highest step first."""
        import obstore

        with self._worded("list"):
            prefixes = obstore.list_with_delimiter(self._store)["common_prefixes"]
        if not prefixes and self._content(f"probe-{secrets.token_hex(8)}", MAX_MANIFEST_BYTES) is not None:
            # In a web page, too, nothing is listed; and training must not begin at step 0 for one.
            msg = f"{self.url}: answers as a web page does (set endpoint to the store's S3 address, not to its console)"
            raise TierError(Kind.UNUSABLE, msg)
        return sorted((name for name in prefixes if step_of(name) is not None), reverse=True)

    def by_commit(self) -> list[str]:
        """The names of those that are committed and not set aside, the one committed last first."""
        known = []
        for name in self._names():
            with self._worded(name):
                modified = {entry["path"].rpartition("/")[2]: entry["last_modified"] for entry in self._entries(name)}
            if MANIFEST in modified and SET_ASIDE not in modified:
                known.append((modified[MANIFEST], name))
        return [name for _, name in sorted(known, reverse=True)]

    def _entries(self, name: str) -> "Sequence[ObjectMeta]":
        """What lies directly in a checkpoint's folder: the manifest, a marker."""
        import obstore

        return obstore.list_with_delimiter(self._store, name)["objects"]

    def _chunks(self, name: str, shard: Shard) -> dict[int, tuple[str, int]]:
        """Which chunks of a shard are there, however it was cut: the part's object, and the first chunk in it."""
        import obstore

        with self._worded(f"{name}/{shard.file}"):
            pages = list(obstore.list(self._store, f"{name}/{shard.file}", chunk_size=1000))
        where: dict[int, tuple[str, int]] = {}
        for entry in (entry for page in pages for entry in page):
            match = _PART.fullmatch(entry["path"].rpartition("/")[2])
            if match is not None:
                part = part_of(shard, int(match[1]), int(match[2]))
                if (part.name, part.size_bytes) == (match[0], entry["size"]):  # its name says what is in it
                    chunks = range(part.first, part.first + len(part.digests))
                    where.update(dict.fromkeys(chunks, (entry["path"], part.first)))
        return where

    def _listed(self) -> list[Listed]:
        import obstore

        listed = []
        for name in self._names():
            with self._worded(name):
                entries = [entry for page in obstore.list(self._store, name, chunk_size=1000) for entry in page]
            stored = {entry["path"].removeprefix(f"{name}/"): entry["last_modified"].timestamp() for entry in entries}
            listed.append(Listed.of(name, stored))
        return listed

    def _content(self, path: str, most: int) -> bytes | None:
        """A small object; None: there is none."""
        import obstore

        with self._worded(path):
            try:
                answer = obstore.get(self._store, path)
            except FileNotFoundError as error:
                if code_of(error) == "NoSuchBucket":
                    raise
                return None
            if answer.meta["size"] > most:
                msg = f"{self.url}/{path}: has {answer.meta['size']} bytes, more than the {most} that it may have"
                raise TierError(Kind.CORRUPT, msg)
            return bytes(answer.bytes())

    @contextmanager
    def _worded(self, what: str) -> Iterator[None]:
        """Say what a store's errors mean, in our words: theirs quote requests, with all that is in them."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError, ValueError) as error:
            raise tier_error(error, f"{self.url}: {what}") from None


class _ObjectShard:
    """A shard whose parts are all there. where: of each chunk the part's object, and the first chunk in it."""

    def __init__(self, tier: ObjectTier, shard: Shard, where: dict[int, tuple[str, int]]) -> None:
        self._tier = tier
        self._shard = shard
        self._where = where

    def read_chunk(self, index: int, target: memoryview) -> None:
        path, first = self._where[index]
        self._tier.read(path, (index - first) * self._shard.chunk_bytes, target)
        if digest_of(target) != self._shard.digests[index]:
            msg = f"{self._tier.url}/{path}: chunk {index} does not match its digest"
            raise TierError(Kind.CORRUPT, msg)

    def close(self) -> None:
        """Nothing is open between two chunks."""
