"""`make results`: writes the evaluation tables of docs/results.md from the result files in docs/results/, and from
nothing else.

    python docs/results/evaluations.py evaluations/gsa-tiny ...

first puts the results of folders there, a file for each model: all that `gsa eval` and `gsa probe` have found out,
without the scores of single documents.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gsa.eval.compare import written_value
from gsa.eval.comparison import titled, variants
from gsa.eval.groups import GROUPS, TASKS
from gsa.eval.paper_tables import Entry, tables
from gsa.eval.results import Result, file_name, load_result
from gsa.table import Column, Table

HERE = Path(__file__).parent
PAGE = HERE.parent / "results.md"
BEGIN, END = "<!-- `make results` writes from here -->", "<!-- to here -->"
Runs = dict[str, list[Result]]
"""name of a model, and of how it was run -> results, no task twice at one length"""


def gather(folder: Path, place: Path = HERE) -> Path:
    """Puts the results of a folder into one file, a line for each, without samples."""
    results = [load_result(path) | {"samples": {}} for path in sorted(folder.glob("*.json"))]
    path = place / f"{file_name(Path(results[0]['model']['name']).name)}.json"
    lines = ",\n".join(json.dumps(result) for result in results)
    path.write_text(f'{{"results": [\n{lines}\n]}}\n')
    return path


def gathered(place: Path = HERE) -> Runs:
    """The results of all files, those of a limited number of documents apart from those of all."""
    runs: Runs = {}
    for path in sorted(place.glob("*.json")):
        for result in json.loads(path.read_text())["results"]:
            name = Path(result["model"]["name"]).name.removesuffix(".gguf")
            if result["limit"] is not None:
                name += f", {result['limit']:,} documents each"
            runs.setdefault(name, []).append(result | {"model": result["model"] | {"name": name}})
    return dict(sorted(runs.items()))


def section(runs: Runs) -> str:
    """The tables of all groups that there are results of, and one for all other results."""
    shown = [_group_table(name, runs) for name in GROUPS if any(_of_group(name, each) for each in runs.values())]
    of_groups = {task for group in GROUPS.values() for task in group.tasks}
    others = {name: [each for each in results if each["task"] not in of_groups] for name, results in runs.items()}
    if any(others.values()):
        shown.append(_other_table(others))
    return "\n\n".join("\n\n".join([table.markdown(), *table.notes]) for table in shown)


def _of_group(name: str, results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result["task"] in GROUPS[name].tasks]


def _group_table(name: str, runs: Runs) -> Table:
    """The table that `gsa eval` shows, with the rows of all models before the paper's."""
    parts = []
    for results in runs.values():
        entries = [Entry(_own_length(result), result) for result in _of_group(name, results)]
        if entries:
            parts.append(tables([name], entries, [])[0])
    widest = max(parts, key=lambda part: len(part.columns))
    ours = [row for part in parts for row in part.rows if row["tokens"] is None]
    rows = [*ours, *(row for row in widest.rows if row["tokens"] is not None)]
    empty = dict.fromkeys(widest.headers())
    notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    return Table(widest.title, widest.columns, [empty | row for row in rows], notes)


def _own_length(result: Result) -> int | None:
    """The length that inputs were cut to, where it is not that of the paper."""
    length = result["settings"].get("max_length")
    return None if length == TASKS[result["task"]].max_length else length


def _other_table(runs: Runs) -> Table:
    """Main metrics of what is in no group: texts and probes, a column for each model."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    told = variants(list(runs.values()))
    for name, results in runs.items():
        for result in results:
            metric = result["main"]
            arrow = "" if result["metrics"][metric]["higher_is_better"] else " ↓"
            key = (titled(result["title"], result, told), result["data"], metric + arrow)
            found.setdefault(key, {})[name] = written_value(result["metrics"][metric])
    models = [name for name, results in runs.items() if results]
    columns = [
        *(Column(header, place, left=True) for place, header in enumerate(("task", "data", "metric"))),
        *(Column(name, place) for place, name in enumerate(models, 3)),
    ]
    rows = [[*key, *(cells.get(name) for name in models)] for key, cells in found.items()]
    return Table("Texts and probes", columns, rows, ["± is one standard error; of metrics with ↓, lower is better."])


def updated(page: str, runs: Runs) -> str:
    """The page with the tables of these results between its two marks."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{PAGE.name} must have the marks {BEGIN} and {END}, once")
    return pattern.sub(lambda _: f"\n{section(runs)}\n\n", page)


def main(folders: Sequence[str]) -> None:
    for folder in folders:
        print(gather(Path(folder)))
    PAGE.write_text(updated(PAGE.read_text(), gathered()))
    print(PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
