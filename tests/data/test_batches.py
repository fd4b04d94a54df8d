"""The same rows in the same order for any number of processes and workers, cut where documents begin."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.data.batches import MicroBatch, Rows, Steps, in_order
from gsa.data.prepare import prepare
from gsa.data.shards import Tokens
from gsa.errors import GSAError
from tests.examples import examples

LENGTH = 16


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """120 documents of 0 to 39 bytes, in several shards."""
    folder = tmp_path_factory.mktemp("data")
    texts = ["".join(chr(97 + (i * 7 + j) % 26) for j in range((i * 13) % 40)) for i in range(120)]
    (folder / "documents.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare([str(folder / "documents.jsonl")], "bytes", folder / "out", processes=1, shard_tokens=500, progress=False)
    return Tokens.open(folder / "out")


def steps(tokens: Tokens, rank: int = 0, world_size: int = 1, micro: int = 2, **rows: bool) -> Steps:
    cut = Rows(tokens, LENGTH, reset_at_documents=rows.get("reset_at_documents", True))
    return Steps(cut, batch_size=8, micro_batch_size=micro, seed=3, rank=rank, world_size=world_size)


def flat(batches: list[MicroBatch]) -> torch.Tensor:
    return torch.cat([batch.ids.flatten() for batch in batches])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 8), (1, 2), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_ranks_and_workers_never_change_what_a_step_learns_from(
    tokens: Tokens, world_size: int, micro: int, workers: int
) -> None:
    expected = [flat(batches) for batches in steps(tokens, micro=8).run(0, 40, 0)]  # more than two epochs
    ranks = [list(steps(tokens, rank, world_size, micro).run(0, 40, workers)) for rank in range(world_size)]
    for step, whole in enumerate(expected):
        assert torch.equal(torch.cat([flat(rank[step]) for rank in ranks]), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_can_be_entered_anywhere(tokens: Tokens, workers: int) -> None:
    whole = [flat(batches) for batches in steps(tokens).run(0, 40, 0)]
    for begin in (1, 17, 39):
        rest = [flat(batches) for batches in steps(tokens).run(begin, 40, workers)]
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[begin:], strict=True))


def test_an_epoch_is_every_row_once(tokens: Tokens) -> None:
    rows = Rows(tokens, LENGTH, reset_at_documents=True)
    count = len(rows)
    one = Steps(rows, batch_size=1, micro_batch_size=1, seed=0, rank=0, world_size=1)
    seen = sorted(tuple(one[i][0].ids.flatten().tolist()) for i in range(count))
    line = tokens.read(0, count * LENGTH).reshape(count, LENGTH)
    assert seen == sorted(map(tuple, line.tolist()))


@examples(30)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_sequences_begin_with_rows_and_documents(tokens: Tokens, chosen: list[int]) -> None:
    rows = Rows(tokens, LENGTH, reset_at_documents=True)
    chosen = [row % len(rows) for row in chosen]
    batch = rows.micro_batch(chosen)
    assert batch.ids.shape == (1, len(chosen) * LENGTH)
    assert batch.cu_seqlens is not None
    begins = set(batch.cu_seqlens[:-1].tolist())
    ends_of_text = {i + 1 for i, token in enumerate(batch.ids[0].tolist()) if token == 256} - {batch.ids.shape[1]}
    assert begins == ends_of_text | {i * LENGTH for i in range(len(chosen))}
    assert batch.cu_seqlens[-1] == batch.ids.shape[1]
    assert batch.targets == batch.ids.shape[1] - len(begins)


def test_plain_concatenation_has_no_boundaries(tokens: Tokens) -> None:
    batch = Rows(tokens, LENGTH, reset_at_documents=False).micro_batch([3, 1])
    assert batch.cu_seqlens is None
    assert batch.ids.shape == (2, LENGTH)
    assert batch.targets == 2 * (LENGTH - 1)
    np.testing.assert_array_equal(batch.ids[0], tokens.read(3 * LENGTH, 4 * LENGTH))


def test_a_row_of_empty_documents_still_predicts(tmp_path: Path) -> None:
    class OnlyStarts:
        length = 8

        def read(self, begin: int, end: int) -> np.ndarray:
            return np.arange(begin, end)

        def document_starts(self, begin: int, end: int) -> np.ndarray:
            return np.arange(begin, end)

    batch = Rows(OnlyStarts(), 4, reset_at_documents=True).micro_batch([0, 1])  # type: ignore[arg-type]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.targets == 6


@pytest.mark.parametrize("reset", [False, True])
def test_evaluation_reads_every_token_once_in_order(tokens: Tokens, reset: bool) -> None:
    rows = Rows(tokens, LENGTH, reset_at_documents=reset)
    batches = [rows.micro_batch(chosen) for chosen in in_order(rows, 3)]
    seen = torch.cat([batch.ids.flatten() for batch in batches])
    np.testing.assert_array_equal(seen, tokens.read(0, len(seen)))
    assert tokens.length - len(seen) <= 1
    assert [len(chosen) for chosen in in_order(rows, 3, limit=4)] == [3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 6, "micro_batch_size": 4},
            "batch_size 6 must be a multiple of processes x micro_batch_size, 1",
        ),
        ({"batch_size": 3, "micro_batch_size": 1, "world_size": 2}, "2 x 1"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(tokens: Tokens, options: dict[str, int], message: str) -> None:
    rows = Rows(tokens, LENGTH, reset_at_documents=True)
    with pytest.raises(GSAError, match=message):
        Steps(rows, **{"seed": 0, "rank": 0, "world_size": 1, **options})


def test_too_little_data_is_refused(tokens: Tokens) -> None:
    with pytest.raises(GSAError, match="fewer than one row of 1000000"):
        Steps(
            Rows(tokens, 10**6, reset_at_documents=True),
            batch_size=1,
            micro_batch_size=1,
            seed=0,
            rank=0,
            world_size=1,
        )
