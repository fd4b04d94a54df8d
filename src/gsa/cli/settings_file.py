"""Files of settings, looked at before the parser library reads them: it would follow whatever stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gsa.files import named
from gsa.terminal import quoted, shortened, shown

MOST_BYTES = 2**16
DEEPEST = 20


def problem(name: str) -> str | None:
    """What is wrong with the settings in a file, or given in its place; None if the parser can be let at them.

    It finds no fault with what is not YAML, or has unknown names: that the parser tells better.
    """
    path = named(name, "--config")
    if path.exists() and not path.is_file():
        return None  # a pipe can be read once only; the parser tells of a folder
    text, found = _text(path, name)
    if found is not None:
        return found
    try:
        if (found := _shape(text)) is not None:
            return f"the file of settings {found}"
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    except ValueError:  # Python refuses to read it
        return "the file of settings has a number of thousands of digits"
    if path.is_file() and not isinstance(values, dict | None):
        return f"the file of settings must be names with values, got {shortened(shown(' '.join(text.split())), 80)}"
    return _keys(values)


def _text(path: Path, name: str) -> tuple[str, str | None]:
    """The text of a file, or the name itself where there is none: settings may be given on the command line."""
    if not path.is_file():
        return name, None
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            return "", f"the file of settings {path} has more than {MOST_BYTES:,} bytes"
        return content.decode("utf-8"), None
    except OSError as error:
        return "", f"the file of settings {path} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return "", f"the file of settings {path} is not UTF-8 at byte {error.start}"


def _shape(text: str) -> str | None:
    """Whether settings are nested too deep, or repeat parts of themselves, which a few lines can do a billion times."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return f"repeats a part of itself (*{quoted(event.anchor)[1:-1]}); write it out"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return f"is nested more than {DEEPEST} deep"
    return None


def _keys(values: Any) -> str | None:
    """A file of settings that names another, which the parser library would read, and quote if it is none."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key == "config":
            return "there is no setting 'config': a file of settings does not lead to others"
        if (found := _keys(value)) is not None:
            return found
    return None
