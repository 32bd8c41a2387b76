"""How one value of the engine's configuration is read: from YAML, from the text of a variable, from an argument."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.serde import SerdeConfig, get_registered_serde_types
from kvcore.sizes import parse_size
from kvcore.tiers.config import StoreTierConfig
from kvcore.tiers.stores import store_schemes
from kvcore.tiers.stores.breaker import check_retry

__all__ = [
    "GIB",
    "Form",
    "choice",
    "load_yaml",
    "masked",
    "nearest",
    "read_bytes",
    "read_count",
    "read_disk",
    "read_flag",
    "read_gib",
    "read_host",
    "read_pair",
    "read_path",
    "read_real",
    "read_serde",
    "read_text",
    "read_tiers",
    "read_uri",
    "unless_null",
]

GIB = 1 << 30

_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_NULL = frozenset({"null", "none", "~"})
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SAME = {"redis": "resp", "valkey": "resp", "rediss": "resps", "valkeys": "resps"}
_FS = re.compile(r"fs://([^/]*)(/.*)", re.DOTALL)
_HERE = re.compile(r"|local|localhost|127\.0\.0\.1|[^:]+:0|(?:local|localhost|127\.0\.0\.1):[0-9]+")
_AWS = re.compile(r"s3://([a-z0-9.-]+)\.s3[.-]([a-z]{2}(?:-[a-z]+)+-[0-9]+)\.amazonaws\.com(/[^?]*)?(\?.*)?")
# Up to the last @, or to that of a text in JSON: a password may hold what would end it elsewhere.
_CREDENTIALS = re.compile(r'//(?:[^"\\]|\\.)*@', re.DOTALL)
_SECRET_OPTION = re.compile(r"((?:password|secret|token|credential)[^=&\s]*=)[^&\s\"']*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is written, for the documentation; `unit`: of its numbers; `secret`: it is never shown."""

    text: str
    unit: str = ""
    secret: bool = False


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` with the name that is like the given one, empty where none is."""
    near = difflib.get_close_matches(name, list(names), n=5)  # by what they share: store_workers, for strde_workers
    return f"did you mean {min(near, key=lambda one: _edits(name, one))!r}? " if near else ""


def masked(text: str) -> str:
    """Return a text without the user and password of URIs in it, and without the values of secret options."""
    return _SECRET_OPTION.sub(r"\1***", _CREDENTIALS.sub("//***@", text))


def load_yaml(text: str) -> Any:
    """Return what a YAML text says; plain data alone, and no key twice.

    Raises
    ------
    ConfigError
        It is no YAML, or a mapping has a key twice. The message says the line, and repeats nothing of the text.
    """
    import yaml

    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}this is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        # Of a date that is none, say; the texts of a reader's errors quote characters by their number.
        raise error if isinstance(error, ConfigError) else ConfigError("this is not YAML") from None
    except RecursionError:
        raise ConfigError("this is nested too deeply for YAML of a configuration") from None
    finally:
        if loader is not None:
            loader.dispose()


def read_flag(value: Any) -> bool:
    """Return what true, 1, ``"yes"``, ... or their opposites say."""
    if isinstance(value, bool):
        return value
    found = _FLAGS.get(str(value).strip().lower()) if isinstance(value, (int, str)) else None
    if found is None:
        raise ValueError("write true or false")
    return found


def read_count(value: Any) -> int:
    """Return a whole number, given as one or as text."""
    number = _number(value)
    if number is None or number != int(number) or (isinstance(value, str) and isinstance(number, float)):
        raise ValueError("write a whole number")
    return int(number)


def read_real(value: Any) -> float:
    """Return a number, given as one or as text."""
    number = _number(value)
    if number is None:
        raise ValueError("write a number")
    return float(number)


def read_pair(value: Any) -> tuple[float, float]:
    """Return the shortest and the longest wait, given as both or as one number for both."""
    given = load_yaml(value) if isinstance(value, str) else value
    pair = given if isinstance(given, (list, tuple)) else (given, given)
    if len(pair) != 2:
        raise ValueError("write a number, or two: the shortest and the longest wait")
    return check_retry((read_real(pair[0]), read_real(pair[1])))


def read_gib(value: Any) -> float:
    """Return GiB: of a number as it is, of a text with a unit what it says."""
    number = _number(value)
    if number is not None:
        return float(number)
    if not isinstance(value, str):
        raise ValueError("write a number of GiB, or a size such as 512MiB")  # noqa: TRY004 - pydantic reports a ValueError
    return parse_size(value) / GIB


def read_bytes(value: Any) -> int:
    """Return bytes: of a number as it is, of a text what it says."""
    if isinstance(value, str):
        return parse_size(value)
    return read_count(value)


def read_text(value: Any) -> str:
    """Return a text, empty for null. What YAML takes for something else is refused: ``1.10`` would be ``1.1``."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError("write a text, in YAML within quotes")  # noqa: TRY004 - pydantic reports a ValueError
    return value


def read_path(value: Any) -> str:
    """Return a path as it is; one that begins with the home of a user who is none is refused."""
    text = read_text(value)
    try:
        Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(f"{user} is nobody's home directory here; write the whole path") from None
    return text


def read_host(value: Any) -> str:
    """Return an address to listen on."""
    text = read_text(value).strip()
    if not text or any(letter.isspace() or letter == "/" for letter in text):
        raise ValueError("write an address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all networks")
    if text.count(":") == 1:  # more of them are an address of IPv6
        raise ValueError("this is an address with a port; write the port as metrics_port")
    return text


def unless_null(read: Callable[[Any], Any], nothing: Any) -> Callable[[Any], Any]:
    """Return a reader that takes null, and the word in a text, for `nothing`."""

    def read_or_nothing(value: Any) -> Any:
        null = value is None or (isinstance(value, str) and value.strip().lower() in _NULL)
        return nothing if null else read(value)

    return read_or_nothing


def choice(kind: str, names: Callable[[], Sequence[str]], refused: Mapping[str, str] | None = None) -> Any:
    """Return a reader of one of some names, in any case; `refused` are names that have a reason of their own."""

    def read_choice(value: Any) -> str:
        text = read_text(value).strip()
        found = {name.lower(): name for name in names()}
        if text.lower() in found:
            return found[text.lower()]
        if text.lower() in (refused or {}):
            raise ValueError((refused or {})[text.lower()])
        allowed = ", ".join(name or "(empty)" for name in found.values())
        raise ValueError(f"there is no {kind} {text!r}; {nearest(text.lower(), found)}there are {allowed}")

    return read_choice


def read_serde(value: Any) -> str | dict[str, Any]:
    """Return a serde in the shortest form: its name, or a mapping where it has options."""
    given = load_yaml(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    config = SerdeConfig.of(given)
    known = get_registered_serde_types()
    if config.type not in known:
        near = nearest(config.type.lower(), known)
        raise ValueError(f"there is no serde {config.type!r}; {near}there are {', '.join(known)}")
    if config.type == "chain" and isinstance(config.kwargs.get("steps"), list):
        return {"type": "chain", **config.kwargs, "steps": [read_serde(step) for step in config.kwargs["steps"]]}
    name = "raw" if config.type == "naive" else config.type  # or tiers of the two would not share their frames
    return {"type": name, **config.kwargs} if config.kwargs else name


def read_uri(value: Any) -> str:
    """Return the URI of a store, of other software's URIs that which means the same. No message repeats the URI."""
    text = read_text(value).strip()
    if not text:
        return ""
    found = _SCHEME.match(text)
    known = store_schemes()
    if found is None:
        raise ValueError(f"this is not the URI of a store: it begins with none of {', '.join(f'{s}:' for s in known)}")
    scheme, rest = found[1], text[found.end() :]
    if scheme in _SAME:
        return f"{_SAME[scheme]}:{rest}"
    if scheme == "file":
        return f"fs:{_file_path(text)}"
    if place := _FS.fullmatch(text):
        if not _HERE.fullmatch(place[1]):
            raise ValueError("fs: is a directory of this machine, and has no host: write fs:/var/cache/kvcore")
        return f"fs:{place[2]}"
    if bucket := _AWS.fullmatch(text):
        options = f"{bucket[4]}&" if bucket[4] else "?"
        return f"s3://{bucket[1]}{(bucket[3] or '').rstrip('/')}{options}region={bucket[2]}"
    if scheme not in known:
        near = nearest(scheme.lower(), (*known, *_SAME))
        raise ValueError(f"there is no kind of store {scheme!r}; {near}there are {', '.join(known)}")
    return text


def read_disk(value: Any) -> bool | str:
    """Return a directory; False for none, and True for the one that is taken where none is named."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _FLAGS or not text:
            return _FLAGS.get(text.lower(), False)
        if "," in text:
            raise ValueError("this is one directory; name several under tiers, each as fs:/path with a name of its own")
        found = _SCHEME.match(text)
        scheme = found[1] if found is not None else ""
        if scheme == "fs":
            return read_path(read_uri(text).removeprefix("fs:"))
        if scheme != "file" and (scheme in _SAME or scheme in store_schemes()):
            raise ValueError("this is a store, not a directory; name it as remote_url, or under tiers")
        return read_path(_file_path(text) if scheme == "file" else text)
    if isinstance(value, bool):
        return value
    raise ValueError("write a directory, or true or false")


def read_tiers(value: Any) -> Any:
    """Return a list of tiers to be validated. One is a URI, or a mapping with ``store``."""
    if isinstance(value, str):
        text = value.strip()
        value = load_yaml(text) if text[:1] in {"[", "{", "-"} else [text] if text else []
    entries = [value] if isinstance(value, (Mapping, StoreTierConfig)) else value
    if not isinstance(entries, (list, tuple)):
        raise ValueError("write a list of tiers: each a URI, or a mapping with store")  # noqa: TRY004 - pydantic reports a ValueError
    return [_tier(entry, number) for number, entry in enumerate(entries)]


def _edits(one: str, other: str) -> int:
    """How many letters have to be put in, left out or changed to make one text of another."""
    row = list(range(len(other) + 1))
    for count, letter in enumerate(one, 1):
        last, row[0] = row[0], count
        for at, wanted in enumerate(other, 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (letter != wanted))
    return row[-1]


def _tier(entry: Any, number: int) -> Any:
    if isinstance(entry, str):
        entry = {"store": entry}
    if not isinstance(entry, Mapping):
        return entry  # an object as it is; anything else is refused with its place
    tier = dict(entry)
    for name, read in (("store", read_uri), ("serde", read_serde)):
        if name in tier:
            try:
                tier[name] = read(tier[name])
            except ValueError as error:
                raise ValueError(f"tier {number}: {name}: {error}") from None
    return tier


def _number(value: Any) -> int | float | None:
    """A number that is given as one or as text, if it is one, and finite."""
    if isinstance(value, str):
        text = value.strip()
        if not _NUMBER.fullmatch(text) or abs(float(text)) >= 1e18:
            return None
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 1e18 else None  # false for NaN too


def _file_path(text: str) -> str:
    """The path of a ``file:`` URI, where two slashes may precede a relative path, as other software has it."""
    rest = text.removeprefix("file:")
    path = rest[2:] if rest.startswith("//") else rest
    if not path:
        raise ValueError("file:// names no directory; write file:///var/cache/kvcore")
    return path


def _refuse_twice(root: Any) -> None:
    """Refuse a mapping of a YAML tree that has a key twice, of which YAML would take the last without a word."""
    seen: set[int] = set()
    rest = [root]
    while rest:
        node = rest.pop()
        if id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))
        keys: set[str] = set()
        for child in node.value:
            pair = child if isinstance(child, tuple) else (child,)
            rest += pair
            if len(pair) == 2 and isinstance(pair[0].value, str):
                if pair[0].value in keys:
                    raise ConfigError(
                        f"line {pair[0].start_mark.line + 1}: {pair[0].value!r} stands here a second time"
                    )
                keys.add(pair[0].value)
