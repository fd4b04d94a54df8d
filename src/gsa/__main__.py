"""`python -m gsa` is the command `gsa`."""

import sys


def start() -> None:
    """Runs the command. Ctrl-C ends it quietly from here on, also while it is being imported."""
    try:
        from gsa.cli import main

        main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("\ngsa: stopped", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    start()
