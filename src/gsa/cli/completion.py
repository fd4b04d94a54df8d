"""`gsa completion`: a script for a shell, made from the parser of every verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from argparse import ArgumentParser

FILES = {"file", "out", "state", "save_state", "config", "data", "eval_data", "tokenizer", "model", "page", "folder"}
"""Options and positional arguments that are, or may be, the name of a file or a folder; lists of words are, too."""


def completion(shell: Literal["bash", "zsh", "fish", "tcsh"]) -> None:
    """Prints a script with which a shell completes verbs, options and their values.

    It is made once, and then completes without starting Python:

    for bash: gsa completion bash > ~/.local/share/bash-completion/completions/gsa

    for zsh: gsa completion zsh > FOLDER/_gsa, in a folder of $fpath

    for fish: gsa completion fish > ~/.config/fish/completions/gsa.fish

    Args:
        shell: The shell that is to read it.
    """
    from jsonargparse import auto_parser
    from shtab import complete

    from gsa.cli.parser import Parser
    from gsa.cli.verbs import GSA, load
    from gsa.console import Output

    parser = auto_parser(load(GSA), prog="gsa", parser_class=Parser)
    _prepare(parser)
    output = Output()
    output.write(complete(parser, shell) + "\n")
    output.end()


def _prepare(parser: ArgumentParser) -> None:
    """Tells shtab which values options take, here and in all verbs below."""
    from argparse import _SubParsersAction

    from shtab import FILE

    from gsa.cli.values import Value

    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for below in action.choices.values():
                _prepare(below)
        elif isinstance(action.type, Value) and action.type.names:
            action.choices = action.type.names
        elif action.dest in FILES or (not action.option_strings and action.dest not in ("verb", "prompt")):
            action.complete = FILE  # type: ignore[attr-defined]
