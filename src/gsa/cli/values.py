"""What an option takes: values read from words or recipes, described and refused in plain words."""

from __future__ import annotations

import types
import typing
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from gsa.terminal import quoted

_WORDS: dict[type, tuple[str, str]] = {
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("text", ""),
    Path: ("the name of a file", ""),
}
"""Each kind of value in words, and what stands for it in help; nothing where the name of the option serves better."""


class WrongValue(ArgumentTypeError, TypeError):
    """A value that an option does not take: argparse knows the first kind of error, jsonargparse the second."""


class Value:
    """Reads values of one kind, given as a word or as YAML has them; `null` unsets what may be left out."""

    def __init__(self, kind: type, names: tuple[str, ...] = (), optional: bool = False) -> None:
        self.names = names
        self.optional = optional
        self._kind = kind
        self.metavar = "{" + ",".join(names) + "}" if names else _WORDS[kind][1]

    @classmethod
    def of(cls, hint: Any, names: tuple[str, ...] = ()) -> Value | None:
        """The values that a type means, None if it is not of a simple kind; `names` are all that a name may be."""
        members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = [member for member in members if member is not types.NoneType]
        if len(kinds) != 1:
            return None
        optional = types.NoneType in members
        if typing.get_origin(kinds[0]) is typing.Literal:
            return cls(str, typing.get_args(kinds[0]), optional)
        return cls(kinds[0], names, optional) if kinds[0] in _WORDS else None

    @property
    def words(self) -> str:
        """What is expected, as the end of `must be`."""
        return f"one of {', '.join(self.names)}" if self.names else _WORDS[self._kind][0]

    def __call__(self, given: Any) -> Any:
        if self.optional and given in (None, "null"):
            return None
        try:
            value = self._read(given)
        except (TypeError, ValueError, OverflowError):
            raise WrongValue(f"must be {self.words}, got {quoted(given)}") from None
        if self.names and value not in self.names:
            raise WrongValue(f"must be {self.words}, got {quoted(given)}")
        return value

    def _read(self, given: Any) -> Any:
        if self._kind in (str, Path):
            if not isinstance(given, str | Path):
                raise TypeError
            return self._kind(given)
        if isinstance(given, bool) or given is None:
            raise TypeError
        if self._kind is int and (isinstance(given, float) or (isinstance(given, str) and "e" in given.lower())):
            value = float(given)  # as in 1e9 tokens
            if not value.is_integer():
                raise ValueError
            return int(value)
        return self._kind(given)
