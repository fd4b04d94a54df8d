"""The paper's numbers for the tables of `gsa eval`, as its tables have them. None stands where the paper has a dash."""

from __future__ import annotations

from typing import NamedTuple

SMALL = "1.3B parameters, 100B tokens (24 layers, width 2,048)"
LARGE = "2.7B parameters, 100B tokens (32 layers, width 2,560)"
SCRATCH = "trained from scratch"
FINETUNED = "finetuned from Mistral 7B"


class PaperRow(NamedTuple):
    """A row of a table of the paper."""

    section: str
    model: str
    size: str
    tokens: str
    values: tuple[float | None, ...]
    """In the order of the group's columns, the average last where the table has one."""


def _pretrained(section: str, size: str, rows: list[tuple[str, tuple[float | None, ...]]]) -> list[PaperRow]:
    return [PaperRow(section, model, size, "100B", values) for model, values in rows]


COMMONSENSE = [
    # Lamb. ppl, Wiki. ppl, ARC-e, ARC-c, Hella., Lamb., PIQA, Wino., average of the accuracies
    *_pretrained(
        SMALL,
        "1.3B",
        [
            ("Xfmr++", (15.3, 17.1, 54.1, 27.1, 49.3, 47.0, 70.3, 54.9, 50.5)),
            ("Mamba", (15.4, 17.3, 57.1, 28.2, 50.3, 44.4, 71.8, 52.3, 50.7)),
            ("RetNet", (15.4, 17.3, 57.4, 27.9, 50.3, 44.6, 71.7, 51.8, 50.6)),
            ("GLA", (15.4, 17.6, 55.4, 27.7, 49.0, 46.4, 69.9, 54.0, 50.4)),
            ("HGRN2", (11.8, 16.9, 58.1, 28.1, 51.8, 49.4, 71.4, 52.3, 51.9)),
            ("GSA", (12.6, 16.7, 58.1, 28.2, 51.0, 47.4, 72.0, 53.4, 51.7)),
        ],
    ),
    *_pretrained(
        LARGE,
        "2.7B",
        [
            ("Xfmr++", (10.7, 15.2, 59.8, 27.5, 54.2, 52.3, 72.7, 56.2, 53.8)),
            ("Mamba", (13.6, 15.9, 60.7, 29.8, 53.9, 46.4, 72.8, 53.9, 52.9)),
            ("RetNet", (11.9, 15.8, 59.6, 28.1, 54.0, 49.6, 72.3, 53.8, 52.9)),
            ("GLA", (12.4, 15.5, 59.2, 29.9, 54.0, 50.4, 71.7, 55.7, 53.5)),
            ("HGRN2", (8.8, 14.6, 60.8, 30.3, 58.7, 55.4, 73.0, 54.2, 55.4)),
            ("GSA", (9.8, 14.8, 61.9, 30.7, 57.0, 52.7, 73.5, 56.0, 55.3)),
        ],
    ),
]

RECALL = [
    # FDA, SWDE, SQuAD, NQ, TriviaQA, DROP, average
    *_pretrained(
        SMALL,
        "1.3B",
        [
            ("Xfmr++", (46.0, 29.2, 41.0, 24.8, 58.8, 21.3, 36.9)),
            ("Mamba", (13.9, 25.4, 33.2, 18.5, 53.5, 21.7, 27.7)),
            ("RetNet", (21.2, 27.2, 34.0, 15.5, 52.7, 20.0, 28.4)),
            ("GLA", (26.7, 30.6, 34.8, 21.5, 56.0, 19.1, 31.4)),
            ("HGRN2", (9.9, 23.1, 32.0, 16.4, 55.2, 19.1, 25.9)),
            ("GSA", (23.6, 29.8, 36.0, 23.2, 57.0, 20.9, 31.8)),
        ],
    ),
    *_pretrained(
        LARGE,
        "2.7B",
        [
            ("Xfmr++", (62.3, 30.9, 44.3, 29.3, 61.8, 21.4, 41.7)),
            ("Mamba", (21.5, 26.7, 34.2, 21.2, 57.0, 22.2, 30.5)),
            ("RetNet", (24.1, 26.1, 36.4, 20.4, 57.3, 21.8, 31.0)),
            ("GLA", (30.3, 35.5, 36.8, 23.3, 58.2, 21.8, 34.3)),
            ("HGRN2", (15.0, 29.9, 35.1, 17.0, 59.8, 20.0, 29.5)),
            ("GSA", (39.1, 33.5, 39.0, 26.9, 60.8, 19.9, 36.5)),
        ],
    ),
]

T2R = [
    # ARC-e, ARC-c, Hella., PIQA, Wino., NQ, TriviaQA, BBH, MMLU, average
    PaperRow(SCRATCH, "RWKV6", "7B", "1.4T", (73.6, 44.0, 75.2, 78.4, 68.5, 20.9, 59.5, 23.4, 43.9, 54.1)),
    PaperRow(SCRATCH, "Mamba", "7B", "1.2T", (77.6, 46.8, 77.8, 81.0, 72.3, 25.4, 66.2, 21.5, 33.2, 55.7)),
    PaperRow(SCRATCH, "Llama2", "7B", "2T", (76.4, 46.2, 76.0, 78.0, 69.2, 26.0, 64.2, 39.1, 45.5, 57.8)),
    PaperRow(SCRATCH, "Gemma", "7B", "6T", (81.5, 53.2, 80.5, 79.8, 74.0, 24.3, 63.7, 58.9, 63.2, 64.3)),
    PaperRow(SCRATCH, "Mistral", "7B", "?", (80.8, 54.0, 81.1, 80.6, 74.0, 29.7, 70.3, 56.5, 62.4, 65.5)),
    PaperRow(FINETUNED, "SUPRA", "7B", "+20B", (74.6, 42.3, 74.8, 80.1, 67.4, None, None, None, 28.0, None)),
    PaperRow(FINETUNED, "RetNet", "7B", "+20B", (73.3, 39.9, 72.9, 77.8, 66.1, 16.2, 43.0, 8.7, 26.1, 47.1)),
    PaperRow(FINETUNED, "GLA", "7B", "+20B", (74.6, 44.0, 75.9, 79.2, 69.5, 22.2, 57.8, 20.8, 28.4, 52.5)),
    PaperRow(FINETUNED, "GSA", "7B", "+20B", (75.9, 43.9, 76.5, 78.7, 70.1, 23.4, 60.7, 23.5, 32.4, 53.9)),
    PaperRow(FINETUNED, "SUPRA", "7B", "+100B", (76.0, 45.7, 77.1, 79.9, 70.3, 24.7, 60.4, 19.8, 34.1, 54.2)),
    PaperRow(FINETUNED, "GSA", "7B", "+100B", (76.0, 46.9, 77.9, 78.9, 72.6, 26.9, 65.8, 29.3, 38.1, 56.9)),
]

LONG = [
    # Qasper, NarrativeQA, QuALITY, QMSum
    PaperRow(SCRATCH, "RWKV6", "7B", "1.4T", (9.2, 14.4, 30.8, 1.1)),
    PaperRow(SCRATCH, "Mamba", "7B", "1.2T", (5.6, 27.9, 27.5, 0.8)),
    PaperRow(SCRATCH, "Mistral", "7B", "?", (25.8, 25.1, 38.0, 5.0)),
    PaperRow(FINETUNED, "RetNet", "7B", "+20B", (11.1, 0.0, 26.2, 0.0)),
    PaperRow(FINETUNED, "GLA", "7B", "+20B", (18.4, 17.2, 30.9, 9.0)),
    PaperRow(FINETUNED, "GSA", "7B", "+20B", (18.8, 19.2, 32.0, 10.0)),
]
