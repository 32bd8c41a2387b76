"""Prompts for engines: tokens of a long text that every Python brings, and users who share a part of it."""

from __future__ import annotations

import random
from pathlib import Path

from kvcore.errors import ConfigError

__all__ = ["read_document", "shared_prompts"]


def read_document(model: str, *, least: int = 16384) -> list[int]:
    """Return the tokens of chapters of Python's own reference, at least `least` of them: the text is repeated if short.

    Parameters
    ----------
    model : str
        A directory of Hugging Face with a ``tokenizer.json``.
    least : int

    Raises
    ------
    ConfigError
        There is no such file, or this Python comes without its reference.
    """
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{model} has no tokenizer.json; give a directory of Hugging Face")
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data, its reference") from error
    longest = sorted(topics.values(), key=len, reverse=True)[:24]
    tokens = list(Tokenizer.from_file(str(file)).encode("\n\n".join(longest)).ids)
    if not tokens:
        raise ConfigError(f"the tokenizer of {model} makes no tokens of a text")
    while len(tokens) < least:
        tokens += tokens
    return tokens


def shared_prompts(document: list[int], *, shared: int, own: int, users: int, seed: int = 0) -> list[list[int]]:
    """Return the prompts of users who all give the same first tokens, and then each their own.

    Parameters
    ----------
    document : list of int
    shared, own : int
        Tokens of the common part, and of each user's.
    users : int
    seed : int
        From what each user's part is drawn.
    """
    choose = random.Random(seed)
    starts = [choose.randrange(len(document) - own) for _ in range(users)]
    return [document[:shared] + document[start : start + own] for start in starts]
