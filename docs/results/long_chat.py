"""One conversation of 20,000 tokens: does a model keep its rate, its memory and its head?

    python docs/results/long_chat.py gsa-smol docs/results/long_chat/gsa-smol.json
    python docs/results/long_chat.py TEACHER_FOLDER docs/results/long_chat/smollm2.json --tokens 8192
    python docs/results/long_chat.py --draw docs/results/long_chat/*.json

The first two write what was said, beside it as Markdown, and for every turn: where it began, tokens a second, bytes of
the state, whether the answer ended by itself, and how many of its words repeat themselves in fours. The third draws a
chart of them. Nothing is told to the model but the questions, which are the same for all. A teacher is asked no further
than its context reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gsa.chart import picture
from gsa.console import tell
from gsa.files import written
from gsa.infer.chat import Chat
from gsa.infer.text import TextEngine
from gsa.sampling import Sampling

TOPICS = """the sea|a volcano|honey bees|the printing press|the Moon|bread|bridges|the violin|tea|glaciers|owls|maps
rivers|clocks|the human heart|chess|rain|paper|lighthouses|the Silk Road|whales|gardens|electricity|mountains|coffee
libraries|wolves|the compass|opera|salt|the desert|trains|butterflies|poetry|wine|the telescope|forests|sleep|castles
horses|the wheel|vaccines|snow|theatre|gold|the alphabet|coral reefs|bicycles|cheese|stars""".replace("\n", "|").split(
    "|"
)
ASKED = (
    "Tell me about {}.",
    "Why does that matter to people? Answer in two sentences.",
    "Write a short story about {}.",
    "Give me three tips for someone who wants to learn more about {}.",
)
LONGEST = 150
ADVISED = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""As `gsa-smol` is sampled from unless asked otherwise; its teacher, whose file advises nothing, likewise."""


def talked(name: str, tokens: int, weights: str, seed: int) -> dict[str, Any]:
    """A conversation that goes on until so many tokens were read and written."""
    engine = TextEngine.load(name, device="cpu", weights=weights)
    chat = Chat(engine, Sampling(max_tokens=LONGEST, **ADVISED, seed=seed))
    turns, began = list[dict[str, Any]](), time.time()
    while chat.state is None or chat.state.tokens < tokens:
        topic = TOPICS[len(turns) // len(ASKED) % len(TOPICS)]
        question = ASKED[len(turns) % len(ASKED)].format(topic)
        begin = 0 if chat.state is None else chat.state.tokens
        first = last = time.perf_counter()
        said, count, reason = "", 0, None
        for piece in chat.reply(question):
            if piece.token is not None:
                last = time.perf_counter()
                first, count = (last if count == 0 else first), count + 1
            said, reason = said + piece.text, piece.reason or reason
        assert chat.state is not None
        turns.append(
            {
                "position": begin,
                "question": question,
                "answer": said,
                "tokens": count,
                "tokens_per_second": (count - 1) / (last - first) if count > 1 else None,
                "state_bytes": chat.state.nbytes,
                "ended": reason == "stop",
                "repeated": repeated(said),
            }
        )
        tell(f"{len(turns)} turns, {chat.state.tokens:,} of {tokens:,} tokens")
    return {
        "model": Path(name).name,
        "weights": engine.engine.model.weights,
        "sampling": ADVISED,
        "seed": seed,
        "seconds": round(time.time() - began),
        "turns": turns,
    }


def repeated(text: str) -> float:
    """The share of runs of four words that stand in a text more than once."""
    words = text.split()
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(fours)) / len(fours) if fours else 0.0


def transcript(report: dict[str, Any]) -> str:
    """What was said, as Markdown."""
    lines = [
        f"# A conversation with {report['model']}",
        "",
        "Nothing is left out; an answer has at most 150 tokens.",
        "",
    ]
    for turn in report["turns"]:
        lines += [f"**{turn['question']}** *(token {turn['position']:,})*", "", turn["answer"].strip(), ""]
    return "\n".join(lines)


def draw(reports: list[dict[str, Any]], place: Path) -> None:
    """Rate and memory against the length of the conversation."""
    with picture(place, rows=2, size=(7, 6)) as (rates, memory):
        for report in reports:
            positions = [turn["position"] for turn in report["turns"]]
            rates.plot(positions, [turn["tokens_per_second"] for turn in report["turns"]], label=report["model"])
            memory.plot(positions, [turn["state_bytes"] / 2**20 for turn in report["turns"]], label=report["model"])
        rates.set_ylabel("tokens a second")
        memory.set_ylabel("MB of state or cache")
        memory.set_xlabel("tokens of the conversation")
        for axes in (rates, memory):
            axes.set_ylim(bottom=0)
            axes.legend()


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("given", nargs="+", metavar="MODEL OUT | FILE", help="a model and a file, or files with --draw")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    if options.draw:
        files = [Path(name) for name in options.given]
        draw([json.loads(path.read_text()) for path in files], files[0].parent / "chart.png")
        return
    model, out = options.given
    report = talked(model, options.tokens, options.weights, options.seed)
    place = Path(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    with written(place) as file:
        file.write_text(json.dumps(report, indent=1) + "\n")
    with written(place.with_suffix(".md")) as file:
        file.write_text(transcript(report))


if __name__ == "__main__":
    main(sys.argv[1:])
