"""URIs of Redis and Valkey servers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvcore.errors import ConfigError
from kvcore.settings import VARIABLES
from kvcore.tiers.stores.resp_uri import RespAddress, parse_resp_uri


def test_a_host_alone_has_the_usual_port_and_database() -> None:
    assert parse_resp_uri("resp://cache") == RespAddress(host="cache", port=6379, db=0)


def test_every_part_is_read() -> None:
    address = parse_resp_uri(
        "resps://al%40ice:s%3Acr%2Fet@cache.example:7000/3?prefix=a/b:&pool=3&timeout=250ms&protocol=3&ttl=2h"
        "&quarantine=60&ca=/etc/ca.pem&cert=/etc/c.pem&key=/etc/k.pem&verify=0"
    )
    assert address == RespAddress(
        host="cache.example",
        port=7000,
        db=3,
        user="al@ice",
        password="s:cr/et",
        prefix="a/b:",
        pool=3,
        timeout=0.25,
        protocol=3,
        ttl=7200,
        quarantine=60,
        tls=True,
        ca="/etc/ca.pem",
        cert="/etc/c.pem",
        key="/etc/k.pem",
        verify=False,
    )
    assert address.name == "resps://cache.example:7000/3?prefix=a/b:"


def test_a_socket_and_an_address_of_version_6() -> None:
    assert parse_resp_uri("resp+unix:///run/my%20redis.sock?pool=2") == RespAddress(
        host="", socket="/run/my redis.sock", pool=2
    )
    assert parse_resp_uri("resp://[::1]:7000?cluster=1") == RespAddress(host="::1", port=7000, cluster=True)
    assert parse_resp_uri("resp://[::1]:7000").name == "resp://[::1]:7000/0?prefix=kvcore:"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("resp:", "write resp://"),
        ("resp:cache:6379", "write resp://"),
        ("resp://", "names a host"),
        ("resp://:6379", "names a host"),
        ("resp://cache:port", "host or port"),
        ("resp://cache:70000", "host or port"),
        ("resp://cache:0", "port 0"),
        ("resp://cache/x", "database is a number"),
        ("resp://cache/-1", "database is a number"),
        ("resp://cache#0", "%23"),
        ("resp://[::1", "host or port"),
        ("resp+unix://host/run/s", "absolute path"),
        ("resp+unix://", "absolute path"),
        ("resp://cache?nonsense=1", "no option 'nonsense'"),
        ("resp://cache?pool=1&pool=2", "twice"),
        ("resp://cache?pool=0", "pool=0"),
        ("resp://cache?pool=many", "pool is a number"),
        ("resp://cache?timeout=0", "timeout=0"),
        ("resp://cache?timeout=soon", "not a time"),
        ("resp://cache?ttl=1us", "ttl=1e-06"),
        ("resp://cache?quarantine=0", "quarantine=0"),
        ("resp://cache?protocol=4", "protocol=4"),
        ("resp://cache?prefix=", "without a value"),
        ("resp://cache?prefix=a*b", "prefix='a\\*b'"),
        ("resp://cache?prefix=%7Bslot%7D", "prefix='{slot}'"),
        ("resp://cache?prefix=" + 65 * "x", "1 to 64"),
        ("resp://cache?cluster=yes", "write 1 or 0"),
        ("resp://cache/1?cluster=1", "database 0"),
        ("resp+unix:///run/s?cluster=1", "Unix socket"),
        ("resp://cache?ca=/etc/ca.pem", "write resps://"),
        ("resp://cache?verify=0", "write resps://"),
        ("resps://cache?cert=/etc/c.pem", "go together"),
    ],
)
def test_what_means_nothing_is_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_resp_uri(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "resp://user:hunter2@cache:port",
        "resp://user:hunter2@/0",
        "resp://user:hunter2#x@cache",
        "resp://user:hunter2@cache/x",
        "resp://user:hunter2@cache?prefix=*",
        "resp+unix://user:hunter2@/?pool=0",
    ],
)
def test_no_message_repeats_a_password(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_resp_uri(uri)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.__cause__)


def test_the_password_comes_from_the_environment_where_the_uri_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_RESP_PASSWORD", "hunter2")
    address = parse_resp_uri("resp://cache")
    assert address.password == "hunter2"
    assert parse_resp_uri("resp://:other@cache").password == "other"
    assert "hunter2" not in repr(address) + address.name


def test_a_secret_variable_is_in_no_report() -> None:
    (variable,) = (v for v in VARIABLES if v.name == "KVCORE_RESP_PASSWORD")
    assert variable.shown({variable.name: "hunter2"}) == "(set)"
    assert variable.shown({}) is None
    (plain,) = (v for v in VARIABLES if v.name == "KVCORE_BACKEND")
    assert plain.shown({plain.name: "cpu"}) == "cpu"


def test_the_client_library_is_imported_only_when_a_store_is_opened() -> None:
    program = (
        "import sys\n"
        "import kvcore.tiers.stores.resp as resp\n"
        "assert 'redis' not in sys.modules\n"
        "sys.modules['redis'] = None\n"
        "sys.modules.pop('kvcore.tiers.stores.resp_client', None)\n"
        "resp.open_resp('resp://127.0.0.1:1')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        'needs the package redis, which is not installed; pip install "kvcore[redis]"'
    )
