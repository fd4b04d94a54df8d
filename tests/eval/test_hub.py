"""The Hub: reached or not, soon; and what comes of its datasets."""

import json
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import datasets
import huggingface_hub
import pytest

from gsa.errors import OutOfMemory
from gsa.eval import hub
from gsa.eval.groups import TASKS
from gsa.eval.hub import NoData, dataset_rows, why_unreachable, zipped_rows
from gsa.eval.tasks.documents import from_hub

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    why_unreachable.cache_clear()
    yield
    why_unreachable.cache_clear()


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_hub_that_answers_is_reached_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert why_unreachable() is None
        thread.join()
        server.server_close()
        why_unreachable.cache_clear()
        assert "cannot be reached" in str(why_unreachable())


def test_where_it_cannot_be_reached_only_earlier_downloads_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NoData, match=r"gsa/no-such-dataset: http://127.0.0.1:9 cannot be reached .*\(\w+Error: "):
        dataset_rows("gsa/no-such-dataset", "based_fda.validation")
    assert not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: [{"text": "a", "key": "b", "value": "c"}])
    assert dataset_rows("gsa/downloaded", "based_fda.validation")[0]["value"] == "c"


def test_rows_of_the_hub_are_checked_and_what_goes_wrong_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: [{"text": "a", "key": "b"}])
    with pytest.raises(NoData, match="gsa/some, row 1: there is no field 'value'"):
        dataset_rows("gsa/some", "based_fda.validation")
    for error, expected in (
        (ValueError("Unknown split"), NoData),
        (datasets.exceptions.DatasetGenerationError("broken"), NoData),
        (ModuleNotFoundError("no sympy"), NoData),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (ZeroDivisionError("a fault of ours"), ZeroDivisionError),
    ):

        def fail(name: str, split: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(expected, match=str(error)):
            dataset_rows("gsa/some", "based_fda.validation")


def test_long_documents_come_from_the_archives_of_scrolls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    with zipfile.ZipFile(tmp_path / "quality.zip", "w") as archive:
        for split in ("validation", "train"):
            archive.write(DATA / f"scrolls_quality.{split}.jsonl", f"quality/{split}.jsonl")
    asked = []

    def download(dataset: str, file: str, repo_type: str) -> str:
        asked.append((dataset, file, repo_type))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    documents = from_hub(TASKS["long_quality"], shots=2)
    assert asked == [("tau/scrolls", "quality.zip", "dataset")] * 2
    assert documents.origin == "tau/scrolls, quality.zip"
    expected = [json.loads(line) for line in (DATA / "scrolls_quality.train.jsonl").read_text().splitlines()]
    assert documents.examples == expected
    assert from_hub(TASKS["long_quality"], shots=0).examples is None
    with pytest.raises(NoData, match=r"narrative_qa\.zip: FileNotFoundError"):
        from_hub(TASKS["long_narrativeqa"], shots=0)
    with pytest.raises(NoData, match=r"quality\.zip: there is no quality/test\.jsonl in it"):
        zipped_rows("tau/scrolls", "quality", "test", "scrolls_quality.validation")
    with pytest.raises(NoData, match="none has it in this form"):
        from_hub(TASKS["long_qasper_yesno"], shots=0)
