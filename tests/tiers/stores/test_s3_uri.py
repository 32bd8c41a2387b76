"""The URI of a bucket: what it may say, and what it must not. And what is made of the client library's messages."""

from __future__ import annotations

import errno

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.s3_errors import explain, server_code
from kvcore.tiers.stores.s3_uri import MIB, S3Address, parse_s3_uri


def test_all_options():
    address = parse_s3_uri(
        "s3://my.bucket-1/a/b_c/?endpoint=http://10.0.0.1:9000/&region=eu-west-3&allow_http=1&part_mb=16"
        "&concurrency=12&timeout=2min&retries=0&profile=cache&ca=/etc/ca.pem"
    )
    assert address == S3Address(
        bucket="my.bucket-1",
        prefix="a/b_c",
        endpoint="http://10.0.0.1:9000",
        region="eu-west-3",
        allow_http=True,
        part_bytes=16 * MIB,
        concurrency=12,
        timeout=120.0,
        retries=0,
        profile="cache",
        ca="/etc/ca.pem",
    )
    assert address.name == "s3://my.bucket-1/a/b_c?endpoint=http://10.0.0.1:9000"


def test_a_bucket_alone():
    assert parse_s3_uri("s3://bucket") == parse_s3_uri("s3://bucket/") == S3Address(bucket="bucket")
    assert parse_s3_uri("s3://bucket").name == "s3://bucket"
    assert parse_s3_uri("s3://bucket?timeout=5").timeout == 5.0


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA0:hush@bucket/p",
        "s3://bucket?aws_secret_access_key=hush",
        "s3://bucket?access_key_id=hush",
        "s3://bucket?session_token=hush",
        "s3://bucket?password=hush",
        "s3://bucket?endpoint=https://user:hush@host",
        "s3://bucket?endpoint=https://hush@host:1",
    ],
)
def test_credentials_are_refused_and_not_repeated(uri):
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID") as caught:
        parse_s3_uri(uri)
    assert "hush" not in str(caught.value)
    assert "AKIA0" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3:", "not the URI of a bucket"),
        ("s3:bucket", "not the URI of a bucket"),
        ("s3://", "not the name of a bucket"),
        ("s3://ab", "not the name of a bucket"),
        ("s3://Bucket", "not the name of a bucket"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/a b", "prefix"),
        ("s3://bucket/" + "a" * 513, "prefix"),
        ("s3://bucket?endpoint=localhost:9000", "not the URL of a server"),
        ("s3://bucket?endpoint=https://host/path", "not the URL of a server"),
        ("s3://bucket?endpoint=ftp://host", "not the URL of a server"),
        ("s3://bucket?endpoint=http://host:x", "host or port"),
        ("s3://bucket?endpoint=http://host:9000", "allow_http=1"),
        ("s3://bucket?region=a/b", "region"),
        ("s3://bucket?part_mb=4", "5 to 512"),
        ("s3://bucket?part_mb=5.5", "part_mb is a number"),
        ("s3://bucket?concurrency=0", "concurrency"),
        ("s3://bucket?timeout=0", "timeout"),
        ("s3://bucket?timeout=soon", "timeout"),
        ("s3://bucket?retries=21", "retries"),
        ("s3://bucket?allow_http=yes", "allow_http"),
        ("s3://bucket?colour=red", "no option 'colour'"),
        ("s3://bucket?region=a&region=b", "twice"),
    ],
)
def test_what_means_nothing(uri, says):
    with pytest.raises(ConfigError, match=says):
        parse_s3_uri(uri)


def test_the_largest_frame():
    assert S3Address(bucket="bucket", part_bytes=5 * MIB).max_frame_bytes == 10_000 * 5 * MIB
    assert S3Address(bucket="bucket", part_bytes=512 * MIB).max_frame_bytes == 10_000 * 512 * MIB
    assert S3Address(bucket="bucket", part_bytes=512 * MIB).max_frame_bytes < 5 << 40


def answer(status: int, code: str = "") -> str:
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Key>k</Key></Error>' if code else ""
    return f"Error performing GET http://h/b/k in 1ms - Server returned non-2xx status code: {status} Reason: {body}"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (answer(403, "AccessDenied"), errno.EACCES, "grant"),
        (answer(403, "SignatureDoesNotMatch"), errno.EACCES, "AWS_SECRET_ACCESS_KEY"),
        (answer(403, "RequestTimeTooSkewed"), errno.EACCES, "clock"),
        (answer(403), errno.EACCES, "status 403"),
        (answer(401), errno.EACCES, "AWS_ACCESS_KEY_ID"),
        (answer(404, "NoSuchBucket"), errno.ENOENT, "create the bucket"),
        (answer(400, "AuthorizationHeaderMalformed"), errno.EINVAL, "region=NAME"),
        (answer(400, "SomethingNew"), errno.EIO, "SomethingNew"),
        (answer(503, "SlowDown"), errno.EAGAIN, "try again later"),
        (answer(429), errno.EAGAIN, "try again later"),
        (answer(413, "EntityTooLarge"), errno.EFBIG, "smaller chunks"),
        (answer(507), errno.ENOSPC, "more disk"),
        (answer(500, "InternalError"), errno.EIO, "status 500"),
        ("Received redirect without LOCATION, an incorrectly configured region", errno.EINVAL, "region=NAME"),
        ("PUT http://169.254.169.254/latest/api/token - " + answer(403), errno.EACCES, "no credentials"),
        ("path External AWS credential provider: boom", errno.EACCES, "profile"),
        ("builder error, source: BadScheme", errno.EINVAL, "allow_http=1"),
        ('"dns error", failed to lookup', errno.EHOSTUNREACH, "name of the server"),
        ("error: InvalidCertificate(UnknownIssuer)", errno.EPROTO, "ca="),
        ("source: TimedOut", errno.ETIMEDOUT, "timeout="),
        ("Os {\n        code: 111,\n        kind: ConnectionRefused", errno.ECONNREFUSED, "is it running"),
        ("Os { code: 113, kind: HostUnreachable", errno.EHOSTUNREACH, "network"),
        ("hyper::Error(IncompleteMessage)", errno.ECONNRESET, "closed the connection"),
        ("never seen before", errno.EIO, "gave up"),
    ],
)
def test_messages_of_the_library(text, code, says):
    error = explain(OSError(text), "store a frame", "s3://bucket/p")
    assert isinstance(error, StoreError)
    assert error.errno == code
    assert says in str(error)
    assert "cannot store a frame in s3://bucket/p" in str(error)
    assert "/b/k" not in str(error)


def test_the_code_of_an_answer():
    assert server_code(OSError(answer(404, "NoSuchKey"))) == "NoSuchKey"
    assert server_code(OSError(answer(404))) == ""
