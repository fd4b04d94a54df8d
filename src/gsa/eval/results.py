"""Result files: one JSON object for each model and task, in the format of every evaluation (`gsa-eval-1`)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.errors import GSAError
from gsa.files import full_disk_explained, named, read_json, written
from gsa.terminal import quoted

if TYPE_CHECKING:
    from gsa.eval.reader import Reader

FORMAT = "gsa-eval-1"
LONGEST = 100
"""Characters that the name of a file may have, without its ending."""
FOLDER = Path("evaluations")
"""Where results go that nobody named a folder for."""

Result = dict[str, Any]
_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "task": (str,),
    "title": (str,),
    "group": (str, type(None)),
    "version": (int, float, str),
    "shots": (int,),
    "limit": (int, type(None)),
    "data": (str,),
    "metrics": (dict,),
    "main": (str,),
    "samples": (dict,),
    "settings": (dict,),
    "seconds": (int, float),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {"notes": (list,), "identity": (dict,), "parts": (dict,)}
"""What only some results have."""


def folder_of(reader: Reader, output: str | None) -> Path:
    """The folder of a model's results: as it was named, or evaluations/NAME."""
    if output is not None:
        return named(output, "output")
    return FOLDER / file_name(Path(reader.name).name or reader.name)


def file_name(text: str) -> str:
    """A text as part of the name of a file.

    >>> file_name("perplexity:a b/c.txt")
    'perplexity-a-b-c.txt'
    """
    name = re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "result"
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{name[: LONGEST - 13]}-{digest}"  # so that names stay different that begin alike


def result_file(task: str, unusual: Mapping[str, Any]) -> str:
    """The name of a result file. What is not as usual is part of it, so that a usual run is not replaced.

    >>> result_file("needle", {"lengths": "512,1K", "filler": "books/emma.txt"})
    'needle-lengths=512-1K-filler=emma.txt.json'
    """
    words = [f"{name}={Path(str(value)).name}" for name, value in unusual.items()]
    return file_name("-".join([task, *words])) + ".json"


def save_result(result: Result, path: Path) -> None:
    """Writes a result file, whole or not at all. A number that is none (of an endless perplexity) becomes null."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with full_disk_explained(path.parent), written(path) as place:
            place.write_text(json.dumps(_finite(result), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise GSAError(f"{path}: the result cannot be written: {error.strerror}") from None


def load_result(path: Path) -> Result:
    """A result file, checked: what others read of it is there and of the right type."""
    result = read_json(path, made_by="gsa eval")
    if result.get("format") != FORMAT:
        raise GSAError(f"{path}: expected a result of gsa eval ({FORMAT}), got format {quoted(result.get('format'))}")
    for name, types in {**_FIELDS, **{name: types for name, types in _OPTIONAL.items() if name in result}}.items():
        if name not in result or type(result[name]) not in types:
            words = " or ".join("null" if each is type(None) else each.__name__ for each in types)
            raise GSAError(f"{path}: {name!r} must be {words}, got {_told(result, name)}")
    if type(result["model"].get("name")) is not str:
        raise GSAError(f"{path}: the 'name' of the model must be str, got {_told(result['model'], 'name')}")
    for name, metric in result["metrics"].items():
        values = [metric.get("value"), metric.get("stderr")] if isinstance(metric, dict) else ["?"]
        if not all(value is None or type(value) in (int, float) for value in values):
            raise GSAError(f"{path}: metric {name!r} must have a value and a stderr, got {quoted(metric)}")
        if type(metric.get("higher_is_better")) is not bool:
            got = _told(metric, "higher_is_better")
            raise GSAError(f"{path}: 'higher_is_better' of metric {name!r} must be true or false, got {got}")
    if result["main"] not in result["metrics"]:
        raise GSAError(f"{path}: the main metric {quoted(result['main'])} is not among the metrics")
    lengths = {len(column) if isinstance(column, list) else -1 for column in result["samples"].values()}
    if len(lengths) > 1 or -1 in lengths:
        raise GSAError(f"{path}: samples must be lists of one length")
    return result


def _told(fields: dict[str, Any], name: str) -> str:
    return quoted(fields[name]) if name in fields else "nothing"


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
