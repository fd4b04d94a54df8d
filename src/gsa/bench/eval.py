"""`gsa bench eval`: log-likelihoods of benchmarks by our reader and by the harness's own type, on the same model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gsa.bench.arguments import prepare, require_native
from gsa.errors import GSAError
from gsa.extras import require
from gsa.table import Column, Table, show

if TYPE_CHECKING:
    from gsa.eval.ours import OurReader
    from gsa.eval.reader import Continuation
    from gsa.eval.tasks.documents import Documents
    from gsa.models import LM

BATCH = 64
"""Requests that our reader reads together, as `--model gsa` does by default."""
SHORT = 4
"""PIQA's documents are short: it takes so many times as many."""
ROUNDS, SECONDS = 3, 10.0
"""How often each takes its turn, unless so much time has passed."""


def evaluation(
    documents: int = 12,
    data: str | None = None,
    weights: Literal["bf16", "fp32"] = "bf16",
    threads: int | None = None,
    quick: bool = False,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Log-likelihoods by our reader beside the harness's type `hf`, on a GSA model in the shape of SmolLM2-135M.

    The model has random weights. Requests have the lengths of PIQA (questions of 8 to 19
    tokens; two endings of 23 on average, the first 8 alike) and of MMLU with five shots (350 to 600 tokens that all
    questions share, questions of 40 to 80, four answers of one token). With --data they are real ones, in tokens of
    gsa-tiny, of which a text has more than of SmolLM2's. Shows documents a second of `hf` with its defaults, which are
    batches of one, and in batches of 8; of our reader in batches of 64 if it reads every request whole; and of our
    reader as it is. Takes about two minutes.

    Args:
        documents: Questions of MMLU; PIQA has four times as many.
        data: Folder with documents, as `gsa eval --data` takes it: the first ones of piqa.validation and of mmlu.test,
            whose examples are in mmlu.dev.
        weights: What the weights are stored in, which is what both take by default.
        threads: Threads of torch; its own choice by default.
        quick: A model of three layers: to see that it works.
        json: Print JSON instead of tables.
        markdown: Print the tables as Markdown.
    """
    from rich.console import Console

    prepare("bench", json=json, markdown=markdown, threads=threads, documents=documents)
    require_native()
    with Console(stderr=True).status("making the models") as status:
        report = measure(documents, data, weights, quick, lambda what: status.update(what))
    show(report, tables(report), json=json, markdown=markdown)


def measure(documents: int, data: str | None, weights: str, quick: bool, tick: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of the benchmark."""
    for package in ("lm_eval", "datasets", "transformers"):
        require(package, "bench: the comparison with the evaluation harness")
    import torch

    from gsa.bench import decode_model
    from gsa.ops.native import library

    found_here = {name: _documents(name, data) for name in ("piqa", "mmlu")} if data is not None else {}
    lm = decode_model.random_model(decode_model.shape(quick))
    reader, hf = _ours(lm, weights), _harness(lm, weights)
    ways: dict[str, Callable[[Sequence[Continuation]], list[float]]] = {
        "hf_1": partial(_by_harness, hf, 1),
        "hf_8": partial(_by_harness, hf, 8),
        "whole": partial(_by_reader, reader, False),
        "ours": partial(_by_reader, reader, True),
    }
    rows: list[dict[str, Any]] = []
    for name, make, choices, count in (("PIQA", piqa, 2, SHORT * documents), ("MMLU", mmlu, 4, documents)):
        tick(name)
        if data is None:
            asked = make(count, lm.config.vocab_size)
        else:
            asked = real(name.lower(), found_here[name.lower()], count, reader)
        count = len(asked) // choices
        best, found = _timed(ways, asked)
        rows.append(
            {
                "benchmark": name,
                "documents": count,
                "documents_per_second": {way: count / seconds for way, seconds in best.items()},
                "ratio": {way: seconds / best["ours"] for way, seconds in best.items() if way != "ours"},
                "apart": max(abs(a - b) for a, b in zip(found["hf_1"], found["ours"], strict=True)),
            }
        )
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "parameters": lm.num_parameters,
        "weights": weights,
        "compute": reader.about["compute"],
        "data": data,
        "batch": BATCH,
        "rows": rows,
    }


def _timed(
    ways: dict[str, Callable[[Sequence[Continuation]], list[float]]], asked: list[Continuation]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The best time of each way, and its answers. They take turns, after a few requests to warm up."""
    best, found = dict.fromkeys(ways, float("inf")), {}
    for way in ways.values():
        way(asked[:4])
    begin, rounds = time.perf_counter(), 0
    while rounds == 0 or (rounds < ROUNDS and time.perf_counter() - begin < SECONDS):
        for name, way in ways.items():
            before = time.perf_counter()
            found[name] = way(asked)
            best[name] = min(best[name], time.perf_counter() - before)
        rounds += 1
    return best, found


def piqa(documents: int, vocabulary: int) -> list[Continuation]:
    """Two endings behind each of so many questions, which begin alike, as PIQA's do."""
    from gsa.eval.reader import Continuation

    draw = random.Random(0)
    asked = []
    for _ in range(documents):
        context, alike = _ids(draw, 8, 19, vocabulary), _ids(draw, 0, 16, vocabulary)
        asked += [Continuation(context, alike + _ids(draw, 10, 20, vocabulary)) for _ in range(2)]
    return asked


def mmlu(documents: int, vocabulary: int) -> list[Continuation]:
    """Four answers of one token to each of so many questions, behind the same five examples."""
    from gsa.eval.reader import Continuation

    draw = random.Random(0)
    shots, answers = _ids(draw, 350, 600, vocabulary), [_ids(draw, 1, 1, vocabulary) for _ in range(4)]
    asked = []
    for _ in range(documents):
        context = shots + _ids(draw, 40, 80, vocabulary)
        asked += [Continuation(context, answer) for answer in answers]
    return asked


def _documents(name: str, folder: str) -> Documents:
    """The documents of a task in a folder."""
    from gsa.eval.groups import TASKS
    from gsa.eval.local_data import DataFolder
    from gsa.eval.tasks.documents import from_folder, gap

    found = from_folder(TASKS[name], DataFolder(folder))
    if found is None:
        raise GSAError(f"bench: there is no {gap(TASKS[name])} in {folder}")
    return found


def real(name: str, documents: Documents, count: int, reader: OurReader) -> list[Continuation]:
    """What the harness asks about the first documents of a task, in tokens of the reader."""
    from gsa.eval.groups import TASKS
    from gsa.eval.harness import HarnessModel
    from gsa.eval.reader import Continuation
    from gsa.eval.run import quiet
    from gsa.eval.tasks.harness_tasks import local_tasks

    task, model, asked = TASKS[name], HarnessModel(reader), []
    with quiet():
        for part in local_tasks(task, replace(documents, rows=documents.rows[:count]), task.shots, None):
            part.build_all_requests(rank=0, world_size=1)
            asked += [Continuation(*model._encode_pair(*request.args)) for request in part.instances]
    return asked


def _ids(draw: random.Random, least: int, most: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(draw.randint(least, most))]


def _ours(lm: LM, stored: str) -> OurReader:
    """A reader of the model as it is when it is loaded from a folder with such weights."""
    from gsa import pretrained
    from gsa.data.tokenizer import load_tokenizer
    from gsa.eval.ours import OurReader
    from gsa.infer import Engine, Model
    from gsa.infer.text import TextEngine

    model = Model.load(lm, stored, device="cpu")
    return OurReader(TextEngine(Engine(model, batch_size=1), load_tokenizer(str(pretrained.folder()))), "random")


def _harness(lm: LM, stored: str) -> Any:
    """The harness's type `hf` with the same model."""
    import logging

    import torch
    from transformers import AutoTokenizer

    from gsa import pretrained
    from gsa.models.hf.config import GSAConfig
    from gsa.models.hf.modeling import GSAForCausalLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of models that are handed over
    from lm_eval.models.huggingface import HFLM

    model: Any = GSAForCausalLM(GSAConfig.from_model_config(lm.config))
    model.load_state_dict(lm.state_dict())
    model = model.to(torch.bfloat16 if stored == "bf16" else torch.float32).eval()
    # Requests come as ids: the tokenizer is only there because there has to be one.
    return HFLM(model, tokenizer=AutoTokenizer.from_pretrained(pretrained.folder()), batch_size=1)


def _by_harness(hf: Any, batch_size: int, asked: Sequence[Continuation]) -> list[float]:
    hf.batch_size_per_gpu = batch_size
    requests = [(None, list(context), list(continuation)) for context, continuation in asked]
    return [total for total, _ in hf._loglikelihood_tokens(requests, disable_tqdm=True)]


def _by_reader(reader: OurReader, reuse: bool, asked: Sequence[Continuation]) -> list[float]:
    scores = dict(reader.score(asked, batch_size=BATCH, reuse=reuse))
    return [scores[number].log_likelihood for number in range(len(asked))]


def tables(report: dict[str, Any]) -> list[Table]:
    """Documents a second of each, and how many times as fast ours is."""

    def of(group: str, who: str) -> Callable[[Any], Any]:
        return lambda row: row[group][who]

    rate, ratio = "documents_per_second", "ratio"
    counts = " and ".join(f"{row['documents']} documents of {row['benchmark']}" for row in report["rows"])
    columns = [
        Column("benchmark", "benchmark", left=True),
        Column("hf, 1", of(rate, "hf_1"), "{:.2f}"),
        Column("hf, 8", of(rate, "hf_8"), "{:.2f}"),
        Column("whole", of(rate, "whole"), "{:.2f}"),
        Column("ours", of(rate, "ours"), "{:.2f}"),
        Column("over hf, 1", of(ratio, "hf_1"), "{:.1f}x"),
        Column("over hf, 8", of(ratio, "hf_8"), "{:.1f}x"),
        Column("over whole", of(ratio, "whole"), "{:.1f}x"),
        Column("apart", "apart", "{:.0e}"),
    ]
    notes = [
        "hf, 1 and hf, 8: the harness's own type in batches of 1 and 8; "
        f"ours: `--model gsa` in batches of {report['batch']}; whole: every request from its beginning",
        "apart: the largest difference of two log-likelihoods, ours and those of hf, 1",
        f"{counts}, {'as long as the real ones' if report['data'] is None else 'of ' + report['data']}; MMLU has five "
        "shots",
        f"{report['parameters'] / 1e6:.0f}M parameters, {report['threads']} threads, {report['isa']}, "
        f"torch {report['torch']}",
    ]
    title = f"Documents a second, weights in {report['weights']}, products in {report['compute']}"
    return [Table(title, columns, report["rows"], notes)]
