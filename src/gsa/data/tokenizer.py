"""Tokenizers: text to ids and back. Bytes are built in; the others are in `tokenizer_json.py`.

Text is only ever text: the name of a special token that stands in a document is encoded letter by letter, and ids
contain no special token that `encode` was not asked for. Long texts are encoded in pieces (see `pieces`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, AnyStr

import numpy as np
from numpy.typing import NDArray

from gsa import pretrained
from gsa.data.shards import TokenizerInfo, token_dtype
from gsa.errors import GSAError
from gsa.files import named, read_text

BUILT_IN = ("bytes", "mistral")
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
BESIDE = ("special_tokens_map.json", "generation_config.json", "config.json", TEMPLATE)
END_OF_TEXT = "<|endoftext|>"
PIECE_CHARACTERS = 1 << 14
"""Longest text, in characters, that is encoded in one go."""


class Tokenizer(ABC):
    """A map between text and ids 0 to vocab_size - 1.

    >>> tokenizer = load_tokenizer("bytes")
    >>> [ids.tolist() for ids in tokenizer.encode(["Hé", ""])]
    [[72, 195, 169], []]
    >>> tokenizer.decode([72, 195, 169, tokenizer.eos_id])
    'Hé<|endoftext|>'
    """

    name: str
    """As it was asked for."""
    vocab_size: int
    eos_id: int
    """End of text. `encode` never gives it."""
    fingerprint: str
    """A hash of what decides the ids: equal where the ids of every text are equal."""

    @property
    def info(self) -> TokenizerInfo:
        """What shards and checkpoints keep of a tokenizer."""
        return TokenizerInfo(self.name, self.fingerprint, self.vocab_size, self.eos_id)

    @property
    def dtype(self) -> str:
        """uint16 or uint32: what holds every id."""
        return token_dtype(self.vocab_size)

    @abstractmethod
    def encode(self, texts: Sequence[str], *, continues: bool = False) -> list[NDArray[Any]]:
        """The ids of each text, without end of text; the first text may go on from where an earlier one was cut."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of ids, special tokens included by name; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def files(self) -> dict[str, str]:
        """The files, by name, from which `transformers.AutoTokenizer` makes the same tokenizer."""

    def hashes(self) -> dict[str, str]:
        """The sha256 of each of these files."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.files().items()}

    def save(self, folder: str | Path) -> None:
        """Writes a folder that `load_tokenizer` and `transformers.AutoTokenizer` read."""
        from gsa.data.writer import write_text

        folder, files = Path(folder), self.files()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = [folder / name for name in files if not (folder / name).exists()]
            try:
                for name, text in reversed(files.items()):  # tokenizer.json last: with it, the folder is whole
                    write_text(folder / name, text)
            except BaseException:
                for path in new:
                    path.unlink(missing_ok=True)
                raise
        except FileExistsError:
            raise GSAError(f"tokenizer: {folder} is a file, expected a folder") from None
        except OSError as error:
            raise GSAError(f"tokenizer: {folder} cannot be written: {error.strerror}") from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, `mistral` (Mistral 7B's, the paper's), of a folder or tokenizer.json, of a model in the
    package (`gsa-tiny`), or of the Hub."""
    text, path = str(name), named(pretrained.path_of(name), "tokenizer")
    if text == "bytes":
        return BytesTokenizer()
    if text == "mistral":
        from gsa.data.tokenizer_mistral import mistral_tokenizer

        return mistral_tokenizer()
    if path.is_file() or path.is_dir():
        return _from_files(text, path)
    if path.is_absolute() or text.startswith(".") or text.count("/") > 1:
        raise GSAError(f"tokenizer: there is no file or folder {text}")
    from gsa.data.tokenizer_json import downloaded

    return _from_files(text, downloaded(text))


def tokenizer_paths(tokenizer: Tokenizer) -> list[Path]:
    """The folder that a tokenizer came from and its files, so that they are not taken for text."""
    path = Path(tokenizer.name)
    if tokenizer.name in BUILT_IN or not path.exists():
        return []
    folder = path if path.is_dir() else path.parent
    return [path, *(folder / name for name in (JSON, CONFIG, *BESIDE))]


def read_template(folder: Path) -> str | None:
    """The chat template that has a file of its own in a folder."""
    path = folder / TEMPLATE
    try:
        return read_text(path) if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise GSAError(f"tokenizer: {path} cannot be read: {error}") from None


def _from_files(name: str, path: Path) -> Tokenizer:
    from gsa.data.tokenizer_json import JsonTokenizer

    path = path / JSON if path.is_dir() else path
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise GSAError(f"tokenizer: {path.parent} has no {JSON}; save it with transformers' fast tokenizers") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GSAError(f"tokenizer: {path} cannot be read: {error}") from None
    as_bytes = BytesTokenizer(name)
    config = path.with_name(CONFIG)
    try:
        as_written = as_bytes.files() == {JSON: text, CONFIG: read_text(config)}
    except (OSError, UnicodeDecodeError):
        as_written = False
    if as_written:
        return as_bytes  # which needs no package to read
    tokenizer = JsonTokenizer.read(name, path, text)
    same = tokenizer.vocab_size == as_bytes.vocab_size and tokenizer.fingerprint == as_bytes.fingerprint
    if same and not tokenizer.adds_tokens:
        return as_bytes  # which is far faster
    return tokenizer


def fingerprint_of(content: dict[str, Any], eos_id: int) -> str:
    """A hash of what decides ids in the content of a tokenizer.json."""
    decides = {key: _canonical(content.get(key)) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    text = json.dumps([decides, eos_id], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(node: Any) -> Any:
    """The same content however it was written: absent, null and false are one, and so are both forms of merges."""
    if isinstance(node, dict):
        merges = node.get("merges")
        if isinstance(merges, list):
            node = {**node, "merges": [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]}
        return {key: _canonical(value) for key, value in node.items() if value is not None and value is not False}
    return [_canonical(entry) for entry in node] if isinstance(node, list) else node


class BytesTokenizer(Tokenizer):
    """Ids are the bytes of UTF-8; 256 is end of text."""

    vocab_size, eos_id = 257, 256

    def __init__(self, name: str = "bytes") -> None:
        self.name = name
        self.fingerprint = fingerprint_of(json.loads(self.files()[JSON]), self.eos_id)

    def encode(self, texts: Sequence[str], *, continues: bool = False) -> list[NDArray[Any]]:
        return [np.frombuffer(utf8(text), np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        values = checked_ids(ids, self.vocab_size)
        parts = np.split(values, np.flatnonzero(values == self.eos_id))
        texts = [part[part != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts]
        return END_OF_TEXT.join(texts)

    def files(self) -> dict[str, str]:
        # Byte-level tokenizers write each byte as a printable character: itself, or one from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.eos_id, "content": END_OF_TEXT, **special}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letters[byte]: byte for byte in range(256)} | {END_OF_TEXT: self.eos_id},
                "merges": [],
            },
        }
        return {JSON: json.dumps(content, indent=2, ensure_ascii=False) + "\n", CONFIG: config_text(eos=END_OF_TEXT)}


def config_text(*, eos: str, bos: str | None = None, unk: str | None = None) -> str:
    """A tokenizer_config.json with which transformers takes tokenizer.json as it stands, and text as text."""
    special = {"bos_token": bos, "eos_token": eos, "unk_token": unk, **padding(eos)}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in special.items() if token is not None},
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(values, indent=2) + "\n"


def padding(eos: str) -> dict[str, str]:
    """How transformers fills up texts of a batch: what stands at pads means nothing, and end of text is always there.

    On the left, since what is generated goes on at the right.
    """
    return {"pad_token": eos, "padding_side": "left"}


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text; raises for half a surrogate pair, which is no character."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GSAError(f"tokenizer: the text has half a surrogate pair at {error.start}, no character") from None


def checked_ids(ids: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """Ids as numbers within the vocabulary."""
    values = np.asarray(ids, dtype=np.int64).reshape(-1)
    if values.size and not (values.min() >= 0 and values.max() < vocab_size):
        raise GSAError(
            f"tokenizer: ids go from {values.min()} to {values.max()}, the vocabulary from 0 to {vocab_size - 1}"
        )
    return values


def pieces(text: str, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """A text cut into pieces of at most `limit` characters, always at the same places, which no token crosses.

    Encoders that treat a text as one word take time and memory out of proportion for long ones.
    """
    begin = 0
    while len(text) - begin > limit:
        cut = cut_before(text, begin, begin + limit, "\n", " ") or begin + limit
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def cut_before(text: AnyStr, begin: int, end: int, line_end: AnyStr, space: AnyStr) -> int:
    """Where to cut a text in the latter half of begin to end, or 0: at a line, if not at a word.

    After the last line end that no white space follows; where there is none, before the last space. There, nearly every
    tokenizer would have cut as well.
    """
    least = (begin + end + 1) // 2
    cut = text.rfind(line_end, least, end - 1)
    while cut >= 0 and text[cut + 1 : cut + 2].isspace():
        cut = text.rfind(line_end, least, cut)
    return cut + 1 if cut >= 0 else max(text.rfind(space, least, end), 0)
