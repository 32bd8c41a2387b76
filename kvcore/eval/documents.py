"""The texts that codecs are measured on: found on the machine, so that nobody's text is shipped."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import ConfigError

__all__ = ["Document", "found_documents", "read_documents"]

# What runs the model is installed wherever this can run: the same texts for everybody, up to versions.
_DISTRIBUTIONS = ("numpy", "torch", "transformers")
_MOST = 200_000  # characters; a prefix of some thousand tokens needs a tenth


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and what it is called."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Digest of the text, so that figures can be told to be about the same one."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def found_documents() -> list[Document]:
    """Return four texts of different kinds: reference prose, program source, licences, and Markdown.

    Raises
    ------
    ConfigError
        This installation lacks one of them.
    """
    texts = {"reference": _reference(), "source": _source(), "licences": _licences(), "readme": _readmes()}
    missing = [name for name, text in texts.items() if not text]
    if missing:
        raise ConfigError(f"nothing found on this machine for {', '.join(missing)}; give documents with --text")
    return [Document(name, text[:_MOST]) for name, text in texts.items()]


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Return the texts of UTF-8 files, named after them.

    Raises
    ------
    ConfigError
        A file cannot be read.
    """
    documents = []
    for path in paths:
        try:
            documents.append(Document(path.name, path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: {error}") from error
    return documents


def _reference() -> str:
    """Python's language reference, if this Python comes with it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _source() -> str:
    """A large module of the standard library."""
    try:
        return inspect.getsource(typing)
    except OSError:
        return ""


def _licences() -> str:
    texts: dict[str, None] = {}
    for distribution in _DISTRIBUTIONS:
        for file in sorted(_files(distribution)):
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")) and file.suffix in ("", ".txt", ".md"):
                texts[file.read_text("utf-8", errors="replace")] = None
    return "\n\n".join(texts)


def _files(distribution: str) -> list[Path]:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    paths = (Path(str(file.locate())) for file in files)
    return [path for path in paths if path.is_file()]


def _readmes() -> str:
    texts = []
    for distribution in _DISTRIBUTIONS[1:]:
        try:
            metadata = importlib.metadata.metadata(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        texts.append(str(metadata.json.get("description", "")))
    return "\n\n".join(filter(None, texts))
