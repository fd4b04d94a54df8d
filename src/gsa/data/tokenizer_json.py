"""Tokenizers that are a tokenizer.json: Hugging Face's, and those that are trained or converted here."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa.data.optional import first_line, hub_failures
from gsa.data.tokenizer import (
    BESIDE,
    CONFIG,
    END_OF_TEXT,
    JSON,
    TEMPLATE,
    Tokenizer,
    checked_ids,
    fingerprint_of,
    padding,
    pieces,
    read_template,
    utf8,
)
from gsa.data.tokenizer_check import MAX_IDS, check_tokenizer, panics_told
from gsa.errors import GSAError
from gsa.extras import require
from gsa.files import read_json

GROUP_CHARACTERS = 1 << 18
"""Characters that `tokenizers` encodes in one call: its result takes about a hundred times as much memory."""
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")


class JsonTokenizer(Tokenizer):
    """What a tokenizer.json describes, run by `tokenizers`."""

    def __init__(self, name: str, text: str, config: dict[str, Any], eos_id: int, chat_template: str | None = None):
        content = json.loads(text)
        # Dropout leaves out merges at random: the same text would get other ids each time.
        if content["model"].get("dropout") is not None:
            content["model"]["dropout"] = None
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        self.name, self._text, self._config, self.eos_id = name, text, config, eos_id
        self._chat_template = chat_template
        self._run = _runner(name, text)
        self.vocab_size = max(self._run.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_IDS:
            raise GSAError(
                f"tokenizer: {name}: its ids go up to {self.vocab_size - 1:,}, expected 0 to {MAX_IDS - 1:,}"
            )
        self.adds_tokens = self._run.num_special_tokens_to_add(False) > 0
        """Whether transformers puts special tokens around every text."""
        without_prefix = _without_prefix(content)
        self._run_on = self._run if without_prefix == content else _runner(name, json.dumps(without_prefix))
        self.fingerprint = fingerprint_of(content, eos_id)

    @classmethod
    def read(cls, name: str, path: Path, text: str) -> JsonTokenizer:
        """A tokenizer from the text of tokenizer.json; the files beside it say which token ends a text."""
        config = read_json(path.with_name(CONFIG)) if path.with_name(CONFIG).exists() else {}
        check_tokenizer(name, text)
        runner, content = _runner(name, text), json.loads(text)
        _check_added(path, runner, content)
        _check_config(path, runner, content, config)
        eos_id = _end_of_text(path, runner, config)
        return cls(name, text, config, eos_id, read_template(path.parent))

    def encode(self, texts: Sequence[str], *, continues: bool = False) -> list[NDArray[Any]]:
        results: list[list[NDArray[Any]]] = [[] for _ in texts]
        groups: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        waiting = 0
        for i, text in enumerate(texts):
            for number, piece in enumerate(pieces(text)):
                groups[number > 0 or (continues and i == 0)].append((i, piece))
                waiting += len(piece)
                if waiting > GROUP_CHARACTERS:
                    self._flush(groups, results)
                    waiting = 0
        self._flush(groups, results)
        return [np.concatenate(parts) if parts else np.empty(0, self.dtype) for parts in results]

    def _flush(self, groups: dict[bool, list[tuple[int, str]]], results: list[list[NDArray[Any]]]) -> None:
        # The first piece of a text is in the first group, its others in the second: so they stay in order.
        for continues, group in groups.items():
            if not group:
                continue
            run = self._run_on if continues else self._run
            try:
                with panics_told(self.name):
                    encoded = run.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            except TypeError:
                for _, piece in group:
                    utf8(piece)
                raise
            for (i, _), encoding in zip(group, encoded, strict=True):
                results[i].append(np.array(encoding.ids, self.dtype))
            group.clear()

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        checked = checked_ids(ids, self.vocab_size).tolist()
        with panics_told(self.name):
            return self._run.decode(checked, skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        end = self._run.id_to_token(self.eos_id)
        config = {key: value for key, value in self._config.items() if key != "auto_map"}
        if config.get("pad_token") is None:
            config |= padding(end)
        config |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "split_special_tokens": True,  # as here: text is only text
        }
        beside = {} if self._chat_template is None else {TEMPLATE: self._chat_template}
        return {JSON: self._text, CONFIG: json.dumps(config, indent=2) + "\n", **beside}


def _runner(name: str, text: str) -> Any:
    require("tokenizers", f"tokenizer: {name}")
    from tokenizers import Tokenizer as Runner

    try:
        with panics_told(name):
            runner = Runner.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # the package raises nothing narrower
            raise
        raise GSAError(f"tokenizer: {name}: not a tokenizer.json that `tokenizers` reads: {error}") from None
    runner.encode_special_tokens = True
    runner.no_truncation()
    runner.no_padding()
    return runner


def _without_prefix(content: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without the space that some put in front of a text: for what goes on from a cut."""
    content = copy.deepcopy(content)

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(entry) for entry in node if not (isinstance(entry, dict) and entry.get("type") == "Prepend")]
        if isinstance(node, dict):
            node = {key: visit(value) for key, value in node.items()}
            if node.get("type") == "Metaspace":
                node |= {"prepend_scheme": "never", "add_prefix_space": False}
            elif node.get("type") == "ByteLevel":
                node["add_prefix_space"] = False
        return node

    for part in ("normalizer", "pre_tokenizer"):
        content[part] = visit(content.get(part))
        if isinstance(content[part], dict) and content[part].get("type") == "Prepend":
            content[part] = None
    return content


def _check_added(path: Path, runner: Any, content: dict[str, Any]) -> None:
    """Raises if `tokenizers` gives an added token another id than the file does: what else reads the file would differ.

    It does that where ids are left out, where a name has an id already, and with a name that is empty.
    """
    for token in content.get("added_tokens", ()):
        found = runner.token_to_id(token["content"])
        if found != token["id"]:
            given = "none" if found is None else f"id {found}"
            raise GSAError(
                f"tokenizer: {path}: the added token {token['content']!r} has id {token['id']}, `tokenizers` gives it "
                f"{given}; the ids of added tokens must go on from the vocabulary without a gap, and names be unique"
            )


def _check_config(path: Path, runner: Any, content: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises if the file beside tokenizer.json would have transformers give other ids than tokenizer.json says."""
    prefix, says = _has_prefix(content), config.get("add_prefix_space")
    differ = []
    if isinstance(says, bool) and prefix is not None and prefix != says:
        differ.append("add_prefix_space")
    there = runner.get_added_tokens_decoder()
    added = config.get("added_tokens_decoder")
    for id_, token in added.items() if isinstance(added, dict) else ():
        known = there.get(int(id_)) if str(id_).isdecimal() and isinstance(token, dict) else None
        if known is None or known.content != token.get("content"):
            differ.append(f"added token {id_}")
        elif not (known.special and token.get("special")):  # how special ones are found in text is of no concern
            flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
            if any(flag in token and token[flag] != getattr(known, flag) for flag in flags):
                differ.append(f"added token {token['content']!r}")
    if differ:
        raise GSAError(
            f"tokenizer: {path.parent}: {CONFIG} and {path.name} do not say the same ({', '.join(differ[:5])}); load "
            "it with transformers and save it, which puts all into both"
        )


def _has_prefix(content: dict[str, Any]) -> bool | None:
    """Whether a tokenizer puts a space in front of a text; None if it has no part that could."""
    found: list[bool] = []

    def visit(node: Any) -> None:
        for entry in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
            visit(entry)
        kind = node.get("type") if isinstance(node, dict) else None
        if kind == "ByteLevel":
            found.append(bool(node.get("add_prefix_space")))
        elif kind == "Metaspace":
            found.append(node.get("prepend_scheme", "always") != "never")
        elif kind == "Prepend":
            found.append(True)

    visit([content.get("normalizer"), content.get("pre_tokenizer")])
    return any(found) if found else None


def _end_of_text(path: Path, runner: Any, config: dict[str, Any]) -> int:
    """The id of the token that ends a text: as the files beside tokenizer.json say, else a known name."""
    for values in (config, *(_beside(path, name) for name in BESIDE[:3])):
        token = values.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found = runner.token_to_id(content)
            if found is None:
                raise GSAError(f"tokenizer: {path.parent} names {content!r} as eos_token, which is not in {path.name}")
            return int(found)
        number = values.get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and runner.id_to_token(number) is not None:
            return number
    special = {token.content: id_ for id_, token in runner.get_added_tokens_decoder().items() if token.special}
    known = [special[token] for token in KNOWN_ENDS if token in special]
    if len(known) != 1:
        raise GSAError(
            f"tokenizer: {path} does not say which token ends a text; put a {CONFIG} with eos_token beside it "
            f"(special tokens: {', '.join(special) or 'none'})"
        )
    return int(known[0])


def _beside(path: Path, name: str) -> dict[str, Any]:
    return read_json(path.with_name(name)) if path.with_name(name).exists() else {}


def downloaded(name: str) -> Path:
    """The folder of a tokenizer of the Hugging Face Hub, from the cache or fetched now."""
    require("huggingface_hub", f"tokenizer: {name}, which is no file, folder or name of the package,")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, JSON), str):
            # One request without the retries of a download, so that a wrong name is an error at once.
            get_hf_file_metadata(hf_hub_url(name, JSON), timeout=10)
        found = Path(hf_hub_download(name, JSON))
    except hub_failures() as error:
        raise GSAError(
            f"tokenizer: {name!r} is neither `bytes` nor `mistral`, there is no such file or folder, and {JSON} of "
            f"that name could not be fetched from the Hugging Face Hub: {first_line(error)}"
        ) from None
    for beside in (CONFIG, *BESIDE):
        try:
            hf_hub_download(name, beside)
        except hub_failures():
            continue  # not every tokenizer has every file; without any, end of text is looked for by its known names
    return found.parent
