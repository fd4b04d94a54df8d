"""Data from the Hugging Face Hub: whether it can be reached, told in seconds, and rows of its datasets."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gsa.data.optional import first_line, hub_failures
from gsa.errors import GSAError, OutOfMemory, memory_errors
from gsa.eval.local_data import FILES, Row, checked_rows, parsed_rows
from gsa.extras import require

PATIENCE = 5.0
"""Seconds to wait for the Hub's first answer. What is asked for afterwards has the Hub's own patience."""


class NoData(GSAError):
    """The documents of a task cannot be had; the message says why."""


@contextmanager
def asked(what: str) -> Iterator[None]:
    """While entered, data of the Hub may be asked for; what libraries raise where it cannot be had becomes NoData.

    Where the Hub cannot be reached, only what was downloaded before is looked for, which takes no time. Nothing of ours
    belongs in there: its faults would look like missing data.
    """
    require("datasets", "data of the Hub")
    import datasets
    import huggingface_hub

    # A task of the harness may need a package that is not there, and a file of the Hub may be broken.
    failures: tuple[type[Exception], ...] = (*hub_failures(), ImportError, zipfile.BadZipFile)
    unreachable = why_unreachable()
    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants) if unreachable else ()
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        with memory_errors(what):
            yield
    except OutOfMemory:
        raise
    except failures as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise NoData(f"{what}: {said if unreachable is None else f'{unreachable} ({said})'}") from error
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


@cache
def why_unreachable() -> str | None:
    """Why the Hub cannot be asked, found out once; None if it answers."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"the Hub is not asked, since {name} is set, and it was not downloaded earlier"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urlopen(Request(address, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:
        return None  # it answers
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"{address} cannot be reached ({reason}), and it was not downloaded earlier"
    return None


def dataset_rows(dataset: str, file: str) -> list[Row]:
    """The validation set of a dataset, whose rows are as those of this file of the layout."""
    with asked(dataset):
        from datasets import load_dataset

        rows = list(load_dataset(dataset, split="validation"))
    with _unfit_is_no_data():
        return checked_rows(rows, FILES[file], dataset)


def zipped_rows(dataset: str, archive: str, split: str, file: str) -> list[Row]:
    """Rows of ARCHIVE/SPLIT.jsonl in ARCHIVE.zip, a file of a dataset."""
    where, name = f"{dataset}, {archive}.zip", f"{archive}/{split}.jsonl"
    with ExitStack() as stack:
        with asked(where):
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(dataset, f"{archive}.zip", repo_type="dataset")
            folder = stack.enter_context(zipfile.ZipFile(path))
        if name not in folder.namelist():
            raise NoData(f"{where}: there is no {name} in it")
        with _unfit_is_no_data(), folder.open(name) as lines:
            return parsed_rows(lines, FILES[file], f"{where}, {split}.jsonl")


@contextmanager
def _unfit_is_no_data() -> Iterator[None]:
    """While entered, rows that are not what a task needs are NoData too."""
    try:
        yield
    except (GSAError, zipfile.BadZipFile) as error:
        raise NoData(str(error)) from None
