"""The command `gsa`: finds the verb, parses its options and runs it. Help texts are the functions' docstrings."""

from __future__ import annotations

import signal
import sys
from typing import Any

from gsa import __version__
from gsa.console import tell, watched_output
from gsa.errors import GSAError, memory_errors


def main(args: list[str] | None = None) -> None:
    """Runs the command line; errors a user can cause end in one line and exit code 2, Ctrl-C in 130, SIGTERM in 143."""
    if args is None:  # this process is the command's own
        signal.signal(signal.SIGTERM, _ended)
    try:
        try:
            with watched_output(), memory_errors("command"):
                run(sys.argv[1:] if args is None else args)
        finally:
            if args is None:  # the process ends here, and another Ctrl-C would only disturb that
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        tell("stopped", begin="\n")
        raise SystemExit(130) from None
    except GSAError as error:
        tell(error)
        raise SystemExit(2) from None


def _ended(number: int, frame: object) -> None:
    """Ends the command from where it is, so that it removes what it has half written."""
    raise SystemExit(128 + number)


def run(args: list[str]) -> None:
    """Does what the arguments ask for. The parser and the verb are imported last: help and version need neither."""
    from gsa.cli.verbs import Group, find, help_of, load

    path, entry = find(args)
    if path == ["help"]:  # at once, without the parser
        load(entry)(args[1:])
        return
    given, command = args[len(path) :], " ".join(["gsa", *path])
    if isinstance(entry, Group):
        if not path and given[:1] == ["--version"]:
            print(f"gsa {__version__}")
            raise SystemExit
        if not args or given[:1] in (["-h"], ["--help"]):
            print(help_of(entry, command), end="")
            raise SystemExit
        if not given:
            from gsa.cli.mistakes import no_verb

            tell(no_verb(entry.verbs), name=command)
            raise SystemExit(2)

    from jsonargparse import auto_cli, set_parsing_settings

    from gsa.cli.parser import Parser, dashed, files_first

    # Help texts are the docstrings of fields; and a file of settings makes no objects.
    set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
    given = files_first(dashed(given))
    if path == ["train"]:
        from gsa.cli.train import options_win, with_recipe

        given = options_win(with_recipe(given))
    options: dict[str, Any] = {} if path else {"version": __version__}
    settings = auto_cli(load(entry), args=given, prog=command, parser_class=Parser, allow_abbrev=False, **options)
    if callable(settings):  # a probe
        settings()
    elif settings is not None:  # functions have done what they do
        from gsa.cli.train import run as train

        train(settings)
