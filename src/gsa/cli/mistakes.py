"""What the parser library says about a mistake on the command line, in words for the person who made it."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<words>.*)", re.DOTALL)
_OPTION = re.compile(r"argument (?P<name>\S+): (?P<said>.*)", re.DOTALL)
_KEY = re.compile(r'Parser key "(?P<name>[^"]+)":\s*(?P<said>.*)', re.DOTALL)
_NO_FILE = re.compile(r"File does not exist: '(?P<path>.*)'")
_NO_KEY = re.compile(r"""(?:Key|Option)\s+['"](?P<name>[^'"]+)['"] is not (?:expected|accepted)""")
_NO_VERB = re.compile(r'expected "(?:\w+\.)*subcommand"')
_OF_A_FILE = {
    "Problems parsing config: ": "the file of settings is not YAML: ",
    "Unexpected config:": "the file of settings must be names with values, got ",
    "Value not boolean: ": "a switch must be true or false, got ",
}
_SAID = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs a value",
    "ignored explicit argument": "takes no value",
}


def explained(message: str, actions: Sequence[Action], args: Sequence[str]) -> str:
    """The mistake that a message of argparse or jsonargparse is about.

    `actions` are the parser's options, `args` what was typed.
    """
    if found := _REQUIRED.fullmatch(message):
        names = [_called(name, actions, args) for name in found["names"].split(", ")]
        return f"{_joined(names)} {'is' if len(names) == 1 else 'are'} missing"
    if found := _UNKNOWN.fullmatch(message):
        return _unknown(found["words"].split(), actions)
    if found := _NO_FILE.search(message):
        return f"there is no file {found['path']}"
    if _NO_VERB.match(message):
        if any(arg.partition("=")[0] == "--config" for arg in args):
            return "the file of settings has no verb with its options"
        return no_verb(next(action for action in actions if action.dest == "subcommand").choices or ())
    if found := _OPTION.fullmatch(message) or _KEY.fullmatch(message):
        return _refused(_called(found["name"], actions, args), found["said"])
    if found := _NO_KEY.search(message):
        return f"there is no setting {found['name']!r}{_hint(found['name'], [action.dest for action in actions])}"
    for theirs, ours in _OF_A_FILE.items():
        if message.startswith(theirs):
            return ours + " ".join(message.removeprefix(theirs).split()).removesuffix(".")
    if re.fullmatch(r"'\w+'", message):  # a KeyError that knows no more
        return f"of {message} there is a setting that it does not have"
    return " ".join(message.split())


def no_verb(known: Iterable[str]) -> str:
    """What is said where one of these verbs should stand."""
    return f"a verb is missing; expected one of {', '.join(known)}"


def _called(name: str, actions: Sequence[Action], args: Sequence[str]) -> str:
    """What a person calls an argument: an option as it was typed, or else by its long name."""
    key = name.rsplit(".")[-1]
    for action in actions:
        if action.dest == key or "/".join(action.option_strings) == name:
            if not action.option_strings:
                return str(action.metavar or key.upper())
            typed = {arg.partition("=")[0] for arg in args}
            longest = max(action.option_strings, key=lambda option: option.startswith("--"))
            return next((option for option in action.option_strings if option in typed), longest)
    return name


def _unknown(words: Sequence[str], actions: Sequence[Action]) -> str:
    """About words that the parser knows nothing of; an option that is unknown leaves its value over, too."""
    option = next((word for word in words if word.startswith("-") and word != "-"), None)
    if option is None:
        takes_words = any(not action.option_strings for action in actions)
        return f"{words[0]!r} is one word too many" + ("; text with spaces goes into quotes" if takes_words else "")
    name = option.partition("=")[0]
    known = [option for action in actions for option in action.option_strings if action.help != "==SUPPRESS=="]
    if name in known:
        return f"{name} stands behind --, where all is text; options go in front of it"
    return f"there is no {name}{_hint(name, known)}"


def _refused(name: str, said: str) -> str:
    """About a value that an argument does not take."""
    for theirs, ours in _SAID.items():
        if said.startswith(theirs):
            return f"{name} {ours}"
    if said.startswith("must be"):
        return f"{name} {said}"
    if "dict" in said:
        value = re.search(r"(?:Got|Given) value: (?P<value>.*)", said)
        given = f", got {value['value'].strip()!r}" if value else ""
        return f"{name} must be names with values, as in {{num_slots: 32}}{given}"
    return f"{name}: {' '.join(said.split())}"


def _hint(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name.lstrip("-"), [word.lstrip("-") for word in known], 1)
    return f"; did you mean {next(word for word in known if word.lstrip('-') == close[0])}?" if close else ""


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
