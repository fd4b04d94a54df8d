"""The text that Transformers are distilled on here, and what is held out from it.

    python docs/results/distill_corpus.py --data data --tokenizer teacher --out distill

`data` has gutenberg.tar.gz, squad_dev_v1.1.json.gz, and in eval/ Qasper, QMSum, NQ and TriviaQA; `teacher` is a folder
with the teacher's tokenizer, as `gsa convert MODEL teacher --to attention` makes it. It writes

- `train-text/`: tokens of books, papers and meetings, and `train-text.jsonl`, the same as text;
- `heldout-book/` and `moby.txt`: a book of an author that is not in them;
- `heldout-squad/` and `squad.txt`: a quarter of SQuAD's articles, a document each;
- `questions.txt`: what `gsa data chats` asks the teacher.

    gsa data chats teacher distill/questions.txt --out distill/chats.jsonl --tokens 1e6
    python docs/results/distill_corpus.py ... --chats distill/chats.jsonl

writes `train/` too: these conversations, each up to where an answer goes in circles, and as much of the text as leaves
them a share of 35%.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gsa.data.chat_template import ChatTemplate
from gsa.data.prepare import prepare
from gsa.data.tokenizer import Tokenizer, load_tokenizer
from gsa.data.writer import write_text
from gsa.table import Column, Table

SEED = 20
BOOKS = (
    *("austen-emma", "austen-persuasion", "austen-sense", "bryant-stories", "burgess-busterbrown"),
    *("chesterton-ball", "chesterton-brown", "chesterton-thursday", "edgeworth-parents"),
)
"""Prose. Carroll and Melville are held out; verse, plays and the Bible are left out."""
HELD_OUT = "melville-moby_dick"
PART = 100_000
"""Characters of a book that are one document: long, and short enough that a mix can be drawn from them."""
PAPERS = 2_200_000
"""Characters of papers, about half a million tokens."""
HELD_OUT_ARTICLES = 12
QUESTIONS = 12_000
CHAT_SHARE = 0.35
SHORTEST_CHAT = 300
"""Tokens."""

Row = dict[str, Any]

TASKS = (
    "Explain {} in simple terms.",
    "Write a short story about {}.",
    "Write a letter to a friend about {}.",
    "List five interesting facts about {}.",
    "Write a short poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me a short summary of what you know about {}.",
    "I have to give a talk about {}. How should I begin?",
    "Write a dialogue between a teacher and a student about {}.",
    "Describe {} to a child.",
    "Compare {} and {}.",
    "Plan a lesson about {}.",
    "Write a newspaper article about {}.",
    "Why is {} important?",
)
EVERYDAY = (
    *("gravity", "the water cycle", "photosynthesis", "volcanoes", "the solar system", "the Roman Empire", "democracy"),
    *("bread", "bicycles", "learning a language", "a rainy day", "the sea", "a lost dog", "cooking rice", "chess"),
    *("writing good emails", "saving money", "sleep", "time management", "gardening", "a job interview", "friendship"),
    *("recycling", "electric cars", "machine learning", "fractions", "the human heart", "music", "bees", "trains"),
    *("a walk in the forest", "Python programming", "healthy food", "an old house", "a trip to Paris", "winter"),
)


def books(data: Path) -> dict[str, str]:
    """The books by name, a paragraph on a line."""
    with tarfile.open(data / "gutenberg.tar.gz") as archive:
        found = {Path(member.name).stem: member for member in archive.getmembers() if member.isfile()}
        texts = {}
        for name in (*BOOKS, HELD_OUT):
            file = archive.extractfile(found[name])
            assert file is not None
            texts[name] = unwrapped(file.read().decode("latin-1"))
    return texts


def unwrapped(text: str) -> str:
    """The same text with a line for each paragraph; verse, whose lines are indented, stays as it is."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip("\n"))
    joined = [
        paragraph if re.search(r"^[ \t]{2,}\S", paragraph, re.M) else " ".join(paragraph.split())
        for paragraph in paragraphs
    ]
    return "\n\n".join(joined) + "\n"


def parts(text: str, size: int = PART) -> Iterator[str]:
    """A long text in pieces of about one size, cut between paragraphs."""
    pieces, begin = max(1, round(len(text) / size)), 0
    for piece in range(1, pieces + 1):
        end = len(text) if piece == pieces else text.index("\n\n", len(text) * piece // pieces) + 2
        yield text[begin:end]
        begin = end


def papers(data: Path, chance: random.Random) -> list[str]:
    """Papers of Qasper whose formulae were not replaced by placeholders, without marks of references."""
    texts = sorted({row["text"] for row in rows(data / "eval" / "qasper_yesno.validation.jsonl.gz")})
    whole = [text for text in texts if "INLINEFORM" not in text and "DISPLAYFORM" not in text]
    chance.shuffle(whole)
    chosen, size = [], 0
    for text in whole:
        chosen.append(re.sub(r" ?\b(BIB|FIG|TAB|SEC|UID)REF\d+", "", text))
        size += len(text)
        if size > PAPERS:
            break
    return chosen


def meetings(data: Path) -> list[str]:
    """Meetings of QMSum, a turn on a line, without marks of noises and with the spaces of written text."""
    texts = []
    for row in rows(data / "eval" / "qmsum.validation.jsonl.gz"):
        turns = ((turn["speaker"], spoken(turn["content"])) for turn in row["meeting_transcripts"])
        texts.append("".join(f"{speaker}: {said}\n" for speaker, said in turns if said))
    return texts


def spoken(text: str) -> str:
    """What was said, as one would write it."""
    plain = " ".join(re.sub(r"\{\w+\}", " ", text).split())
    plain = re.sub(r" ([.,?!;:])", r"\1", plain)
    plain = re.sub(r" ('(s|re|ve|ll|m|d|t)\b)", r"\1", plain)
    return plain if re.search(r"\w", plain) else ""


def articles(data: Path) -> list[tuple[str, list[str], list[str]]]:
    """SQuAD's articles: title, paragraphs, questions."""
    with gzip.open(data / "squad_dev_v1.1.json.gz", "rt") as file:
        found = json.load(file)["data"]
    return [
        (
            article["title"].replace("_", " "),
            [paragraph["context"].strip() for paragraph in article["paragraphs"]],
            [" ".join(each["question"].split()) for paragraph in article["paragraphs"] for each in paragraph["qas"]],
        )
        for article in found
    ]


def questions(data: Path, of_squad: list[str], chance: random.Random) -> list[str]:
    """Questions of three datasets, and a third as many tasks about what is named in them."""
    names = ("nq_open.validation.jsonl.gz", "triviaqa_wikipedia_nocontext.validation.jsonl.gz")
    asked = [of_squad, *([" ".join(row["question"].split()) for row in rows(data / "eval" / name)] for name in names)]
    asked = [[text.replace('""', '"').strip('"') for text in texts] for texts in asked]  # without CSV's quotes
    topics = [*EVERYDAY, *sorted(set(filter(None, map(topic, (text for texts in asked for text in texts)))))]
    drawn = [text for texts in asked for text in chance.sample(texts, min(len(texts), QUESTIONS // 4))]
    drawn += [task(chance, topics) for _ in range(QUESTIONS // 4)]
    chance.shuffle(drawn)
    return list(dict.fromkeys(drawn))


def topic(question: str) -> str | None:
    """What a question is about: two or three words in a row that begin with a capital, behind its first word."""
    found = re.search(r"(?<=\w )[A-Z][a-z]+(?: [A-Z][a-z]+){1,2}", question)
    return found[0] if found else None


def task(chance: random.Random, topics: list[str]) -> str:
    """A task about a topic, one time in three of everyday."""
    template = chance.choice(TASKS)
    pool = EVERYDAY if chance.random() < 1 / 3 else topics
    return template.format(*chance.sample(pool, template.count("{}")))


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            yield json.loads(line)


def conversations(path: Path, template: ChatTemplate) -> Iterator[Row]:
    """The teacher's conversations, each up to where an answer goes in circles, if that is long enough."""
    for row in rows(path):
        messages = row["messages"]
        circling = [
            i for i, message in enumerate(messages) if message["role"] == "assistant" and circles(message["content"])
        ]
        kept = messages[: circling[0] - 1] if circling else messages
        tokens = len(template.conversation(kept)) + 1 if kept else 0
        if tokens >= SHORTEST_CHAT:
            yield {"source": "chats", "messages": kept, "tokens": tokens}


def circles(text: str) -> bool:
    """Whether a text says most of what it says again: half of its groups of four words."""
    words = text.split()
    groups = list(zip(*(words[i:] for i in range(4)), strict=False))
    return len(groups) > 36 and len(set(groups)) < len(groups) / 2


def mixed(text: list[Row], chats: list[Row], chance: random.Random) -> list[Row]:
    """All conversations and as many documents of text as leave them their share, in a random order."""
    room = sum(row["tokens"] for row in chats) * (1 - CHAT_SHARE) / CHAT_SHARE
    chosen = []
    for row in chance.sample(text, len(text)):
        if row["tokens"] <= room:
            chosen.append(row)
            room -= row["tokens"]
    documents = [*chosen, *chats]
    chance.shuffle(documents)
    return documents


def write(out: Path, name: str, documents: Iterable[Row], tokenizer: Tokenizer) -> None:
    """A file of rows, and a folder of their tokens."""
    path = out / f"{name}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in documents))
    prepare([str(path)], tokenizer, out / name, chat_field="messages", processes=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--data", "--tokenizer", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--chats", nargs="+", default=[])
    options = parser.parse_args()
    data, out, tokenizer = Path(options.data), Path(options.out), load_tokenizer(options.tokenizer)
    out.mkdir(parents=True, exist_ok=True)

    chance, library, squad = random.Random(SEED), books(data), articles(data)
    moby = library.pop(HELD_OUT)
    moby = moby[moby.index("CHAPTER 1\n") :]  # behind a list of quotations
    held_out = chance.sample(squad, HELD_OUT_ARTICLES)
    text: list[Row] = [{"source": "books", "text": part} for book in library.values() for part in parts(book)]
    text += [{"source": "papers", "text": paper} for paper in papers(data, chance)]
    text += [{"source": "meetings", "text": meeting} for meeting in meetings(data)]
    for row, ids in zip(text, tokenizer.encode([row["text"] for row in text]), strict=True):
        row["tokens"] = len(ids) + 1  # with the end of text
    chance.shuffle(text)
    write(out, "train-text", text, tokenizer)
    write(out, "heldout-book", [{"source": "book", "text": moby}], tokenizer)
    as_documents = ["\n\n".join([title, *paragraphs]) + "\n" for title, paragraphs, _ in held_out]
    write(out, "heldout-squad", [{"source": "squad", "text": document} for document in as_documents], tokenizer)
    write_text(out / "moby.txt", moby)
    write_text(out / "squad.txt", "\n".join(as_documents))
    asked = [question for article in squad if article not in held_out for question in article[2]]
    write_text(out / "questions.txt", "".join(f"{question}\n" for question in questions(data, asked, chance)))
    if options.chats:
        template = ChatTemplate.of(tokenizer)
        chats = [row for name in options.chats for row in conversations(Path(name), template)]
        text = mixed(text, chats, chance)
        write(out, "train", text, tokenizer)
    counted = Counter[str]()
    for row in text:
        counted[row["source"]] += row["tokens"]
    columns = [Column("source", 0, left=True), Column("tokens", 1, "{:,}")]
    print(Table(str(out / ("train" if options.chats else "train-text")), columns, counted.most_common()).markdown())


if __name__ == "__main__":
    main()
