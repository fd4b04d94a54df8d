"""Data from the Hugging Face Hub: whether it can be reached, told in seconds, and rows of its datasets."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gsa.errors import GSAError
from gsa.eval.local_data import FILES, Row, checked_rows, parsed_rows
from gsa.extras import require

PATIENCE = 5.0
"""Seconds to wait for the Hub's first answer. What is asked for afterwards has the Hub's own patience."""


class NoData(GSAError):
    """The documents of a task cannot be had; the message says why."""


@contextmanager
def asked(what: str) -> Iterator[None]:
    """While entered, data of the Hub may be asked for; whatever goes wrong with that is NoData.

    Where the Hub cannot be reached, only what was downloaded before is looked for, which takes no time.
    """
    require("datasets", "data of the Hub")
    import datasets
    import huggingface_hub

    unreachable = why_unreachable()
    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants) if unreachable else ()
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    except GSAError as error:
        raise NoData(str(error)) from None
    except Exception as error:
        # Of what is not on this machine, libraries say many things; all of them mean that there is no data.
        reason = unreachable or f"{type(error).__name__}: {error}"
        raise NoData(f"{what}: {reason}") from error
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

        return checked_rows(list(load_dataset(dataset, split="validation")), FILES[file], dataset)


def zipped_rows(dataset: str, archive: str, split: str, file: str) -> list[Row]:
    """Rows of ARCHIVE/SPLIT.jsonl in ARCHIVE.zip, a file of a dataset."""
    with asked(f"{dataset}, {archive}.zip"):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(dataset, f"{archive}.zip", repo_type="dataset")
        with zipfile.ZipFile(path) as folder, folder.open(f"{archive}/{split}.jsonl") as lines:
            return parsed_rows(lines, FILES[file], f"{dataset}, {archive}.zip, {split}.jsonl")
