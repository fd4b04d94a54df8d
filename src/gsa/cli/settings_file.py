"""Files of settings, looked at before the parser library reads them: it would follow whatever stands in them.

They are looked at as events of the same YAML parser that the library uses, so that both see the same text.
"""

from __future__ import annotations

import re
import stat
from contextlib import suppress
from pathlib import Path

import yaml

from gsa.files import named
from gsa.terminal import quoted, shortened, shown

MOST_BYTES = 2**16
DEEPEST = 20
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9_]{4000,}")
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def checked_settings(name: str) -> tuple[str, str | None]:
    """What the parser is to be given for a file of settings, or for settings in its place; and what is wrong with it.

    That is the name itself, but for a pipe, which can be read once only: its text. No fault is found with what is not
    YAML, or has unknown names: that the parser tells better.
    """
    path = named(name, "--config")
    is_file = path.exists() and not path.is_dir()
    text, found = _read(path) if is_file else (name, None)
    if found is None:
        with suppress(yaml.YAMLError):
            found = _fault(text, is_file)
    is_pipe = is_file and not stat.S_ISREG(path.stat().st_mode)
    return text if is_pipe else name, None if found is None else f"the file of settings {found}"


def _read(path: Path) -> tuple[str, str | None]:
    """The text of a file, or what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            return "", f"{path} has more than {MOST_BYTES:,} bytes"
        return content.decode("utf-8"), None
    except OSError as error:
        return "", f"{path} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return "", f"{path} is not UTF-8 at byte {error.start}"


def _fault(text: str, is_file: bool) -> str | None:
    """What must not be in settings: parts that repeat others, which a few lines can do a billion times, deep nesting,
    tags, numbers that Python refuses to read, and names of further files, which the library would read and quote."""
    open_collections: list[bool | None] = []  # of each mapping whether a name comes next; None for a list
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            return f"repeats a part of itself (*{quoted(event.anchor)[1:-1]}); write it out"
        if isinstance(event, yaml.CollectionEndEvent):
            open_collections.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if event.tag is not None:
            return f"has the tag {quoted(event.tag)}; write the value plainly"
        is_empty = isinstance(event, yaml.ScalarEvent) and event.value == ""
        if is_file and not (open_collections or is_empty or isinstance(event, yaml.MappingStartEvent)):
            return f"must be names with values, got {shortened(shown(' '.join(text.split())), 80)}"
        is_name = bool(open_collections) and open_collections[-1] is True
        if open_collections and open_collections[-1] is not None:
            open_collections[-1] = not is_name
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(True if isinstance(event, yaml.MappingStartEvent) else None)
            if len(open_collections) > DEEPEST:
                return f"is nested more than {DEEPEST} deep"
        elif isinstance(event, yaml.ScalarEvent):
            if is_name and event.value == "config":
                return "has the name 'config': there is no such setting, since a file of settings leads to no other"
            if event.implicit[0] and _LONG_NUMBER.fullmatch(event.value):
                return "has a number of thousands of digits"
    return None
