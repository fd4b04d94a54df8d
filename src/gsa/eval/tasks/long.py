"""Long documents with questions: Qasper, NarrativeQA, QuALITY and QMSum as SCROLLS has them, QMSum as its authors do,
and the yes/no questions of Qasper. Prompts that are too long lose their beginning, in the reader.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gsa.errors import GSAError
from gsa.eval.groups import Task
from gsa.eval.local_data import Row
from gsa.eval.tasks.documents import Documents
from gsa.eval.tasks.reading import Question, ReadingTask
from gsa.eval.tasks.scores import Score, exact_match, f1, rouge

VERSION = "long 1"
"""Of the definitions; scores of another one do not compare."""
MAX_TOKENS = 256
SEED = 1234
"""Of the choice of examples, as in lm-evaluation-harness."""
_CHOICE = re.compile(r" *\([A-D]\) *")


class Passage(NamedTuple):
    """A long document with one question."""

    id: str
    source: str
    """Which document it is; examples are taken from others."""
    text: str
    question: str
    choices: list[str]
    right: list[str]

    @property
    def prompt(self) -> str:
        return f"{self.text}\n\nQuestion: {self.question}\nAnswer:"


def long_task(task: Task, documents: Documents, shots: int) -> ReadingTask:
    """The task, with so many examples before each question."""
    passages = _passages(documents.rows, documents)
    examples = passages if documents.examples is None else _passages(documents.examples, documents)
    draw = random.Random(SEED)
    questions = [
        Question(id=each.id, prompt=_shown(each, examples, shots, draw), choices=each.choices, right=each.right)
        for each in passages
    ]
    return ReadingTask(
        task.name,
        VERSION,
        questions,
        _scores(task.main),
        max_tokens=MAX_TOKENS,
        combined={"rouge": geometric_mean} if task.main == "rouge" else None,
        per_character=task.name == "long_quality",
    )


def long_notes(task: Task, documents: Documents, shots: int) -> list[str]:
    """What makes a task other than the original."""
    if not shots or documents.examples is not None:
        return []
    return [f"{task.title}: examples are of the same set, from other documents than the question's"]


def geometric_mean(scores: Sequence[Sequence[float]]) -> float:
    """The geometric mean of the averages of several scores, each given for all documents."""
    product, averages = 1.0, [sum(column) / len(scores) for column in zip(*scores, strict=True)]
    for average in averages:
        product *= average
    return float(product ** (1 / len(averages)))


def _scores(main: str) -> dict[str, Score]:
    if main == "rouge":
        return {kind: rouge(kind) for kind in ("rouge1", "rouge2", "rougeL")}
    scores: dict[str, Score] = {"f1": f1, "exact_match": exact_match, "acc": exact_match}
    return {main: scores[main]}


def _shown(passage: Passage, examples: Sequence[Passage], shots: int, draw: random.Random) -> str:
    """What the model reads: examples of other documents, then the passage."""
    others: list[Passage] = []
    if shots:
        fit = [each for each in examples if each.source != passage.source]
        if len(fit) < shots:
            raise GSAError(f"eval: {shots} examples were asked for, of other documents there are {len(fit)}")
        others = draw.sample(fit, shots)
    return "".join(f"{each.prompt} {each.right[0]}\n\n" for each in others) + passage.prompt


def _passages(rows: Sequence[Row], documents: Documents) -> list[Passage]:
    kinds: dict[str, Callable[[Sequence[Row]], list[Passage]]] = {
        "qmsum.validation": _meetings,
        "qasper_yesno.validation": _papers,
        "scrolls_quality.validation": _quality,
        "scrolls_qasper.validation": _qasper,
    }
    return kinds.get(documents.file, _scrolls)(rows)


def _meetings(rows: Sequence[Row]) -> list[Passage]:
    """QMSum as its authors have it: meetings, each with its queries."""
    passages = []
    for meeting, row in enumerate(rows):
        text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
        queries = [*row["general_query_list"], *row["specific_query_list"]]
        passages += [
            Passage(f"{meeting}/{number}", str(meeting), text, each["query"].strip(), [], [each["answer"].strip()])
            for number, each in enumerate(queries)
        ]
    return passages


def _papers(rows: Sequence[Row]) -> list[Passage]:
    return [
        Passage(
            row["id"],
            row["text"],
            row["text"].strip(),
            row["question"].strip(),
            ["Yes", "No"],
            [row["answer"]],
        )
        for row in rows
    ]


def _scrolls(rows: Sequence[Row]) -> list[Passage]:
    """SCROLLS: question and document with an empty line between them, a row for each answer to it."""
    found: dict[str, Passage] = {}
    for row in rows:
        question, _, text = row["input"].partition("\n\n")
        passage = Passage(row["id"], text, text.strip(), question.strip(), [], [])
        found.setdefault(row["id"], passage).right.append(row["output"].strip())
    return list(found.values())


def _qasper(rows: Sequence[Row]) -> list[Passage]:
    """Where all answers are yes or no, the model chooses between them."""
    return [
        each._replace(choices=["yes", "no"]) if {answer.lower() for answer in each.right} <= {"yes", "no"} else each
        for each in _scrolls(rows)
    ]


def _quality(rows: Sequence[Row]) -> list[Passage]:
    """The four choices stand between question and document."""
    passages = []
    for each in _scrolls(rows):
        end = each.text.find("\n\n", each.text.find("(D)"))
        choices = [" ".join(choice.split()) for choice in _CHOICE.split(each.text[:end])[1:]]
        right = [" ".join(answer.split()) for answer in each.right]
        if len(choices) != 4 or not set(right) <= set(choices):
            raise GSAError(f"QuALITY, question {each.id}: expected choices (A) to (D) with the answer among them")
        text = each.text[end:].strip()
        passages.append(each._replace(source=text, text=text, choices=choices, right=right))
    return passages
