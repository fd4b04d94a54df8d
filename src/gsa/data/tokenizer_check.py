"""What a tokenizer.json may ask of the library that runs it, which is checked before.

The library can be made to run for ever, to take all memory and abort, or to panic: by steps that each double a text,
or by expressions whose search explodes. How much the steps of a file can lengthen a text follows from the file.
Expressions are tried out, in a helper process with limits, on texts that bring out the bad ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from multiprocessing.connection import Connection
from typing import Any

from gsa.errors import GSAError
from gsa.helper import Helper, HelperEnded, ended_after

MAX_BYTES = 2**27
"""Of a file; the largest vocabularies take a quarter of it."""
MAX_IDS = 2**24
"""Ids of a vocabulary; the largest have a million."""
MAX_STEPS = 100
"""Parts of a normalizer, pre-tokenizer or decoder; usual ones have up to ten."""
MAX_GROWTH = 64
"""How many times as long these may make a text; usual ones double it."""
MAX_WORD = 1000
"""Characters of a word that WordPiece looks at; usual files have 100."""
SECONDS, MEMORY = 10.0, 2**30
"""Limits of a trial, which usually takes a tenth of a second."""
GROWS = {"ByteLevel": 4, "Metaspace": 2}
"""Steps that make a text longer whatever they are given, by how much."""
STAGES = ("normalizer", "pre_tokenizer", "decoder")
WORDS = "|".join(
    (
        r" ?[\p{L}\p{M}]+",  # a word with the space before it
        r"'\p{L}{1,2}(?!\p{L})",  # the end of a contraction
        r" ?\p{N}",  # each digit by itself: numbers are spelt the same wherever they stand
        r" ?[^\s\p{L}\p{M}\p{N}]+",  # signs
        r"\s*\n+",  # line ends with the white space before them
        r"\s+(?!\S)",  # white space, but for the space that belongs to a word
        r"\s+",
    )
)
"""What tokens never reach across. Every character fits one of these."""
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_TRIED = (_LLAMA_3, _LLAMA_3.replace("{1,3}", ""))
"""Expressions of many files, Llama 3's and Qwen 2's, that need no trial."""


def check_tokenizer(name: str, text: str) -> None:
    """Raises for the text of a tokenizer.json that could hang or abort the process it is used in."""
    if len(text) > MAX_BYTES:
        raise GSAError(f"tokenizer: {name} has {len(text):,} characters, expected {MAX_BYTES:,} at most")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GSAError(f"tokenizer: {name}: not a tokenizer.json that `tokenizers` reads: {error}") from None
    if not isinstance(content, dict):
        raise GSAError(f"tokenizer: {name}: not a tokenizer.json that `tokenizers` reads: it is no JSON object")
    model = content.get("model")
    word = model.get("max_input_chars_per_word", 0) if isinstance(model, dict) else 0
    if type(word) is int and word > MAX_WORD:  # the library tries all parts of a word
        raise GSAError(f"tokenizer: {name}: max_input_chars_per_word is {word:.3g}, expected {MAX_WORD} at most")
    stages = {stage: content.get(stage) for stage in STAGES}
    for stage, part in stages.items():
        try:
            steps = [*_steps(part)]
        except RecursionError:
            raise GSAError(f"tokenizer: {name}: its {stage} is nested too deeply") from None
        if len(steps) > MAX_STEPS:
            raise GSAError(f"tokenizer: {name}: its {stage} has {len(steps)} steps, expected {MAX_STEPS} at most")
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise GSAError(
                    f"tokenizer: {name}: its {stage} could make a text more than {MAX_GROWTH} times as long, "
                    f"with {step.get('type')} as one of its steps"
                )
    tried = [stage for stage, part in stages.items() if any(_must_be_tried(step) for step in _steps(part))]
    if tried:
        _try(name, stages, " and ".join(tried))


@contextmanager
def panics_told(name: str) -> Iterator[None]:
    """Around a call of the library: a panic of it, which is no Exception, becomes a sentence."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GSAError(f"tokenizer: {name}: its library failed: {str(error)[:200]}") from None


def _steps(node: Any) -> Iterator[dict[str, Any]]:
    """The steps of a stage one by one, those of sequences among them."""
    if isinstance(node, list):
        for entry in node:
            yield from _steps(entry)
    elif isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _steps(value) if isinstance(value, list) else ()


def _growth(step: dict[str, Any]) -> float:
    """How many times as long a step may make a text of one character or more."""
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") == "Replace" and isinstance(content, str):
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1.0, len(content) / len(literal)) if isinstance(literal, str) and literal else 1.0 + len(content)
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend")))
    return GROWS.get(str(step.get("type")), 1)


def _must_be_tried(step: dict[str, Any]) -> bool:
    """Whether what a step does cannot be told from the file."""
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    return step.get("type") == "Precompiled" or expression not in (None, WORDS, *_TRIED)


def _try(name: str, stages: dict[str, Any], tried: str) -> None:
    """Raises unless the stages of a tokenizer take the probes within the limits."""
    helper = Helper("gsa.data.tokenizer_check:serve", memory=MEMORY)
    try:
        reason = helper.ask(json.dumps(stages).encode(), SECONDS).decode()
    except HelperEnded as error:
        reason = str(error)
    finally:
        helper.end()
    if reason:
        raise GSAError(f"tokenizer: {name}: its {tried} cannot be used; tried out on short texts: {reason}")


def serve(connection: Connection[Any, Any]) -> None:
    """What the helper does: stages of a tokenizer come, what is wrong with them goes, or nothing."""
    connection.send_bytes(b"")  # ready
    stages = json.loads(connection.recv_bytes())
    try:
        with ended_after(SECONDS):
            reason = _tried(stages)
    except BaseException as error:
        reason = f"{str(error) or type(error).__name__}"
    connection.send_bytes(reason[:300].encode("utf-8", "replace"))


def _tried(stages: dict[str, Any]) -> str:
    from tokenizers import Tokenizer

    probes = [*_probes(stages)]
    # A vocabulary of its own: that of the file may take a second to read, and has no part in this.
    model = {"type": "WordLevel", "vocab": {probe: i for i, probe in enumerate(dict.fromkeys(["?", *probes]))}}
    run = Tokenizer.from_str(json.dumps({"version": "1.0", **stages, "model": {**model, "unk_token": "?"}}))
    for i, probe in enumerate(probes, 1):
        run.encode(probe, add_special_tokens=False)
        longest = len(run.normalizer.normalize_str(probe)) if run.normalizer is not None else 0
        longest = max(longest, len(run.decode([i, i], skip_special_tokens=False)) // 2)
        if longest > MAX_GROWTH * len(probe):
            return f"a text of {len(probe)} characters became one of {longest:,}"
    return ""


def _probes(stages: dict[str, Any]) -> Iterator[str]:
    """Runs of letters of all kinds, and of those that expressions name: what makes bad expressions try all splits."""
    letters = ["a", "A", "1", " ", "\n", "\t", "-", "'", ".", "é", "中", "\u0301", "😀"]
    named = [step["pattern"]["Regex"] for part in stages.values() for step in _steps(part) if _has_expression(step)]
    letters += sorted({letter for expression in named for letter in expression})[:100]
    for letter in dict.fromkeys(letters):
        for length in (24, 2000):
            yield letter * length
            yield letter * length + "\x00"
    for pair in ("a ", "aA", "a1", " \n", "a-", "aé", "it's "):
        yield pair * 1000
    for first, second in permutations([letter for letter in letters if letter.isalnum()][:16], 2):
        yield (first + second) * 200
    yield "The quick brown fox jumps over the lazy dog; it's done so 1,234 times since 1885. " * 20


def _has_expression(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern")
    return isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str)
