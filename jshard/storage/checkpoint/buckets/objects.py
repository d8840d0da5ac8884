"""The objects below a URL of a bucket: read, written, compared and deleted.

TensorStore is the client, for small files as for arrays: one place for credentials,
retries and conditional writes.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorstore

MISSING = b"\x02"  # the generation of an object that does not exist


def _repeating(retries: int) -> dict[str, Any]:
    options = {"max_retries": retries, "initial_delay": "250ms", "max_delay": "20s"}
    return {"s3_request_retries": options, "gcs_request_retries": options}


CONTEXT = _repeating(10)  # for about a minute and a half, before a save fails
AT_START = _repeating(6)  # for a quarter of a minute, while a user waits
_SILENCE = 10.0  # seconds
_BYTE = slice(0, 1)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CONTAINER = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


class BucketError(OSError):
    """What a bucket's server refused, on one line as ``strerror``."""

    def __init__(self, text: str, url: str):
        super().__init__(errno.EIO, text, url)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Overtaken(BucketError):
    """An object is not what this process last read or wrote there."""


class Objects:
    """The objects below a URL.

    Methods raise ``BucketError`` if the server refuses, or cannot be reached for a
    minute and a half.

    Args:
      url: "s3://bucket/path" or "gs://bucket/path".
      context: TensorStore's options: how often a request is repeated.

    Attributes:
      url: Without a slash at its end.
    """

    def __init__(self, url: str, context: Mapping[str, Any] = CONTEXT):
        self.url = url.rstrip("/")
        self._context = context

    def below(self, path: str) -> "Objects":
        """Returns the objects below a path."""
        return Objects(f"{self.url}/{path}", self._context)

    def spec(self, path: str = "") -> dict[str, Any]:
        """Returns TensorStore's key-value store of what is below a path."""
        scheme, _, rest = f"{self.url}/{path}".partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme == "gs":
            return {"driver": "gcs", "bucket": bucket, "path": prefix}
        spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": prefix}
        if endpoint := _first(_ENDPOINTS):  # MinIO, Ceph, R2, ...
            region = _first(_REGIONS) or "us-east-1"
            spec |= {"endpoint": endpoint, "aws_region": region}
        return spec | {
            "aws_credentials": _credentials(), "use_conditional_write": True,
        }  # fmt: skip

    def read(self, path: str) -> tuple[bytes | None, bytes]:
        """Returns an object's content, None if there is none, and its generation."""
        found = self._wait(self._store.read(path))
        missing = found.state == "missing"
        return None if missing else found.value, found.stamp.generation

    def write(self, path: str, content: bytes) -> None:
        """Writes an object."""
        self._wait(self._store.write(path, content))

    def replace(self, path: str, content: bytes, instead_of: bytes) -> None:
        """Replaces an object, unless it is of another generation.

        Args:
          path: Its path below the URL.
          content: Its content, unlike that of any earlier object there.
          instead_of: The generation to replace, or ``MISSING``.

        Raises:
          Overtaken: It is of another generation, in a store that has conditional
            writes.
        """
        self._wait(self._store.write(path, content, if_equal=instead_of))
        # Read, because a write that succeeded may have been repeated, and then failed.
        found, _ = self.read(path)
        if found is None:  # a missing bucket fails conditions, too: this says it
            self.write(path, content)
        elif found != content:
            raise Overtaken(f"{path} was replaced by another process", self.url)

    def generations(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns what identifies each object, in hexadecimal; reads one byte."""
        stats = {path: self._store.read(path, byte_range=_BYTE) for path in paths}
        found = {path: self._wait(stat) for path, stat in stats.items()}
        return {path: one.stamp.generation.hex() for path, one in found.items()}

    def changed(self, generations: Mapping[str, str], *, moved: bool) -> list[str]:
        """Describes objects that are not those of ``generations``.

        Args:
          generations: What ``generations`` returned.
          moved: Whether they have been copied since, so that they only have to exist.
        """
        stats = {
            path: self._store.read(
                path, byte_range=_BYTE, if_not_equal=bytes.fromhex(generation)
            )
            for path, generation in generations.items()
        }
        problems = []
        for path, stat in stats.items():
            found = self._wait(stat)
            if found.state == "missing":
                problems.append(f"{path} is missing")
            elif found.stamp.generation.hex() != generations[path] and not moved:
                problems.append(f"{path} was replaced")
        return problems

    def paths(self, below: str = "") -> list[str]:
        """Lists the paths of objects that begin with ``below``."""
        whole = tensorstore.KvStore.KeyRange(below, _after(below))
        return [path.decode() for path in self._wait(self._store.list(whole))]

    def delete(self, below: str) -> None:
        """Deletes the objects whose paths begin with ``below``."""
        whole = tensorstore.KvStore.KeyRange(below, _after(below))
        self._wait(self._store.delete_range(whole))

    @functools.cached_property
    def _store(self) -> Any:
        return self._wait(
            tensorstore.KvStore.open(
                self.spec(), context=tensorstore.Context(dict(self._context))
            )
        )

    def _wait(self, future: Any) -> Any:
        with explained(self.url):
            return future.result()


def _credentials() -> dict[str, str]:
    """Returns where credentials for S3 are, as AWS's own tools look for them.

    TensorStore's default looks for a profile without a name, and prints an error for
    each place that has none.
    """
    has = os.environ.get
    if has("AWS_ACCESS_KEY_ID"):
        return {"type": "environment"}
    files = (
        has("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        has("AWS_CONFIG_FILE", "~/.aws/config"),
        has("AWS_WEB_IDENTITY_TOKEN_FILE", ""),
    )
    if any(os.path.isfile(os.path.expanduser(file)) for file in files):
        return {"type": "default", "profile": has("AWS_PROFILE", "default")}
    return {"type": "ecs" if _first(_CONTAINER) else "imds"}


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Makes a ``BucketError`` of TensorStore's errors.

    After a while it is said if the server does not answer, or refuses.
    """
    late = threading.Timer(_SILENCE, _say_late, [url, *_counts()])
    late.start()
    try:
        yield
    except ValueError as error:  # TensorStore's, whatever was wrong
        raise BucketError(reason(error), url) from error
    finally:
        late.cancel()


def _say_late(url: str, answers: int, retries: int) -> None:
    answers_now, retries_now = _counts()
    if retries_now > retries:
        text = "the server of %s is busy or cannot be reached for %g s: trying again"
    elif answers_now == answers:
        text = "no answer from the server of %s for %g s: trying again"
    else:
        return
    logging.getLogger("jshard").warning(text, url, _SILENCE)


def _counts() -> tuple[int, int]:
    """Returns how many requests were answered, and how many were repeated."""

    def count(name: str) -> int:
        (metric,) = tensorstore.experimental_collect_matching_metrics(
            f"/tensorstore/{name}", include_zero_metrics=True
        )
        return sum(value["value"] for value in metric["values"])

    return count("http/request_completed"), sum(
        count(f"kvstore/{driver}/retries") for driver in ("s3", "gcs")
    )


def reason(error: Exception) -> str:
    """Returns what a user can act on, of TensorStore's long message."""
    known = {
        r"NoSuchBucket|bucket does not exist|NOT_FOUND": "there is no "
        "such bucket",
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|"
        r"UNAUTHENTICATED|http_response_code='401'": "the credentials are not valid",
        r"AccessDenied|PERMISSION_DENIED|http_response_code='403'": "access denied",
        r"[Cc]redentials": "no credentials were found",
        r"http_response_code='(429|5..)'": "the server is busy or failing",
        r"CURL error|[Cc]ould not connect|[Cc]ouldn't connect|retry attempts failed":
            "the server cannot be reached",
    }  # fmt: skip
    plain = " ".join(str(error).split())
    for pattern, reason in known.items():
        if re.search(pattern, plain):
            return f"{reason} ({plain.split(' [')[0][:160]})"
    return plain[:300]


def _after(prefix: str) -> str:
    """Returns the end of the range of keys that begin with a prefix; "" is no end."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def _first(names: Iterable[str]) -> str:
    return next(filter(None, map(os.environ.get, names)), "")
