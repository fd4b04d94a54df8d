"""`gsa eval`."""

from __future__ import annotations

from pathlib import Path

from gsa.console import Compute, Weights
from gsa.errors import GSAError
from gsa.eval.arguments import Dtype, max_lengths

SOME_ARE_MISSING = 1
"""Exit code where a table was made without tasks whose documents cannot be had."""
BATCH_SIZE = 32


def evaluate(
    model: str = "",
    *,
    tasks: str | None = None,
    list: bool = False,
    data: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    max_length: str | None = None,
    batch_size: int = BATCH_SIZE,
    output: str | None = None,
    again: bool = False,
    text: list[str] | None = None,
    field: str = "text",
    context: int | None = None,
    stride: int | None = None,
    lengths: str | None = None,
    last: int = 256,
    samples: int = 4,
    limit_tokens: int | None = None,
    plot: str | None = None,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    dtype: Dtype = "auto",
    threads: int | None = None,
    json: bool = False,
    markdown: bool = False,
) -> None:
    """Evaluates a model on benchmarks, and prints the paper's tables with its row in them.

    Each task gets a result file when it is finished, with the score of every document. The same command again goes on
    where it was stopped. A task whose documents cannot be had is named with the file that would fill the gap; the
    others are run, and the exit code is 1.

    With --text it is evaluated on files instead: loss in nats, perplexity and bits per byte, by how many tokens stand
    before a token, as a table and a chart. Documents are read whole, or in windows; with --lengths, contexts of these
    lengths are compared, with time and memory.

    Args:
        model: A model of ours (gsa-tiny, a folder, a run, a name of the Hub), or any causal model that transformers
            loads: a folder, a name of the Hub, or a file that ends with .gguf.
        tasks: Names with commas between them: paper-commonsense, paper-recall, paper-t2r, paper-long, which are the
            paper's tables with its shots, metrics and truncation; tasks that --list shows; or any of
            lm-evaluation-harness.
        list: Show groups and tasks, and where the documents of each come from, and exit.
        data: Folder of files with documents (docs/evaluation.md has the layout). What is not in it comes from the Hub.
        limit: Only the first so many documents of each task; of MMLU and BBH, as many of each part as it comes to.
        shots: Examples before each document, instead of the paper's number.
        max_length: Tokens that inputs are cut to, instead of the paper's; several with commas between them are run one
            after the other, as in 2K,4K,8K,16K.
        batch_size: About how many requests are read together, which changes time and memory, not scores.
        output: Folder for results; evaluations/MODEL by default.
        again: Run finished tasks anew.
        text: Measure the perplexity on this file or folder: text, .jsonl, .parquet, compressed or not, as
            `gsa data prepare` takes them. May be given several times. The options from here to --limit-tokens are for
            it.
        field: Where the text is in a row of .jsonl or .parquet.
        context: Read documents in windows of so many tokens; by default whole, or in the longest windows that the model
            takes.
        stride: Tokens by which windows advance; those that a window has read before do not count again. By default as
            many as --context.
        lengths: Compare contexts of these lengths, as in 1K,4K,16K,64K, by the loss of their last tokens, which are the
            same for all lengths; with tokens a second, peak memory, and the size of the state.
        last: With --lengths, so many of the last tokens.
        samples: With --lengths, so many contexts of each.
        limit_tokens: Take no more tokens of the text than so many.
        plot: Picture to write (.png, .svg, .pdf): of tasks, accuracies as bars beside the paper's rows; of texts, the
            loss.
        weights: Format of the weights in memory; for models of ours.
        compute: What prompts are computed in; for models of ours.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        dtype: What a model of transformers computes in; auto is that of its weights, and fp32 for a GGUF file.
        threads: Threads of torch; its own choice by default.
        json: Print all numbers as JSON instead of tables.
        markdown: Print tables as Markdown.
    """
    from gsa.chart import check_picture
    from gsa.console import tell
    from gsa.table import show
    from gsa.threads import use_threads

    if list:
        from gsa.eval.listing import listing

        facts, tables = listing(data)
        show(facts, tables, json=json, markdown=markdown)
        return
    if not model or (tasks is None) == (text is None):
        raise GSAError(
            "eval: expected a model and either --tasks or --text, as in `gsa eval gsa-tiny --tasks paper-recall`; or "
            "--list"
        )
    if text is None:
        others = {"field": field != "text", "last": last != 256, "samples": samples != 4}
        _refuse("--text", context=context, stride=stride, lengths=lengths, limit_tokens=limit_tokens, **others)
    else:
        counted = batch_size != BATCH_SIZE
        _refuse("--tasks", data=data, limit=limit, shots=shots, max_length=max_length, batch_size=counted, again=again)
    use_threads(threads)

    from gsa.eval.reader import Reader, open_reader

    def opened() -> Reader:
        return open_reader(model, weights=weights, compute=compute, device=device, dtype=dtype)

    if text is not None:
        from gsa.eval.perplexity import run

        run(
            opened(),
            text,
            field=field,
            context=context,
            stride=stride,
            lengths=lengths,
            last=last,
            samples=samples,
            limit_tokens=limit_tokens,
            output=output,
            plot=plot,
            json=json,
            markdown=markdown,
        )
        return
    assert tasks is not None

    from rich.console import Console

    from gsa.eval.run import Request, run_tasks

    if json and markdown:
        raise GSAError("eval: json and markdown exclude each other")
    if plot is not None:
        check_picture(plot)
    request = Request(tasks, data, limit, batch_size, output, max_lengths(max_length), shots, again)
    report = run_tasks(request, opened, tell)
    if plot is not None:
        from gsa.eval.tasks_picture import save_picture

        if not save_picture(report.groups, report.entries, Path(plot)):
            tell(f"{plot} is not written: there are no accuracies to draw")
    show(report.facts(), report.tables(None if markdown else Console().width), json=json, markdown=markdown)
    tell("none of the tasks can be run" if report.folder is None else f"results are in {report.folder}")
    if report.missing:
        raise SystemExit(SOME_ARE_MISSING)


def _refuse(mode: str, **wishes: object) -> None:
    """Raises for an option that would do nothing here, since it goes with the other mode."""
    for name, value in wishes.items():
        if value is not None and value is not False:
            raise GSAError(f"eval: --{name.replace('_', '-')} goes with {mode}")
