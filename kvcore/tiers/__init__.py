"""Tiers: where chunks are kept."""
