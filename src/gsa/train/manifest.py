"""The manifest of a checkpoint: size and SHA-256 of every file, and of itself."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gsa.errors import GSAError
from gsa.files import read_file, sha256

MANIFEST = "manifest.json"
FORMAT = 1
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Errors of the system that are damage: no regular file is there, links lead nowhere, or the disk itself gave up.
_DAMAGE = (errno.EINVAL, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)
_HASHED_AT_ONCE = 4  # files: hashing releases Python's lock, and one core alone is slower than most disks


class BrokenCheckpoint(GSAError):
    """A checkpoint that is not as it was written."""


def write_manifest(folder: Path, groups: list[str]) -> None:
    """Writes the manifest of the files in a folder, which hold these groups of tensors."""
    paths = sorted(folder.iterdir())
    files = {
        path.name: {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sha256s(paths), strict=True)
    }
    (folder / MANIFEST).write_text(_text({"format": FORMAT, "groups": groups, "files": files}))


def _text(fields: dict[str, Any]) -> str:
    """A manifest with its own SHA-256: that of the rest of it, sorted and without spaces."""
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    own = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**fields, "sha256": own}, sort_keys=True, indent=2) + "\n"


def read_manifest(folder: Path, needed: set[str], group: str) -> list[str]:
    """The groups of a checkpoint, after every byte of it has been compared with its manifest.

    The files `needed`, and those of `group`, have to be among them. Raises BrokenCheckpoint, with the file and what is
    wrong with it, or GSAError if that cannot be known, because files may not be read or the format is newer.
    """
    try:
        fields = _read(folder)
        files, groups = _files(folder, fields), _groups(folder, fields)
        for name in sorted(needed - files.keys()):
            raise broken(folder, f"{MANIFEST} does not name {name}")
        if group not in groups:
            raise broken(folder, f"{MANIFEST} does not name the group {group!r}")
        _compare(folder, files)
    except FileNotFoundError as error:
        raise broken(folder, f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        if error.errno in _DAMAGE:
            raise broken(folder, f"cannot be read: {error}") from None
        raise GSAError(f"checkpoint {folder}: cannot be read: {error}") from None
    return groups


def broken(folder: Path, reason: str) -> BrokenCheckpoint:
    """The error that says what is wrong with a checkpoint."""
    return BrokenCheckpoint(f"checkpoint {folder}: {reason}")


def _read(folder: Path) -> dict[str, Any]:
    """The fields of a manifest that is as it was written, in a format that is known."""
    content = read_file(folder / MANIFEST)
    try:
        fields = json.loads(content)
        signed = isinstance(fields, dict) and fields.pop("sha256", None) is not None
        as_written = signed and _text(fields).encode() == content
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits, and brackets nested too deep
        raise broken(folder, f"{MANIFEST} is not JSON: {error}") from None
    if not as_written:
        raise broken(folder, f"{MANIFEST} is not as it was written")
    if fields.get("format") != FORMAT:
        raise GSAError(f"checkpoint {folder}: its format is {fields.get('format')!r}, this version reads {FORMAT}")
    return fields


def _files(folder: Path, fields: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 by name."""
    files = fields.get("files")
    if not isinstance(files, dict):
        raise broken(folder, f"{MANIFEST}: files must be an object, got {type(files).__name__}")
    found = {}
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise broken(folder, f"{MANIFEST}: {name!r} is not the name of a file beside it")
        size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str):
            raise broken(folder, f"{MANIFEST}: {name} must have a size and a sha256, got {entry!r}")
        found[name] = size, digest
    return found


def _groups(folder: Path, fields: dict[str, Any]) -> list[str]:
    """The groups of tensors, each of which has its file or its index."""
    groups = fields.get("groups")
    if not isinstance(groups, list):
        raise broken(folder, f"{MANIFEST}: groups must be a list, got {type(groups).__name__}")
    for group in groups:
        if not {f"{group}.safetensors", f"{group}.safetensors.index.json"} & fields["files"].keys():
            raise broken(folder, f"{MANIFEST}: there is no file of the group {group!r}")
    return groups


def _compare(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Raises for the first file that is not as the manifest says; sizes first, since they cost nothing."""
    for name, (expected, _) in files.items():
        size = (folder / name).stat().st_size
        if size != expected:
            raise broken(folder, f"{name} has {size} bytes, it was written with {expected}")
    for path in folder.iterdir():  # a model.safetensors that came later would be read instead of numbered files
        if ".safetensors" in path.name and path.name not in files:
            raise broken(folder, f"{path.name} is not part of it")
    for name, digest in zip(files, sha256s(folder / name for name in files), strict=True):
        if digest != files[name][1]:
            raise broken(folder, f"the content of {name} has changed (sha256)")


def sha256s(paths: Iterable[Path]) -> Iterator[str]:
    """The SHA-256 of several files, some at a time."""
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        yield from pool.map(sha256, paths)
