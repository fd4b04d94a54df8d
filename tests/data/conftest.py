"""A trained tokenizer, made once: what every test here would otherwise make again."""

from pathlib import Path

import pytest

from tests.data.cases import text


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a byte-level BPE with 400 tokens."""
    from gsa.data.tokenizer_train import train_tokenizer

    folder: Path = tmp_path_factory.mktemp("bpe")
    (folder / "corpus.txt").write_text(text(50_000))
    train_tokenizer([str(folder / "corpus.txt")], 400, folder / "tokenizer")
    return str(folder / "tokenizer")
