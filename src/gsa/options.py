"""Options as dataclasses: fields are checked by type, range and choice, and errors name them."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable
from dataclasses import field, fields
from functools import cache
from typing import Any

from gsa.errors import GSAError
from gsa.terminal import quoted


def choice(default: Any, names: Iterable[str]) -> Any:
    """A field that takes one of these names."""
    return field(default=default, metadata={"names": tuple(names)})


MOST: dict[type, Any] = {int: 2**63 - 1, float: 1e30}
"""The largest value, to either side of 0, of a field that says nothing else: what 64 bits hold, and what is far from
overflow in single precision even when it is multiplied."""
SEED = 2**64 - 1
"""The largest seed that torch takes."""


def number(
    default: Any = ...,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A numeric field with limits, which are allowed themselves (`least`, `most`) or not (`above`, `below`)."""
    metadata = {"least": least, "above": above, "most": most, "below": below}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def check(options: Any, what: str) -> None:
    """Raises GSAError for the first field of a dataclass whose value has the wrong type or lies outside its limits."""
    check_values(type(options), {entry.name: getattr(options, entry.name) for entry in fields(options)}, what)


def check_values(options: Any, values: Any, what: str) -> None:
    """The same for an object from JSON with fields of a dataclass; of other names, nothing is known."""
    if not isinstance(values, dict):
        raise GSAError(f"{what} must be {_NAMES[dict]}, got {quoted(values)}")
    allowed, limits = _types(options), _limits(options)
    for name in (name for name in allowed if name in values):
        _check(values[name], allowed[name], limits[name], f"{what}: {name}")


def _check(value: Any, allowed: tuple[type, ...], limits: dict[str, Any], name: str) -> None:
    fits = type(value) in allowed or (float in allowed and type(value) is int)
    if not fits:
        expected = " or ".join("none" if t is type(None) else _NAMES.get(t, t.__name__) for t in allowed)
        raise GSAError(f"{name} must be {expected}, got {quoted(value)}")
    names = limits.get("names")
    if names is not None and value is not None and value not in names:
        raise GSAError(f"{name} must be one of {', '.join(names)}, got {quoted(value)}")
    if type(value) in (int, float):
        _check_limits(value, limits, MOST[float if float in allowed else int], name)


def check_count(name: str, count: int | None, least: int = 1, most: int = MOST[int]) -> None:
    """Raises GSAError for a count, if there is one, outside its limits."""
    if count is not None:
        _check_limits(count, {"least": least, "most": most}, MOST[int], name)


def _check_limits(value: float, limits: dict[str, Any], largest: float, name: str) -> None:
    if not (type(value) is int or math.isfinite(value)):
        raise GSAError(f"{name} must be finite, got {value}")
    least, above, most, below = (limits.get(limit) for limit in ("least", "above", "most", "below"))
    if least is not None and value < least:
        raise GSAError(f"{name} must be at least {least}, got {quoted(value)}")
    if above is not None and value <= above:
        raise GSAError(f"{name} must be above {above}, got {quoted(value)}")
    if below is not None and value >= below:
        raise GSAError(f"{name} must be below {below}, got {quoted(value)}")
    if value > (largest if most is None else most):
        raise GSAError(f"{name} must be at most {largest if most is None else most}, got {quoted(value)}")
    if value < -largest:
        raise GSAError(f"{name} must be at least {-largest}, got {quoted(value)}")


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", dict: "names with values"}


@cache
def _types(options: type[Any]) -> dict[str, tuple[type, ...]]:
    """The types each field may have."""
    hints = typing.get_type_hints(options)
    unions = (types.UnionType, typing.Union)
    found = {}
    for entry in fields(options):
        hint = hints[entry.name]
        members = typing.get_args(hint) if typing.get_origin(hint) in unions else (hint,)
        found[entry.name] = tuple(typing.get_origin(member) or member for member in members)
    return found


@cache
def _limits(options: type) -> dict[str, dict[str, Any]]:
    """The limits of each field; a class that only changes a default keeps the limits of its base class."""
    found: dict[str, dict[str, Any]] = {}
    for base in reversed(options.__mro__):
        for name, entry in getattr(base, "__dataclass_fields__", {}).items():
            found[name] = {**found.get(name, {}), **entry.metadata}
    return found


def choices(options: Any, name: str) -> tuple[str, ...]:
    """The names that a field takes; empty if it is not of that kind."""
    return _limits(options).get(name, {}).get("names", ())


def divides(part: int, whole: int, what: str, names: str) -> None:
    """Raises GSAError unless `part` divides `whole`."""
    if whole % part:
        raise GSAError(f"{what}: {names}: {part} does not divide {whole}")
