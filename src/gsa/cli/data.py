"""`gsa data` and `gsa tokenizer`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Any

from gsa.console import Compute, Weights

MIN_SHARD_TOKENS = 2**16  # each shard is two files, and is listed again in every record


def prepare(
    sources: list[str],
    *,
    tokenizer: str,
    out: str,
    field: str = "text",
    chat_field: str | None = None,
    exclude: str = "",
    max_tokens: int | None = None,
    holdout: str | None = None,
    processes: int | None = None,
    shard_tokens: int = 2**27,
    strict: bool = False,
    json: bool = False,
) -> None:
    """Turns text into token shards that are mapped into memory, for `gsa train`.

    Sources are text files (a document each), .jsonl and .parquet files (a document in each row), folders of those, and
    datasets of the Hugging Face Hub, which are streamed (hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT). Text and
    .jsonl may be compressed (.gz, .zst). A .json file whose first line is an object is read as .jsonl, one that is an
    array is refused, any other is text. Rows that cannot be read are counted and left out; bytes that are not UTF-8
    are counted and replaced. The same command again goes on where it was stopped; the result is the same for any number
    of processes.

    Args:
        sources: Files, folders, or hf:NAME.
        tokenizer: bytes, mistral (the paper's), a folder or tokenizer.json, gsa-tiny, or a name on the Hugging Face
            Hub.
        out: Folder to write, new or one that was begun with the same command.
        field: Where the text is in a row of .jsonl, .parquet or a dataset.
        chat_field: Where a conversation is in a row of .jsonl, e.g. messages: a list of messages with role and
            content, of which the last is the assistant's. The tokenizer's chat template tells it; names of special
            tokens within messages are only text. Rows without this field are text.
        exclude: Patterns of files and folders to leave out, with commas between, e.g. '*.log,drafts,books/a.txt'. They
            are compared with names, and with paths below the source or as given. Each has to fit a file.
        max_tokens: Tokens after which it ends, a little later: with the portion of about a megabyte in which they are
            reached; all by default.
        holdout: Documents to keep from training and evaluate on: a share as in 1%, or a number as in 5. They are the
            same each time, and go to the folder `heldout` within, which `gsa train` finds by itself.
        processes: How many processes encode; all cores by default.
        shard_tokens: Tokens in a shard; at least 65536.
        strict: End at the first row that cannot be read, or byte that is not UTF-8, and say where it is.
        json: Print what was made as JSON.
    """
    from gsa.data.prepare import prepare as run
    from gsa.errors import GSAError

    if shard_tokens < MIN_SHARD_TOKENS:
        raise GSAError(f"data: shard_tokens must be at least {MIN_SHARD_TOKENS}, got {shard_tokens}")
    manifest = run(
        sources,
        tokenizer,
        out,
        field=field,
        processes=processes,
        shard_tokens=shard_tokens,
        exclude=_patterns(exclude),
        max_tokens=max_tokens,
        strict=strict,
        holdout=holdout,
        chat_field=chat_field,
    )
    if json:
        print(json_module.dumps(_summary(manifest, out), indent=2))


def check(folder: str, json: bool = False) -> None:
    """Reads every byte of a prepared folder and compares it with what was written, the tokenizer too.

    What was held out is read as well.

    Args:
        folder: A folder that `gsa data prepare` wrote.
        json: Print what is in it as JSON.
    """
    from gsa.data.holdout import HELDOUT
    from gsa.data.report import problems
    from gsa.data.shards import Tokens

    tokens = Tokens.open(folder)
    tokens.verify()
    held_out = Path(folder) / HELDOUT
    if held_out.is_dir():
        Tokens.open(held_out).verify()
    if json:
        print(json_module.dumps(_summary(tokens.manifest, folder), indent=2))
        return
    counts = f"{tokens.length:,} tokens in {tokens.documents:,} documents"
    print(f"{folder}: whole; {counts}, tokenizer {tokens.tokenizer.name}")
    for line in problems(tokens.manifest):
        print(line)


def chats(
    model: str,
    questions: list[str],
    *,
    out: str,
    tokens: int,
    field: str = "question",
    system: str | None = None,
    shortest: int = 600,
    longest: int = 1600,
    answer_tokens: int = 150,
    follow_ups: float = 0.3,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
    weights: Weights = "auto",
    compute: Compute = "auto",
    device: str = "auto",
    batch_size: int = 16,
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Lets a model answer questions in conversations of several turns, and writes them for `gsa data prepare`.

    The model needs a chat template. Each row of the file is a conversation, which `gsa data prepare --chat-field
    messages` turns into the tokens that the model has read and said. The same command again goes on where it was
    stopped, and gives the same file however often that was; with more --tokens it goes on from what is there.

    Args:
        model: Folder of a model with its tokenizer, a run, or a name of the Hugging Face Hub (owner/name).
        questions: Text files with a question in each line, or files with one in each row, as for `gsa data prepare`.
        out: The file to write (.jsonl), new or one that was begun with the same command.
        tokens: Tokens after which it ends, with the conversation that reaches them.
        field: Where the question is in a row of .jsonl or .parquet.
        system: What the model is told before a conversation; what its template says by default.
        shortest: Tokens of the shortest conversations. Each has a length between the two, drawn by chance, and
            ends with the answer that reaches it.
        longest: Tokens of the longest, but for the end of their last answer.
        answer_tokens: An answer that is longer ends with its sentence, and at twice as many tokens at the latest.
        follow_ups: Share of later messages that ask on about the last answer; the others are new questions.
        temperature: Below 1 likely tokens become likelier; 0 always takes the likeliest.
        top_p: Choose among the likeliest tokens that have this probability together.
        seed: Of all random choices.
        weights: Format of the weights in memory; auto is int8 on a CPU, where it is several times as fast as fp32.
        compute: What prompts are computed in; auto is the format of the weights where the CPU has a unit for such
            products, else fp32.
        device: Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one.
        batch_size: Conversations that are held at once.
        threads: Threads of torch; its own choice by default.
        json: Print what was written as JSON.
    """
    from gsa.console import tell
    from gsa.data.questions import read_questions
    from gsa.eval.progress import Progress
    from gsa.files import named
    from gsa.infer.conversation_file import ConversationFile
    from gsa.infer.conversations import ChatSettings
    from gsa.infer.model import chosen_device
    from gsa.infer.text import TextEngine
    from gsa.options import check_count
    from gsa.threads import use_threads

    settings = ChatSettings(
        seed=seed,
        system=system,
        shortest=shortest,
        longest=longest,
        answer_tokens=answer_tokens,
        follow_ups=follow_ups,
        temperature=temperature,
        top_p=top_p,
    )
    check_count("chats: tokens", tokens)
    path, asked = named(out, "chats"), read_questions(questions, field, tell)
    use_threads(threads)
    if weights == "auto" and chosen_device(device, weights, compute).type == "cpu":
        weights = "int8"
    engine = TextEngine.load(model, weights, compute=compute, device=device, batch_size=batch_size)
    try:
        with (
            ConversationFile(path, engine, asked, settings) as file,
            Progress(tokens - file.tokens, "tokens of conversations") as progress,
        ):
            for conversation in file.extend(tokens):
                progress.advance(conversation.tokens)
    except KeyboardInterrupt:
        tell(f"{out}: conversations so far; the same command goes on from there")
        raise
    if json:
        written = {"file": out, "conversations": file.conversations, "tokens": file.tokens}
        print(json_module.dumps(written, indent=2))
    else:
        print(f"{out}: {file.conversations:,} conversations, {file.tokens:,} tokens")


def train_tokenizer(
    sources: list[str],
    *,
    vocab_size: int,
    out: str,
    field: str = "text",
    exclude: str = "",
    limit_bytes: int | None = None,
) -> None:
    """Learns a tokenizer from text: byte-level BPE, which gives back any text as it was.

    Sources are those of `gsa data prepare`. The same text gives the same tokenizer.

    Args:
        sources: Files, folders, or hf:NAME.
        vocab_size: Number of tokens, bytes and end of text among them; at least 257, at most 1048576.
        out: Folder to write tokenizer.json to, as transformers reads it.
        field: Where the text is in a row of .jsonl, .parquet or a dataset.
        exclude: Patterns of files and folders to leave out, with commas between, as for `gsa data prepare`.
        limit_bytes: End the reading after so many bytes of text.
    """
    from gsa.data.tokenizer_train import train_tokenizer as run

    tokenizer = run(
        sources,
        vocab_size,
        out,
        field=field,
        limit_bytes=limit_bytes,
        exclude=_patterns(exclude),
    )
    print(f"{out}: {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint[:12]}")


def _patterns(text: str) -> list[str]:
    return [pattern.strip() for pattern in text.split(",") if pattern.strip()]


def _summary(manifest: Any, out: str) -> dict[str, Any]:
    """What a machine wants to know of a manifest: all but the shards one by one."""
    from dataclasses import asdict

    values = asdict(manifest)
    return {"folder": out, **values, "shards": len(manifest.shards)}
