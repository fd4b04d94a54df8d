"""Arguments by name: one that is misspelt is refused with the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from gsa.errors import GSAError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checked_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, which answers an argument that it does not have with a GSAError instead of a TypeError.

    >>> @checked_names
    ... def write(prompt, *, temperature=0.8): ...
    >>> write("a", temprature=1)
    Traceback (most recent call last):
    gsa.errors.GSAError: write: there is no argument 'temprature' (did you mean 'temperature'?)
    >>> write("a", 1)
    Traceback (most recent call last):
    gsa.errors.GSAError: write: got 1 without its name; the arguments after prompt have names: temperature
    """
    entries = signature(function).parameters.values()
    known = [entry.name for entry in entries if entry.name != "self"]
    unnamed = [entry.name for entry in entries if entry.kind is not Parameter.KEYWORD_ONLY]

    @wraps(function)
    def checked(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        for name in named:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f" (did you mean {close[0]!r}?)" if close else f"; there are {', '.join(known)}"
                raise GSAError(f"{function.__name__}: there is no argument {name!r}{hint}")
        if len(args) > len(unnamed):
            after = "" if unnamed in ([], ["self"]) else f" after {unnamed[-1]}"
            names = ", ".join(name for name in known if name not in unnamed)
            raise GSAError(
                f"{function.__name__}: got {args[len(unnamed)]!r} without its name; the arguments{after} have names: "
                f"{names}"
            )
        return function(*args, **named)

    return checked
