"""``python -m kvcore``: the command line."""

from __future__ import annotations

from kvcore.cli import main

main()
