"""Fields of a config that others wrote: each is read with its type, and what was not read is known by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gsa.errors import GSAError
from gsa.models.checkpoint import of_transformers
from gsa.options import MOST
from gsa.terminal import quoted

Fields = dict[str, Any]


class FieldReader:
    """The fields of a config: each is read with its type, and `finish` refuses those that were not read."""

    def __init__(self, fields: Fields, what: str, known: Collection[str] = ()):
        """`what` begins every error; `known` are fields that change nothing."""
        self.fields, self.what = fields, what
        self.read = set(known)

    def fail(self, name: str, reason: str) -> GSAError:
        return GSAError(f"{self.what}: {name} is {quoted(self.fields.get(name))}: {reason}")

    def get(self, name: str, kind: Any, default: Any = ...) -> Any:
        """The value of a field, which must be of this type; `default`, if it is missing or null."""
        self.read.add(name)
        value = self.fields.get(name)
        if value is None:
            if default is ...:
                raise self.fail(name, "it is missing")
            return default
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.fail(name, f"expected {kind.__name__}")
        if kind in MOST and not abs(value) <= MOST[kind]:  # which NaN is not either
            raise self.fail(name, f"expected at most {MOST[kind]}")
        return kind(value)

    def count(self, name: str, default: Any = ..., most: int = MOST[int]) -> Any:
        """A whole number from 1."""
        value = self.get(name, int, default)
        if value is not None and not 1 <= value <= most:
            raise self.fail(name, "expected at least 1" if value < 1 else f"expected at most {most}")
        return value

    def must_be(self, name: str, *values: Any) -> None:
        """Raises unless the field has one of these values; no other can be expressed, and the first is the default."""
        self.read.add(name)
        if self.fields.get(name, values[0]) not in values:
            raise self.fail(name, f"only {' or '.join(map(repr, values))} can be represented")

    def unread(self) -> list[str]:
        """The fields that have a value and were not read, and do not belong to transformers."""
        return [
            name
            for name, value in self.fields.items()
            if not (name in self.read or of_transformers(name) or value is None)
        ]

    def finish(self) -> None:
        """Raises for the first field that was not read."""
        for name in self.unread():
            if self.fields[name] in (False, 0):  # which turns off what is not known
                continue
            raise self.fail(name, "this field is not known, and may change what the model computes")
