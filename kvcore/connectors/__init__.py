"""Connectors: an engine's KV cache in and out. Each imports its engine inside functions only."""
