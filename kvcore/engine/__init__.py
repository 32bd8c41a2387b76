"""The engine: what a cache is called, and how it is stored and found again."""

from __future__ import annotations

from kvcore.engine.keys import ChunkKey, ExtraKey, KeyChain, Namespace, chunk_keys

__all__ = ["ChunkKey", "ExtraKey", "KeyChain", "Namespace", "chunk_keys"]
