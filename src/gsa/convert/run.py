"""convert: a pretrained Transformer becomes a model of ours, tensor by tensor, as a whole folder or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsa
from gsa.convert.calibrate import NORMED, STUDENTS, TOKENS, Calibration, Text, calibrate, pieces, text_of
from gsa.convert.card import card
from gsa.convert.mapping import Mapping, checked, map_tensors
from gsa.convert.sources import Source, open_source
from gsa.convert.students import Choices, new_weights, student_config
from gsa.convert.teacher import Teacher, read_teacher
from gsa.data.tokenizer import JSON, Tokenizer, load_tokenizer
from gsa.errors import GSAError
from gsa.eval.progress import Progress
from gsa.files import byte_count, free_bytes, named, whole_folder
from gsa.models.checkpoint import CONFIG, config_text, write_shards
from gsa.models.config import ModelConfig
from gsa.models.remote import AUTO_MAP, write_module
from gsa.options import check_count
from gsa.train.export import CARD, DTYPES

RECORD = "convert.json"
"""File beside a converted model that says how it came about."""
SHARD_BYTES = 2**32
"""Files of weights are not larger than this, nor than the largest of a source that has several."""


@dataclass(frozen=True)
class Conversion:
    """A source, and what it is to become."""

    source: Source
    teacher: Teacher
    choices: Choices
    student: ModelConfig
    mapping: Mapping
    dtype: torch.dtype

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor that is written."""
        return self.mapping.sizes(self.dtype)

    @property
    def calibrated(self) -> bool:
        """Whether something in it begins with figures of the teacher."""
        if self.choices.to in NORMED:
            return bool(getattr(self.student.layers[0], "output_norm", None) == "heads")
        return self.choices.to in STUDENTS and not self.choices.paper

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the student that its source has."""
        theirs = self.mapping.copied[name]
        return checked(self.source.read(theirs), theirs, self.source, dtype)

    def tokenizer(self, folder: Path) -> Tokenizer:
        """The tokenizer that was put into a folder; raises if it has tokens that the model does not know."""
        with self.source.blamed(folder):
            found = load_tokenizer(folder)
        size = self.student.vocab_size
        if found.vocab_size > size:
            raise GSAError(
                f"convert: {self.source.name}: the tokenizer has a vocabulary of {found.vocab_size:,}, the model of "
                f"{size:,}"
            )
        return found


def prepare(source: str | Path, choices: Choices, dtype: str | None = None) -> Conversion:
    """What a source would become, checked as far as it can be without reading its weights."""
    if dtype is not None and dtype not in DTYPES:
        raise GSAError(f"convert: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    opened = open_source(source)
    teacher = read_teacher(opened.fields)
    student = student_config(teacher, choices)
    mapping = map_tensors(opened, teacher.config, student)
    if choices.seed and not mapping.new:
        raise GSAError(f"convert: nothing in {choices.to} begins at random, so seed {choices.seed} does nothing")
    wanted = DTYPES[dtype] if dtype else _common_dtype({x.dtype for x in opened.tensors.values()})
    return Conversion(opened, teacher, choices, student, mapping, wanted)


def _common_dtype(dtypes: set[torch.dtype]) -> torch.dtype:
    """The narrowest that holds numbers of all of these exactly; fp16 and bf16 both fit into fp32 alone."""
    common = dtypes.pop()
    for dtype in dtypes:
        common = torch.promote_types(common, dtype)
    return common


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    parameters: int
    dtype: str
    files: list[str]


def convert(
    source: str | Path,
    out: str | Path,
    choices: Choices,
    dtype: str | None = None,
    *,
    text: str | None = None,
    tokens: int = TOKENS,
) -> Converted:
    """Writes what a source becomes to a new or empty folder.

    Weights that are new are calibrated on so many tokens of a text, by default of the package's; 0 for none.
    """
    place = checked_out(out)
    given = calibration_text(text, tokens)  # first, since opening a source may take long
    conversion = prepare(source, choices, dtype)
    check_calibration(conversion, given, tokens)
    free = free_bytes(place)
    if conversion.nbytes > free:
        raise GSAError(
            f"convert: {place}: {byte_count(conversion.nbytes)} are needed, {byte_count(free)} are free there"
        )
    return write(conversion, place, text=given or text_of(None), tokens=tokens if conversion.calibrated else 0)


def calibration_text(path: str | None, tokens: int) -> Text | None:
    """The text that somebody has chosen to calibrate on."""
    check_count("convert: calibrate_tokens", tokens, least=0)
    if path is not None and not tokens:
        raise GSAError("convert: a text does nothing without tokens of it (--calibrate-tokens 0)")
    return None if path is None else text_of(path)


def check_calibration(conversion: Conversion, text: Text | None, tokens: int) -> None:
    """Raises if a text or a number of tokens was chosen, and nothing is calibrated."""
    idle = "a text" if text is not None else "a number of tokens" if tokens not in (0, TOKENS) else None
    if idle and not conversion.calibrated:
        form = "the paper's form of " if conversion.choices.paper else ""
        raise GSAError(f"convert: nothing in {form}{conversion.choices.to} is calibrated, so {idle} does nothing")


def checked_out(out: str | Path) -> Path:
    """Where to write; what is there already is refused."""
    place = named(out, "convert").resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise GSAError(f"convert: {place} is there already; expected a new or empty folder")
    return place


def write(conversion: Conversion, place: Path, *, text: Text, tokens: int) -> Converted:
    """Writes a student, file by file: no more of its weights are in memory than one file holds."""
    source, dtype = conversion.source, conversion.dtype
    new, calibration = fresh(conversion), None
    with whole_folder(place, "convert", conversion.nbytes) as folder:
        companions = source.write_companions(folder)
        if (folder / JSON).exists():
            conversion.tokenizer(folder)
        if tokens:
            calibration = calibrate(conversion, pieces(conversion, folder, text, tokens), text.name, new)
            new |= calibration.weights
        write_tensors(source, conversion.mapping, dtype, folder, new)
        write_module(folder)
        (folder / RECORD).write_text(json.dumps(record(conversion, calibration), indent=2) + "\n")
        (folder / CARD).write_text(card(conversion, place.name, companions, calibration), encoding="utf-8")
        special: dict[str, Any] = conversion.teacher.tokens
        (folder / CONFIG).write_text(config_text(conversion.student, dtype, auto_map=AUTO_MAP, **special))
        files = sorted(path.name for path in folder.iterdir())
    parameters = sum(conversion.sizes.values()) // dtype.itemsize
    return Converted(place, parameters, str(dtype).removeprefix("torch."), files)


def write_tensors(source: Source, mapping: Mapping, dtype: torch.dtype, folder: Path, new: dict[str, Tensor]) -> None:
    """Writes a student's weights: those of its source, and the new ones."""
    sizes, done = mapping.sizes(dtype), 0
    with Progress(sum(sizes.values()) >> 20, "MB of weights") as progress:

        def read(name: str) -> Tensor:
            nonlocal done
            done += sizes[name]
            progress.advance((done >> 20) - progress.done)
            if name in new:
                return new[name].to(dtype)
            return checked(source.read(mapping.copied[name]), mapping.copied[name], source, dtype)

        shard_bytes = min(SHARD_BYTES, source.largest_shard or SHARD_BYTES)
        write_shards(folder, sizes, read, shard_bytes=shard_bytes)


def fresh(conversion: Conversion) -> dict[str, Tensor]:
    """The new tensors, as they begin."""
    student = conversion.student
    found: dict[str, Tensor] = {}
    for layer, options in enumerate(student.layers):
        names = conversion.mapping.new_of(layer)
        if names:
            own = new_weights(options, names, conversion.choices, layer, student)
            found |= {f"model.layers.{layer}.mixer.{name}": x for name, x in own.items()}
    assert found.keys() == set(conversion.mapping.new)
    return found


def record(conversion: Conversion, calibration: Calibration | None) -> dict[str, Any]:
    """All that was decided, for `convert.json`."""
    teacher = conversion.teacher
    return {
        "gsa": gsa.__version__,
        "source": conversion.source.origin,
        "family": teacher.family,
        "choices": asdict(conversion.choices),
        "dtype": str(conversion.dtype).removeprefix("torch."),
        "teacher": teacher.config.to_dict(),
        "context": teacher.context,
        "student": conversion.student.to_dict(),
        "new": list(conversion.mapping.new),
        "dropped": list(conversion.mapping.dropped),
        "unknown_fields": teacher.unknown,
        "calibration": None
        if calibration is None
        else {"text": calibration.text, "tokens": calibration.tokens, "layers": calibration.facts},
    }
