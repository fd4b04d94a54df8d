"""Stop strings: texts before which another one ends."""

from __future__ import annotations

from collections.abc import Iterable

from gsa.errors import GSAError


class StopStrings:
    """Lets text pass until a stop string stands in it; what may be the beginning of one waits.

    The stop string that is complete first counts, of two that end together the longer; how the text was cut into
    pieces makes no difference.

    >>> stops = StopStrings(["\\n\\n", "END"])
    >>> stops.add("a\\nE"), stops.add("Nb"), stops.add("\\n"), stops.add("\\nc")
    (('a\\n', False), ('ENb', False), ('', False), ('', True))
    """

    def __init__(self, stops: str | Iterable[str] | None) -> None:
        if not isinstance(stops, str | Iterable | None):
            raise GSAError(f"stop must be a text, several texts, or None, got {stops!r}")
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise GSAError(f"stop strings must be texts of at least one character, got {stop!r}")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text to show, and whether a stop string was found, which is not shown."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            self._held = ""
            _, start = min(found)  # the one that ends first; of two that end together the longer
            return held[:start], True
        show = len(held) - self._begun(held)
        self._held = held[show:]
        return held[:show], False

    def end(self) -> str:
        """What was held back."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
