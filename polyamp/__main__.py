"""`python -m polyamp` is the `polyamp` command."""

from __future__ import annotations

from polyamp.cli import main

if __name__ == "__main__":
    main()
