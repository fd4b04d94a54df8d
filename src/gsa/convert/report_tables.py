"""The report of `gsa convert --verify` for people: tables."""

from __future__ import annotations

from gsa.convert.audit import CONFIDENCE, SWAP, Figure
from gsa.convert.by_position import table as by_position
from gsa.convert.recall import tables as recall
from gsa.convert.report import STUDENT, Report
from gsa.table import Table, text_columns


def tables(report: Report) -> list[Table]:
    """By position; of hybrids also by branch; and recall."""
    count, length = report.pieces.ids.shape
    texts = f"{count} pieces of {length:,} tokens from {', '.join(report.pieces.names)}"
    places = report.compared[STUDENT].places()
    found = [by_position("The student beside its teacher", places, [f"{texts}. KL and cross-entropy in nats."])]
    if report.sizes.slots:
        found += [_losses(report), _recovered(report), _ahead(report)]
    return found + (recall(report.recalled) if report.recalled else [])


def _losses(report: Report) -> Table:
    """A row for the teacher and for each beside it."""
    places, sizes = report.compared[STUDENT].places(), report.sizes
    rows = [["teacher", *(f"{place.teacher_ce:.3f}" for place in places)]]
    for name, compared in report.compared.items():
        rows.append([name, *(f"{place.student_ce:.3f}" for place in compared.places())])
    notes = [
        f"All but slots alone have {sizes.sinks} sinks. A window of {sizes.window + sizes.slots} has as large a state "
        "as the student.",
        f"Slots alone: every token but the last is in slots. Slots of another text: replaced every {SWAP} tokens.",
    ]
    if len(report.pieces.names) == 1:
        notes.append("There is one text, so slots of another text are those of another piece of it.")
    return Table("Cross-entropy by position", text_columns("", *(place.name for place in places)), rows, notes)


def _recovered(report: Report) -> Table:
    """A row for each that is not the plain window, a column for each span of positions."""
    rows: dict[str, dict[str, Figure]] = {}
    for share in report.shares:
        rows.setdefault(share.name, {})[share.positions] = share
    spans = list(dict.fromkeys(share.positions for share in report.shares))
    cells = [[name, *(_told(own[span]) if span in own else "" for span in spans)] for name, own in rows.items()]
    near, window = report.sizes.near, report.sizes.window
    notes = [
        f"(loss of window {window} - its loss) / (loss of window {window} - loss of the teacher), with the interval of "
        f"{CONFIDENCE:.0%} confidence: bootstrap over pieces."
    ]
    if not spans:
        notes = ["Nothing: the window loses nothing to the teacher."]
    return Table(f"Recovered beyond window and sinks of {near} tokens", text_columns("", *spans), cells, notes)


def _told(share: Figure) -> str:
    return f"{share.value:.0%} [{share.low:.0%}, {share.high:.0%}]"


def _ahead(report: Report) -> Table:
    """One row: a window with as large a state less the student."""
    window = report.sizes.window + report.sizes.slots
    told = [f"{figure.value:+.3f} [{figure.low:+.3f}, {figure.high:+.3f}]" for figure in report.ahead]
    columns = text_columns("", *(figure.positions for figure in report.ahead))
    notes = ["More than 0: the slots are worth more than as many tokens of window. Intervals as above."]
    return Table("Nats by which the student is better than equal state", columns, [[f"window {window}", *told]], notes)
