"""The command `gsa`: verb -> function, nothing else. Help texts are the functions' docstrings."""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> None:
    """Runs the command line; errors a user can cause end in one line and exit code 2, Ctrl-C in 130."""
    from jsonargparse import auto_cli

    from gsa import __version__
    from gsa.bench.ops import ops
    from gsa.cli.demo import demo
    from gsa.errors import GSAError

    verbs = {
        "demo": demo,
        "bench": {"_help": "Speed and memory, as ratios measured in one run.", "ops": ops},
    }
    try:
        auto_cli(verbs, args=args, prog="gsa", version=__version__, description="Sequence models with slot memory.")
    except GSAError as error:
        print(f"gsa: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ngsa: stopped", file=sys.stderr)
        raise SystemExit(130) from None
