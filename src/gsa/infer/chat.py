"""Conversations: turns that go on from the state of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from gsa import templates
from gsa.data.chat_template import ChatTemplate, Message, Segment
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError
from gsa.infer.detokenizer import detokenized
from gsa.infer.state import State
from gsa.infer.stop_strings import StopStrings
from gsa.infer.text import Piece, Text, TextEngine, Writing
from gsa.sampling import DEFAULT, Sampling


class Chat:
    """A conversation. What was read once is not read again, unless the template tells the past differently later.

    chat = gsa.load("models/assistant").chat()
    print(chat.say("What is a slot?"))
    for text in chat.stream("And a gate?"):
        print(text, end="", flush=True)
    """

    def __init__(
        self,
        engine: TextEngine,
        sampling: Sampling = DEFAULT,
        system: str | None = None,
        stop: str | Sequence[str] | None = (),
    ) -> None:
        self.engine, self.sampling, self.stop = engine, sampling, stop
        StopStrings(stop)  # refused now rather than with the first reply
        self.template = ChatTemplate.of(engine.tokenizer)
        templates.start()
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._writing: Writing | None = None
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.messages: list[Message] = list(self._system)
        self.state: State | None = None
        """After the last reply."""
        self._read: list[Segment] = []

    def __repr__(self) -> str:
        read = 0 if self.state is None else self.state.tokens
        return f"Chat(messages={len(self.messages)}, tokens={read})"

    def say(self, text: str) -> Text:
        """The assistant's answer to a message."""
        said = "".join(self.stream(text))
        assert self._writing is not None
        return Text.of(said, self._writing)

    def stream(self, text: str) -> Iterator[str]:
        """The same as it is written. The conversation goes on from it when all of it was taken."""
        return (piece.text for piece in self.reply(text) if piece.text)

    def reply(self, text: str) -> Iterator[Piece]:
        """The assistant's answer, piece by piece; the conversation goes on from it when the last piece was taken."""
        if not isinstance(text, str):
            raise GSAError(f"chat: a message must be a text, got {type(text).__name__}")
        asked = [*self.messages, {"role": "user", "content": text}]
        whole = self.template.render(asked)
        rest = None if self.state is None else rest_of(whole, self._read)
        state, after = (None, None) if rest is None else (self.state, self._read[-1])
        ids = self.template.encode(whole if rest is None else rest, after)
        self._writing = writing = self.engine.stream(
            ids, self.sampling, stop=self.stop, state=state, keep_state=True, continues=False
        )
        said = []
        try:
            for piece in writing:
                said.append(piece.text)
                yield piece
        finally:
            writing.close()
        if writing.generation.kept is not None:  # else it was cancelled before all of the question was read
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
            self.state = writing.generation.kept
            self._read = with_reply(self.template, whole, writing.generation.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are read for the reply that is being written, or was written last."""
        return 0 if self._writing is None else self._writing.generation.prompt_tokens

    def cancel(self) -> None:
        """Ends the reply that is being written; what there is of it counts."""
        if self._writing is not None:
            self._writing.cancel()


def rest_of(whole: list[Segment], read: list[Segment]) -> list[Segment] | None:
    """What of a conversation comes after what was read of it; None if it does not begin with that."""
    *before, last = read
    if whole[: len(before)] != before or len(whole) < len(read):
        return None
    here, later = whole[len(before)], whole[len(read) :]
    if isinstance(here, str) and isinstance(last, str):
        return [*filter(None, [here[len(last) :]]), *later] if here.startswith(last) else None
    return later if here == last else None


def with_reply(template: ChatTemplate, asked: Sequence[Segment], ids: Sequence[int]) -> list[Segment]:
    """What a model has read after a reply; special tokens in that stand for themselves."""
    segments, special = list(asked), {token.id for token in vocabulary(template.tokenizer).special}
    for is_special, group in groupby(ids, special.__contains__):
        if is_special:
            segments += group
            continue
        text = detokenized(template.tokenizer, group, continues=template.continues(segments[-1]))
        segments[-1:] = [segments[-1] + text] if isinstance(segments[-1], str) else [segments[-1], text]
    return segments
