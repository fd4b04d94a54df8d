"""`gsa help`."""

from __future__ import annotations


def show_help(verb: list[str]) -> None:
    """Tells what a verb does and which options it has.

    `gsa help data prepare` is `gsa data prepare --help`; alone, it lists the verbs.

    Args:
        verb: The verb, e.g. data prepare.
    """
    from gsa.cli import run

    run([*verb, "--help"])
