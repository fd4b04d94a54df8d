"""Mixers by name, and patterns of them over the layers of a model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from gsa.errors import GSAError
from gsa.mixers.abc import BoundedMemoryAttention
from gsa.mixers.attention import Attention
from gsa.mixers.base import Mixer, Options
from gsa.mixers.gla import GatedLinearAttention
from gsa.mixers.gsa import GatedSlotAttention
from gsa.mixers.hgrn2 import HGRN2
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.mamba import Mamba
from gsa.mixers.retention import SUPRA, LinearAttention, Retention
from gsa.options import choices
from gsa.terminal import quoted

MIXERS: dict[str, type[Mixer]] = {
    "gsa": GatedSlotAttention,
    "abc": BoundedMemoryAttention,
    "gla": GatedLinearAttention,
    "hgrn2": HGRN2,
    "retnet": Retention,
    "mamba": Mamba,
    "attention": Attention,
    "supra": SUPRA,
    "linear": LinearAttention,
    "hybrid": Hybrid,
}


def mixer_class(name: str) -> type[Mixer]:
    """The class of a mixer."""
    if name not in MIXERS:
        raise GSAError(
            f"mixer: unknown mixer {quoted(name)}{suggestion(name, MIXERS)}; expected one of {', '.join(MIXERS)}"
        )
    return MIXERS[name]


def mixer(name: str, **options: Any) -> Mixer:
    """A mixer by its name.

    >>> mixer("gsa", hidden_size=64, num_slots=16).state_size
    2048
    """
    return mixer_class(name)(mixer_options(name, options))


def mixer_options(name: str, options: dict[str, Any]) -> Options:
    """The options of a mixer, checked; what is not given has the mixer's default."""
    known = option_names(name)
    for given in options:
        if given not in known:
            close = suggestion(given, known)
            raise GSAError(f"{name}: unknown option {quoted(given)}{close}; expected {', '.join(known)}")
    if "hidden_size" not in options:
        raise GSAError(f"{name}: hidden_size is missing")
    return mixer_class(name).Options(**options)


def option_names(name: str) -> tuple[str, ...]:
    """What can be chosen of a mixer."""
    return tuple(entry.name for entry in fields(mixer_class(name).Options))


def suggestion(name: str, known: Any) -> str:
    """A hint at what may have been meant."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


MAX_LAYERS = 4096
"""Of a model, and so of a pattern."""
# White space is only tried where one thing can follow it: else the time would grow with a power of its length.
_ITEM = re.compile(r"(?P<name>\w+)(?:\s*\((?P<options>[^()]*)\))?(?:\s*\*\s*(?P<count>\d{1,6}))?")


def pattern(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The layers of one period of a pattern: names of mixers, and options that differ from the model's.

    >>> pattern("gsa*2,attention(window=512)")
    [('gsa', {}), ('gsa', {}), ('attention', {'window': 512})]
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    for item in _items(text):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise GSAError(
                f"mixer: cannot read {quoted(item)} in {quoted(text)}; expected items like gsa, gsa*3 or "
                "attention(window=512), with commas between"
            )
        mixer_class(match["name"])
        count = int(match["count"] or 1)
        if count < 1:
            raise GSAError(f"mixer: {quoted(item)} repeats {count} times, expected at least 1")
        if len(layers) + count > MAX_LAYERS:
            raise GSAError(f"mixer: {quoted(text)} names more layers than a model may have, {MAX_LAYERS}")
        layers += [(match["name"], _options(match["name"], match["options"] or "", item))] * count
    return layers


def _items(text: str) -> Iterator[str]:
    """What stands between the commas of a pattern, but for those in parentheses."""
    begin, inside = 0, False
    for sign in re.finditer(r"[(),]", text):
        if sign[0] != ",":
            inside = sign[0] == "("
        elif not inside:
            yield text[begin : sign.start()].strip()
            begin = sign.end()
    yield text[begin:].strip()


def _options(mixer: str, text: str, item: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for assignment in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not (name and equals and value):
            raise GSAError(f"mixer: cannot read {quoted(assignment)} in {quoted(item)}; expected option=value")
        if name in options:
            raise GSAError(f"mixer: {quoted(name)} comes twice in {quoted(item)}")
        options[name] = _value(value, choices(mixer_class(mixer).Options, name))
    return options


def _value(text: str, names: tuple[str, ...]) -> Any:
    words = {"none": None, "null": None, "true": True, "false": False}
    if text in names:
        return text  # "none" is a name among others there
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no number, or one of thousands of digits
        return text
    return value if isinstance(value, (int, float)) else text
