"""`gsa probe mqar`: associative recall in context, with random tokens or words as keys and values.

This asks a model that has learned language, as it is. Zoology's task, on which small models are trained, is made by
`gsa.data.recall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from gsa.errors import GSAError
from gsa.eval.probes.options import ProbeOptions
from gsa.options import choice, number

if TYPE_CHECKING:
    from gsa.eval.answers import Answers
    from gsa.eval.probes.asking import Probe, Question
    from gsa.eval.reader import Reader, ReaderTokenizer

Form = Literal["tokens", "words"]


@dataclass(frozen=True)
class Mqar(ProbeOptions):
    """Asks a model for values of keys that it has just read: associative recall, by the number of pairs.

    Pairs of random keys and values stand one after another, then a key once more. `candidates` is the share of keys for
    which the right value is the likeliest of all values that were read, `vocabulary` that for which it is the likeliest
    of all tokens. Guessing among candidates is right once in as many times as there are pairs. The same command goes on
    where it was stopped.
    """

    name = "mqar"

    lengths: str = "4,8,16,32,64"
    """Numbers of pairs, with commas between."""
    form: str = choice("tokens", get_args(Form))
    """Of what pairs are made: single tokens of the vocabulary without anything between them, as in zoology's task, or
    words as lines of text, "key: value"."""
    queries: int = number(4, least=1)
    """Keys that are asked for in each context, one at a time; at most all."""

    def _maker(self) -> Callable[[Reader], Probe]:
        from gsa.eval.texts import lengths_of

        pairs = lengths_of(self.lengths, "probe mqar: lengths")
        return lambda reader: probe(reader, pairs, self.form, self.samples, self.queries, self.seed)


def probe(reader: Reader, pairs: list[int], form: str, samples: int, queries: int, seed: int) -> Probe:
    """The questions of `gsa probe mqar`."""
    from gsa.eval.probes.asking import Probe, Question
    from gsa.eval.probes.material import words

    tokenizer = reader.tokenizer
    alphabet: Sequence[Any] = usable_tokens(tokenizer) if form == "tokens" else words()
    if 2 * max(pairs) > len(alphabet):
        raise GSAError(
            f"probe mqar: lengths must be at most {len(alphabet) // 2}, half of the {len(alphabet)} different {form}, "
            f"got {max(pairs)}"
        )
    lead = tokenizer.encode("", special=True)
    questions = []
    for count in pairs:
        for sample in range(samples):
            rng = np.random.default_rng([seed, count, sample])
            drawn = [alphabet[i] for i in rng.permutation(len(alphabet))[: 2 * count].tolist()]
            keys, values = drawn[:count], drawn[count:]
            for asked in rng.permutation(count)[:queries].tolist():
                if form == "tokens":
                    read = [token for pair in zip(keys, values, strict=True) for token in pair]
                    prompt = [*lead, *read, keys[asked]]
                    choices = [[value] for value in values]
                else:
                    lines = "".join(f"{key}: {value}\n" for key, value in zip(keys, values, strict=True))
                    prompt = tokenizer.encode(f"{lines}{keys[asked]}:", special=True)
                    choices = [tokenizer.encode(f" {value}") for value in values]
                spare = max(map(len, choices))
                questions.append(Question((count,), prompt, asked, spare, tuple(choices)))
    return Probe(
        name="mqar",
        title="Associative recall",
        axes=("pairs",),
        metrics={"candidates": "candidates", "vocabulary": "vocabulary"},
        questions=questions,
        grade=grade,
        ask=choosing,
        settings={"lengths": pairs, "form": form, "samples": samples, "queries": queries, "seed": seed},
        data="made by rule",
    )


def usable_tokens(tokenizer: ReaderTokenizer) -> list[int]:
    """The tokens that are text of their own: no special ones, and no parts of characters."""
    special = {tokenizer.eos_id, tokenizer.bos_id}
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size) if token not in special}
    return [token for token, text in texts.items() if text.strip() and "\ufffd" not in text]


def choosing(answers: Answers, reader: Reader, questions: Sequence[Question], batch_size: int) -> list[Any]:
    """Questions answered by the likeliest of several continuations: its number, and whether the right one is greedy."""
    from gsa.eval.reader import Continuation

    requests = [Continuation(question.prompt, choice) for question in questions for choice in question.choices]
    scores = iter(answers.scores(reader, requests, batch_size=batch_size))
    found = []
    for question in questions:
        own = [next(scores) for _ in question.choices]
        best = max(range(len(own)), key=[score.log_likelihood for score in own].__getitem__)
        found.append({"choice": best, "greedy": own[question.right].greedy})
    return found


def grade(question: Question, answer: dict[str, Any]) -> dict[str, float]:
    """Whether the right value is the likeliest of all values, and of all that the model could write."""
    return {"candidates": float(answer["choice"] == question.right), "vocabulary": float(answer["greedy"])}
