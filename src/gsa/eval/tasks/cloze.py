"""Recall-intensive reading: a document, and a phrase that it completes. Zero-shot; the model writes one line.

The prompts are those of "Just read twice" (Arora et al., 2024), which the paper follows. A document that is too long is
cut to a window of LENGTH - 50 tokens around the answer, or at its end, for the sets whose documents are not searched.
"""

from __future__ import annotations

from collections.abc import Iterator

from gsa.errors import GSAError
from gsa.eval.groups import Task
from gsa.eval.local_data import Row
from gsa.eval.reader import ReaderTokenizer
from gsa.eval.tasks.documents import Documents
from gsa.eval.tasks.reading import Question, ReadingTask
from gsa.eval.tasks.scores import contains

VERSION = "cloze 1"
"""Of the definitions; scores of another one do not compare."""
MAX_TOKENS = 48
RESERVED = 50
"""Tokens of the length that are left for what follows the document."""
SUMMARY = "Summary of information above..."
"""What SWDE's texts put before their keys."""
QUESTION_FORM = "questions and not phrases to complete, so the prompt is '{context}. {question}'"


def cloze_task(task: Task, documents: Documents, tokenizer: ReaderTokenizer, max_length: int) -> ReadingTask:
    """The task, with documents of at most so many tokens."""
    if max_length <= RESERVED:
        raise GSAError(f"eval: {task.name}: --max-length must be more than {RESERVED}, got {max_length}")
    cut = Cutter(tokenizer, max_length - RESERVED)
    questions = [
        Question(id=str(number), prompt=prompt, choices=[], right=right)
        for number, (prompt, right) in enumerate(_prompts(task.name, documents, cut))
    ]
    if not questions:
        raise GSAError(f"{documents.origin}: there are no questions with answers")
    return ReadingTask(task.name, VERSION, questions, {"contains": contains}, max_tokens=MAX_TOKENS)


def cloze_notes(task: Task, documents: Documents) -> list[str]:
    """What makes a task other than the original."""
    if documents.file not in ("squad_dev_v1.1", "drop_answers"):
        return []
    return [f"{task.title} (question form): {documents.origin} has {QUESTION_FORM}"]


def _prompts(name: str, documents: Documents, cut: Cutter) -> Iterator[tuple[str, list[str]]]:
    """Prompts, and the answers that would be right."""
    if documents.file == "squad_dev_v1.1":
        for context, question, answers in squad_questions(documents.rows[0]):
            yield joined(cut(context, answers[:1]), question), answers
    elif documents.file == "drop_answers":
        for context, question, answers in _drop_questions(documents.rows[0], documents.origin):
            yield joined(cut(context, []), question), answers
    elif name in ("cloze_fda", "cloze_swde"):
        for row in documents.rows:
            key = row["key"]
            text = cut(row["text"].split(SUMMARY)[0], [key, row["value"]])
            yield joined(_without_end(text, f"{key}:"), f"{key[:1].upper()}{key[1:]}:"), [row["value"]]
    elif name == "cloze_squad":
        for row in documents.rows:
            yield cut(row["text"], [row["value"]]).strip(), [row["value"]]
    else:
        for row in documents.rows:
            context = row["context"]
            if name == "cloze_triviaqa":
                for mark in ("[PAR]", "[DOC]", "[TLE]"):
                    context = context.replace(mark, "")
            # NQ's documents are cut around the answer; those of TriviaQA and DROP at their end.
            sought = row["answers"][:1] if name == "cloze_nq" else []
            yield joined(cut(context, sought), row["question"]), row["answers"]


def joined(context: str, question: str) -> str:
    """The prompt of a document and what follows it.

    >>> joined("Ada wrote it. It ran. ", "The author is")
    'Ada wrote it. It ran. The author is'
    """
    question = question.strip()
    return f"{_without_end(context.strip(), question).strip().strip('.')}. {question}"


def _without_end(text: str, end: str) -> str:
    """A text without what it ends with, however often; case ignored."""
    text = text.rstrip()
    while end and text.lower().endswith(end.lower()):
        text = text[: -len(end)].rstrip()
    return text


def squad_questions(document: Row) -> Iterator[tuple[str, str, list[str]]]:
    """Paragraphs, questions and answers of SQuAD's own layout; those without an answer are left out."""
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = list(dict.fromkeys(answer["text"] for answer in entry["answers"] if answer["text"].strip()))
                if answers:
                    yield paragraph["context"], entry["question"], answers


def _drop_questions(document: Row, origin: str) -> Iterator[tuple[str, str, list[str]]]:
    """DROP as bigbench has it: passage, question and type of the answer in one text; answers end with a full stop."""
    for number, example in enumerate(document["examples"]):
        passage, _, rest = example["input"].partition("\nQuestion:")
        question, _, kind = rest.partition("\nAnswer type:")
        answers = [answer.strip().removesuffix(".") for answer in example["target"]]
        if not (passage.startswith("Passage:") and question.strip() and kind.strip() and answers and all(answers)):
            raise GSAError(
                f"{origin}: examples[{number}] must be 'Passage: ...\\nQuestion: ...\\nAnswer type: ...' with its "
                f"answers in 'target', got {example['input'][:60]!r}"
            )
        yield passage.removeprefix("Passage:"), question, answers


class Cutter:
    """Cuts documents to a number of tokens."""

    def __init__(self, tokenizer: ReaderTokenizer, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length

    def __call__(self, text: str, sought: list[str]) -> str:
        """A window of the text around the first place of whatever is sought; its beginning, if nothing is found."""
        if len(text.encode()) <= self._length:  # no token is less than a byte
            return text
        ids = self._tokenizer.encode(text)
        if len(ids) <= self._length:
            return text
        found = [place for place in (text.lower().find(each.strip().lower()) for each in sought) if place >= 0]
        centre = len(self._tokenizer.encode(text[: min(found)])) if found else 0
        start = max(0, centre - self._length // 2)
        # A token may be part of a character, of which nothing can be shown.
        return self._tokenizer.decode(ids[start : start + self._length]).strip("\N{REPLACEMENT CHARACTER}")
