"""The paper's benchmarks: tasks with their shots, metrics and sources of data, and the groups that its tables are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from gsa.errors import GSAError
from gsa.eval import paper_rows
from gsa.eval.paper_rows import PaperRow

PRETRAINING_LENGTH = 2048
"""Tokens of the paper's training sequences, and of its inputs in the recall tasks."""
LONG_LENGTH = 16384
"""Tokens that its long inputs are cut to."""


@dataclass(frozen=True)
class Task:
    """A benchmark that is known by name here. Any other name is looked for in lm-evaluation-harness."""

    name: str
    title: str
    kind: Literal["harness", "cloze", "long"]
    """harness: defined there. cloze, long: defined in `gsa.eval.tasks`."""
    main: str
    """The metric that the paper reports."""
    shots: int
    files: tuple[str, ...]
    """Files of `--data` with its documents, each of which would do, without endings; the best first."""
    hub: str
    """The dataset on the Hub."""
    examples: str | None = None
    """File of `--data` with documents for examples; without it they are taken from among the others."""
    folder: str = ""
    """kind harness: where the harness keeps its definition."""
    parts: str | None = None
    """kind harness: its subtasks are this and what the documents of a subtask have in this field."""
    part_field: str = ""
    max_length: int | None = None
    """Tokens that inputs are cut to, as in the paper; None leaves it to the model."""


def _harness(
    name: str,
    title: str,
    folder: str,
    main: str,
    file: str,
    hub: str,
    shots: int = 0,
    examples: str | None = None,
    max_length: int | None = None,
) -> Task:
    return Task(name, title, "harness", main, shots, (file,), hub, examples, folder, max_length=max_length)


def _cloze(name: str, title: str, files: tuple[str, ...], hub: str) -> Task:
    return Task(name, title, "cloze", "contains", 0, files, hub, max_length=PRETRAINING_LENGTH)


def _long(
    name: str, title: str, main: str, shots: int, files: tuple[str, ...], hub: str = "", examples: str | None = None
) -> Task:
    return Task(name, title, "long", main, shots, files, hub, examples, max_length=LONG_LENGTH)


_SCROLLS = "tau/scrolls"

TASKS = {
    task.name: task
    for task in [
        _harness("arc_easy", "ARC-e", "arc", "acc", "arc_easy.test", "allenai/ai2_arc", examples="arc_easy.validation"),
        _harness(
            "arc_challenge",
            "ARC-c",
            "arc",
            "acc_norm",
            "arc_challenge.test",
            "allenai/ai2_arc",
            examples="arc_challenge.validation",
        ),
        _harness("hellaswag", "HellaSwag", "hellaswag", "acc_norm", "hellaswag.validation", "Rowan/hellaswag"),
        _harness("piqa", "PIQA", "piqa", "acc", "piqa.validation", "baber/piqa"),
        _harness("winogrande", "WinoGrande", "winogrande", "acc", "winogrande_xl.validation", "allenai/winogrande"),
        _harness("lambada_openai", "LAMBADA", "lambada", "acc", "lambada_openai.test", "EleutherAI/lambada_openai"),
        _harness(
            "wikitext",
            "WikiText",
            "wikitext",
            "word_perplexity",
            "wikitext.test",
            "EleutherAI/wikitext_document_level",
            max_length=PRETRAINING_LENGTH,
        ),
        _harness(
            "nq_open", "NQ", "nq_open", "exact_match", "nq_open.validation", "google-research-datasets/nq_open", 5
        ),
        _harness(
            "triviaqa",
            "TriviaQA",
            "triviaqa",
            "exact_match",
            "triviaqa_wikipedia_nocontext.validation",
            "mandarjoshi/trivia_qa",
            5,
        ),
        Task(
            "bbh",
            "BBH",
            "harness",
            "exact_match",
            3,
            ("bbh",),
            "SaylorTwift/bbh",
            folder="bbh/cot_fewshot",
            parts="bbh_cot_fewshot_",
            part_field="task",
        ),
        Task(
            "mmlu",
            "MMLU",
            "harness",
            "acc",
            5,
            ("mmlu.test",),
            "cais/mmlu",
            "mmlu.dev",
            "mmlu/default",
            "mmlu_",
            "subject",
        ),
        _cloze("cloze_fda", "FDA", ("based_fda.validation",), "hazyresearch/based-fda"),
        _cloze("cloze_swde", "SWDE", ("based_swde.validation",), "hazyresearch/based-swde-v2"),
        _cloze("cloze_squad", "SQuAD", ("based_squad.validation", "squad_dev_v1.1"), "hazyresearch/based-squad"),
        _cloze("cloze_nq", "NQ", ("based_nq.validation",), "hazyresearch/based_nq_2048"),
        _cloze("cloze_triviaqa", "TriviaQA", ("based_triviaqa.validation",), "hazyresearch/based_triviaqa"),
        _cloze("cloze_drop", "DROP", ("based_drop.validation", "drop_answers"), "hazyresearch/based_drop"),
        _long("long_qasper", "Qasper", "f1", 2, ("scrolls_qasper.validation",), _SCROLLS, "scrolls_qasper.train"),
        _long(
            "long_narrativeqa",
            "NarrativeQA",
            "f1",
            0,
            ("scrolls_narrative_qa.validation",),
            _SCROLLS,
            "scrolls_narrative_qa.train",
        ),
        _long(
            "long_quality",
            "QuALITY",
            "exact_match",
            2,
            ("scrolls_quality.validation",),
            _SCROLLS,
            "scrolls_quality.train",
        ),
        _long(
            "long_qmsum",
            "QMSum",
            "rouge",
            1,
            ("scrolls_qmsum.validation", "qmsum.validation"),
            _SCROLLS,
            "scrolls_qmsum.train",
        ),
        _long("long_qasper_yesno", "Qasper yes/no", "acc", 0, ("qasper_yesno.validation",)),
    ]
}


@dataclass(frozen=True)
class GroupColumn:
    """A column of a group's table."""

    header: str
    """In several lines where that saves room."""
    task: str
    metric: str
    averaged: bool = True
    """Whether it counts for the average."""
    of_paper: bool = True

    @property
    def title(self) -> str:
        """The header in one line."""
        return self.header.replace("\n", " ")

    @property
    def percent(self) -> bool:
        """Whether the table shows 100 times the value."""
        return "perplexity" not in self.metric


@dataclass(frozen=True)
class Group:
    """A table of the paper."""

    name: str
    title: str
    columns: tuple[GroupColumn, ...]
    rows: Sequence[PaperRow]
    has_average: bool

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(column.task for column in self.columns))


GROUPS = {
    group.name: group
    for group in [
        Group(
            "paper-commonsense",
            "Commonsense reasoning, zero-shot",
            (
                GroupColumn("Lamb.\nppl", "lambada_openai", "perplexity", averaged=False),
                GroupColumn("Wiki.\nppl", "wikitext", "word_perplexity", averaged=False),
                GroupColumn("ARC-e\nacc", "arc_easy", "acc"),
                GroupColumn("ARC-c\nacc_n", "arc_challenge", "acc_norm"),
                GroupColumn("Hella.\nacc_n", "hellaswag", "acc_norm"),
                GroupColumn("Lamb.\nacc", "lambada_openai", "acc"),
                GroupColumn("PIQA\nacc", "piqa", "acc"),
                GroupColumn("Wino.\nacc", "winogrande", "acc"),
            ),
            paper_rows.COMMONSENSE,
            has_average=True,
        ),
        Group(
            "paper-recall",
            "Recall-intensive reading, zero-shot, inputs cut to 2K tokens",
            tuple(
                GroupColumn(TASKS[name].title, name, "contains")
                for name in ("cloze_fda", "cloze_swde", "cloze_squad", "cloze_nq", "cloze_triviaqa", "cloze_drop")
            ),
            paper_rows.RECALL,
            has_average=True,
        ),
        Group(
            "paper-t2r",
            "Finetuned Transformers: 0 shots, 5 for NQ, TriviaQA and MMLU, 3 for BBH",
            (
                GroupColumn("ARC-e", "arc_easy", "acc"),
                GroupColumn("ARC-c", "arc_challenge", "acc_norm"),
                GroupColumn("Hella.", "hellaswag", "acc_norm"),
                GroupColumn("PIQA", "piqa", "acc"),
                GroupColumn("Wino.", "winogrande", "acc"),
                GroupColumn("NQ", "nq_open", "exact_match"),
                GroupColumn("Trivia\nQA", "triviaqa", "exact_match"),
                GroupColumn("BBH", "bbh", "exact_match"),
                GroupColumn("MMLU", "mmlu", "acc"),
            ),
            paper_rows.T2R,
            has_average=True,
        ),
        Group(
            "paper-long",
            "Long context, inputs cut to 16K tokens",
            (
                GroupColumn("Qasper\nF1", "long_qasper", "f1"),
                GroupColumn("NarrativeQA\nF1", "long_narrativeqa", "f1"),
                GroupColumn("QuALITY\nEM", "long_quality", "exact_match"),
                GroupColumn("QMSum\nROUGE", "long_qmsum", "rouge"),
                GroupColumn("Qasper\nyes/no", "long_qasper_yesno", "acc", of_paper=False),
            ),
            paper_rows.LONG,
            has_average=False,
        ),
    ]
}


def expanded(names: str) -> dict[str, Group | None]:
    """The tasks of a list with commas, in its order, each with the group that it first came by; no task twice.

    >>> list(expanded("piqa,paper-recall"))[:2]
    ['piqa', 'cloze_fda']
    """
    found: dict[str, Group | None] = {}
    for name in (part.strip() for part in names.split(",")):
        if not name:
            raise GSAError(f"eval: --tasks must be names with commas between them, got {names!r}")
        if name in GROUPS:
            found.update((task, GROUPS[name]) for task in GROUPS[name].tasks if task not in found)
        elif name.startswith("paper-"):
            close = get_close_matches(name, GROUPS, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise GSAError(f"eval: there is no group {name!r}; {hint}expected one of {', '.join(GROUPS)}")
        else:
            found.setdefault(name, None)
    return found
