"""Shakespeare's plays cut into clients and windows, as LEAF does (https://leaf.cmu.edu; preprocess_shakespeare.py).

A client is a character of a play with more than two lines. All that it says, one line after the other, is one text;
an example is a window of 80 characters of it and the character that follows. The first 80% of a client's windows are
for training. The test windows begin 79 later, so that no window for training shares a character with one for testing.

LEAF then drops the clients that are left without a test window (330 of 1,129). We keep them: they can train as well.
"""

from __future__ import annotations

import lzma
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fedfq.types import Array

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's
WINDOW_CHARACTERS = 80  # from which the next one is predicted
PLAYS = 36  # of the edition of 1994 by Project Gutenberg, the one that has this layout
MAX_BYTES = 16 << 20  # it has 5.6 million
MAX_XZ_MEMORY_BYTES = 128 << 20  # that unpacking may take


def read(path: Path, plays: int = PLAYS) -> dict[str, Array]:
    """`codes`: the texts of all clients as one, every character as its place in `ALPHABET`.

    `train_starts` and `test_starts`: where each window begins in it, client by client; `train_sizes`: how many windows
    each client has for training. `plays` is how many plays there must be.
    """
    found = split_into_plays(_text(path))
    if len(found) != plays:
        raise ValueError(
            f"{path}: {len(found)} plays found, not {plays}: it is not Project Gutenberg's edition of January 1994"
        )
    texts = [_join(lines) for play in found for lines in play.values() if len(lines) > 2]
    texts = [text for text in texts if len(text) > WINDOW_CHARACTERS]
    if strange := sorted(set("".join(texts)) - set(ALPHABET)):
        raise ValueError(f"{path}: the character {strange[0]!r} is none of LEAF's {len(ALPHABET)}")
    return _windows(texts)


def summary(arrays: Mapping[str, Array]) -> str:
    train, test = len(arrays["train_starts"]), len(arrays["test_starts"])
    return f"{len(arrays['train_sizes']):,} clients, {train:,} training and {test:,} test windows"


# Text to clients


class TextLayout(NamedTuple):
    """What the first line of a speech looks like (NAME. Words), and what the others do."""

    first: re.Pattern[str]
    more: re.Pattern[str]


INDENTED = TextLayout(re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)"))
FLUSH = TextLayout(re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)"))
FLUSH_PLAY = "THE COMEDY OF ERRORS"


def split_into_plays(text: str) -> list[dict[str, list[str]]]:
    """For every play what each character says, line by line. Names are in capitals, in order of appearance."""
    plays: list[dict[str, list[str]]] = []
    speaker = None
    layout = INDENTED
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "by William Shakespeare" in line:
            plays.append({})
            speaker = None
            layout = FLUSH if _title(lines, number) == FLUSH_PLAY else INDENTED
        elif plays and (match := layout.first.match(line)):
            speaker = match[1].upper()
            if layout is FLUSH and speaker.startswith("ACT "):  # the heading of a scene
                speaker = None
            else:
                plays[-1].setdefault(speaker, []).append(match[2])
        elif speaker and (match := layout.more.match(line)):
            if layout is FLUSH and line.startswith("<"):  # a note of the publisher
                speaker = None
            else:
                plays[-1][speaker].append(match[1])
    return [play for play in plays if len(play) > 1]  # poems have no characters


def _title(lines: list[str], author: int) -> str:
    """What is written above the author's name, at least one line further up."""
    return next((line.strip() for line in reversed(lines[: max(author - 1, 0)]) if line.strip()), "")


def _join(lines: list[str]) -> str:
    return re.sub(" {2,}", " ", "".join(f"{line} " for line in lines))


# Clients to windows


def _windows(texts: list[str]) -> dict[str, Array]:
    counts = [len(text) - WINDOW_CHARACTERS for text in texts]
    train_counts = [max(1, count * 4 // 5) for count in counts]
    offsets = np.cumsum([0, *(len(text) for text in texts)])[:-1]
    rows = list(zip(offsets, counts, train_counts))
    train = [np.arange(offset, offset + train) for offset, _, train in rows]
    test = [np.arange(offset + train + WINDOW_CHARACTERS - 1, offset + count) for offset, count, train in rows]
    codes = np.zeros(128, np.uint8)
    codes[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return {
        "codes": codes[np.frombuffer("".join(texts).encode("ascii"), np.uint8)],
        "train_starts": np.concatenate(train).astype(np.int32),
        "test_starts": np.concatenate(test).astype(np.int32),
        "train_sizes": np.array(train_counts),
    }


# Files


def _text(path: Path) -> str:
    if path.is_dir():
        path = _only_file(path)
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            data = unpack(file) if (unpack := UNPACK.get(suffix)) else file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"longer than {MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text in UTF-8") from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: not a readable {suffix} file ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _only_file(folder: Path) -> Path:
    suffixes = (".txt", *UNPACK)
    files = [file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.is_file()]
    if len(files) != 1:
        raise ValueError(f"{folder}: {len(files)} files in it end in {' or '.join(suffixes)}; name the one to take")
    return files[0]


def _unxz(file: BinaryIO) -> bytes:
    stream = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY_BYTES)
    data = stream.decompress(file.read(MAX_BYTES), MAX_BYTES + 1)
    if not stream.eof and len(data) <= MAX_BYTES:
        raise EOFError("it ends too early")
    return data


def _unzip(file: BinaryIO) -> bytes:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.lower().endswith(".txt")]
        if len(names) != 1:
            raise ValueError(f"{len(names)} files in it end in .txt, not one")
        with archive.open(names[0]) as member:
            return member.read(MAX_BYTES + 1)


# As much as a text may have and one byte more: small files can unpack to anything.
UNPACK = {".xz": _unxz, ".zip": _unzip}
