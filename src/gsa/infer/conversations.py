"""Conversations that a model samples, many at a time: it is asked questions, and its answers are its own.

A conversation depends on the settings, the questions and its number, and on nothing else: not on the others that are
held beside it, nor on where an earlier run stopped.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count

from gsa import templates
from gsa.data.chat_template import ChatTemplate, Message, Segment
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError
from gsa.infer.chat import rest_of, with_reply
from gsa.infer.detokenizer import Detokenizer, detokenized
from gsa.infer.requests import Generation
from gsa.infer.state import State
from gsa.infer.text import TextEngine
from gsa.options import SEED, check, number
from gsa.sampling import Sampling

SENTENCE_END = re.compile(r"""(?:[^\W\d][.!?]["')*\]]*\s*|[^\s:]\s*\n\s*)$""")
"""Where a text may end: behind a sentence, but not behind the 2. of a list; or behind a line."""
FOLLOW_UPS = (
    "Can you explain that in more detail?",
    "Can you give me an example?",
    "Why is that?",
    "How do you know that?",
    "Summarise what you have said in one sentence.",
    "Say that again in simpler words.",
    "What else should I know about it?",
    "Are you sure?",
    "How would you explain this to a child?",
    "What was the first thing that I asked you?",
    "Who would disagree with that, and why?",
    "Make a list of the most important points.",
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How conversations are held."""

    seed: int = number(0, least=0, most=SEED)
    """Of all random choices."""
    system: str | None = None
    """What the model is told first; by default what its template has."""
    shortest: int = number(600, least=1)
    """Each conversation has a length, drawn from `shortest` to `longest` tokens, and ends with the answer that
    reaches it."""
    longest: int = number(1600, least=1)
    answer_tokens: int = number(150, least=1, most=10**6)
    """An answer that is longer ends with its sentence, and at twice as many tokens at the latest."""
    follow_ups: float = number(0.3, least=0, most=1)
    """Share of later messages that ask on about the last answer; the others are new questions."""
    temperature: float = number(0.7, least=0, most=1e30)
    top_p: float = number(0.95, least=0, most=1)

    def __post_init__(self) -> None:
        check(self, "chats")
        if self.shortest > self.longest:
            raise GSAError(f"chats: shortest ({self.shortest}) must not be more than longest ({self.longest})")


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, which ends with an answer."""

    number: int
    messages: list[Message]
    tokens: int
    """That the model has read and said, and the one that ends it."""


def converse(
    engine: TextEngine, questions: Sequence[str], settings: ChatSettings, first: int = 0
) -> Generator[Conversation]:
    """All conversations from a number on, in order and without end; as many are held at once as the engine takes."""
    if not questions:
        raise GSAError("chats: there are no questions")
    template = ChatTemplate.of(engine.tokenizer)
    templates.start()
    numbers, held, whole = count(first), list[_Held](), dict[int, Conversation]()
    try:
        while True:
            while len(held) < engine.engine.batch_size:
                held.append(_Held(next(numbers), engine, template, questions, settings))
            engine.engine.step()
            for each in [each for each in held if each.generation.done]:
                if (conversation := each.answered()) is not None:
                    whole[conversation.number] = conversation
                    held.remove(each)
            while first in whole:
                yield whole.pop(first)
                first += 1
    finally:
        for each in held:
            each.generation.cancel()


class _Held:
    """A conversation under way: there is always a question that the model answers."""

    def __init__(
        self, number: int, engine: TextEngine, template: ChatTemplate, questions: Sequence[str], settings: ChatSettings
    ) -> None:
        self.number, self._engine, self._template = number, engine, template
        self._questions, self._settings = questions, settings
        self._random = random.Random(f"{settings.seed} {number}")
        self._length = self._random.randint(settings.shortest, settings.longest)
        self._messages: list[Message] = []
        if settings.system is not None:
            self._messages.append({"role": "system", "content": settings.system})
        self._state: State | None = None
        self._read: list[Segment] = []
        self._ask(self._question())

    def answered(self) -> Conversation | None:
        """Takes the answer that is done: the conversation goes on, or is returned."""
        said = self.generation.completion()
        assert said.state is not None
        self._state = said.state
        continues = self._template.continues(self._read[-1])
        text = detokenized(self._engine.tokenizer, said.tokens, continues=continues)
        self._read = with_reply(self._template, self._read, said.tokens)
        self._messages.append({"role": "assistant", "content": text})
        if self._state.tokens >= self._length:
            return Conversation(self.number, self._messages, self._state.tokens + 1)
        follows = self._random.random() < self._settings.follow_ups
        self._ask(self._random.choice(FOLLOW_UPS) if follows else self._question())
        return None

    def _question(self) -> str:
        return self._random.choice(self._questions)

    def _ask(self, text: str) -> None:
        """Lets the model answer a message, from the state of its last answer."""
        self._messages.append({"role": "user", "content": text})
        whole = self._template.render(self._messages)
        rest = None if self._state is None else rest_of(whole, self._read)
        state, after = (None, None) if rest is None else (self._state, self._read[-1])
        ids = self._template.encode(whole if rest is None else rest, after)
        self._read, engine, settings = whole, self._engine, self._settings
        # No special token becomes part of an answer: as text it would be read otherwise than it was said.
        special = {token.id for token in vocabulary(engine.tokenizer).special}
        sampling = Sampling(
            max_tokens=2 * settings.answer_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=self._random.getrandbits(64),
            stop=tuple(sorted(id_ for id_ in special | {*engine.ends} if id_ < engine.engine.model.vocab_size)),
        )
        ends = _SentenceEnd(Detokenizer(engine.tokenizer), settings.answer_tokens)
        self.generation: Generation = engine.engine.submit(ids, sampling, state=state, keep_state=True, until=ends)


class _SentenceEnd:
    """Whether an answer may end with a token: it is long enough, and a sentence is complete."""

    def __init__(self, text: Detokenizer, tokens: int) -> None:
        self._text, self._left, self._tail = text, tokens, ""

    def __call__(self, token: int) -> bool:
        self._left -= 1
        self._tail = (self._tail + self._text.add(token))[-40:]
        return self._left <= 0 and SENTENCE_END.search(self._tail) is not None
