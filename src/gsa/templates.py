"""Chat templates: programs in Jinja that come with a model, run where they can do no harm.

Jinja's sandbox keeps a template from files and from Python's insides, but not from running for ever or taking all
memory: a single `10 ** 10 ** 9` does, and no thread can stop it. So a helper process runs them, and is ended at a
limit. The names that a template finds are those that transformers gives it.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from gsa.errors import GSAError
from gsa.helper import Helper, HelperEnded, ended_after

SECONDS = 5.0
"""For one conversation; ordinary templates take a few milliseconds."""
MEMORY = 2**30
"""Bytes that the helper may take."""
MAX_CHARACTERS = 2**24
"""Characters that a template may add to those of the conversation."""
SAFE_JINJA = (3, 1, 6)
"""The first version without known ways out of its sandbox."""


class Refused(GSAError):
    """A template did not take a conversation, or failed on it."""


_helper: tuple[int, Helper] | None = None  # and the process that started it: one that was forked needs its own
_lock = Lock()


def _renew_lock() -> None:
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


def start() -> None:
    """Starts the helper, so that it is ready when it is asked."""
    global _helper
    if _helper is None or _helper[0] != os.getpid() or not _helper[1].end.alive:
        _helper = (os.getpid(), Helper("gsa.templates:serve", memory=MEMORY))


def render(template: str, messages: list[dict[str, str]], names: dict[str, str]) -> str:
    """What a template makes of a conversation, up to where the next message of the assistant begins.

    Raises Refused with what the template or Jinja says, and another GSAError if there was no answer in time.
    """
    request = json.dumps({"template": template, "messages": messages, "names": names}).encode()
    with _lock:
        start()
        assert _helper is not None
        try:
            answer = json.loads(_helper[1].ask(request, SECONDS))
        except HelperEnded as error:
            raise GSAError(f"{error}; ordinary templates take milliseconds") from None
    if "error" in answer:
        raise Refused(answer["error"])
    return str(answer["text"])


def serve(connection: Connection[Any, Any]) -> None:
    """What the helper does: a conversation comes, its text goes."""
    with suppress(GSAError):  # which is told with the first template
        _compiled("")  # imports all that is needed
    connection.send_bytes(b"")  # ready
    while True:
        request = connection.recv_bytes()
        try:
            with ended_after(SECONDS):
                answer = {"text": _rendered(**json.loads(request))}
        except MemoryError:
            answer = {
                "error": f"MemoryError: it takes more than the {MEMORY >> 20} MB of memory that a template may have"
            }
        except Exception as error:  # a template is a program, which may fail in any way
            answer = {"error": (str(error) or type(error).__name__)[:1000]}
        connection.send_bytes(json.dumps(answer).encode())


def _rendered(template: str, messages: list[dict[str, str]], names: dict[str, str]) -> str:
    known = {"tools": None, "documents": None, **names, "messages": messages, "add_generation_prompt": True}
    left = MAX_CHARACTERS + sum(len(message["content"]) for message in messages)
    parts = []
    for part in _compiled(template).generate(known):
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise GSAError(f"its text is more than {MAX_CHARACTERS:,} characters longer than the conversation")
    return "".join(parts)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """A template with what transformers lets templates use."""
    from datetime import datetime

    import jinja2.ext  # which torch brings along
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < SAFE_JINJA:
        raise GSAError(f"templates can break out of jinja2 {jinja2.__version__}; expected 3.1.6 or newer")

    class Generation(jinja2.ext.Extension):
        """{% generation %}, which marks the assistant's words for training. Here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which lead to Python's insides."""

        def __init__(*given: Any, **more: Any) -> None:
            self, *values = given
            jinja2.utils.Namespace.__init__(self, {})
            for name, value in dict(*values, **more).items():
                self[name] = value

        def __setitem__(self, name: str, value: object) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
            super().__setitem__(name, value)

    class Dictionary:
        """The function `dict`, and nothing else of the class."""

        def __call__(self, *given: Any, **more: Any) -> dict[Any, Any]:
            return dict(*given, **more)

        def fromkeys(self, *given: Any) -> dict[Any, Any]:
            return dict.fromkeys(*given)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own is for HTML and escapes its characters.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # as on the user's clock
        "dict": Dictionary(),
        "namespace": Namespace,
    }
    return environment.from_string(template)
