"""`gsa help`."""

from __future__ import annotations


def show_help(verb: list[str]) -> None:
    """Tells what a verb does and which options it has.

    `gsa help data prepare` is `gsa data prepare --help`; alone, it lists the verbs.

    Args:
        verb: The verb, e.g. data prepare.
    """
    from gsa.cli import run
    from gsa.cli.verbs import find
    from gsa.errors import GSAError

    words = [word for word in verb if word not in ("-h", "--help")]
    path, _ = find(words)
    if len(path) < len(words):
        raise GSAError(f"help: {words[len(path)]!r} is one word too many; expected a verb, as in gsa help data prepare")
    run([*words, "--help"])
