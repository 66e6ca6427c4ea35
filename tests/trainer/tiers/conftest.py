from collections.abc import Iterator
from itertools import count

import pytest

from tests.trainer.tiers.rig import Proxy, S3Server

_NUMBERS = count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "log")
    yield server
    server.close()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """The URL of a bucket that nobody else uses."""
    return s3.bucket(f"bucket-{next(_NUMBERS)}")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(s3.port)
    yield proxy
    proxy.close()
