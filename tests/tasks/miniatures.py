"""Data sets of the same form as the real ones, but tiny."""

import io
import tarfile
from dataclasses import replace
from functools import partial

import numpy as np

from fedfq.tasks import cifar10_files, shakespeare_text, store

TRAIN, TEST = 50, 10  # images of the miniature CIFAR-10


def cifar10(train=TRAIN, test=TEST):
    """Arrays as in the usual .npz file."""
    rng = np.random.default_rng(0)

    def part(count):
        return rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.permutation(np.arange(count) % 10)

    (x_train, y_train), (x_test, y_test) = part(train), part(test)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def batches(arrays):
    """The same as the official files hold it: six batches of flat images, channels first."""

    def batch(x, y):
        return {"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "labels": y.tolist()}

    train = zip(np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5))
    result = {f"data_batch_{number}": batch(x, y) for number, (x, y) in enumerate(train, 1)}
    return result | {"test_batch": batch(arrays["x_test"], arrays["y_test"])}


def python2_pickle(batch):
    """A batch as Python 2 and the numpy of its time pickled it (protocol 2), like the official files."""

    def number(value):
        return b"J" + int(value).to_bytes(4, "little")

    def text(value):
        return b"U" + bytes([len(value)]) + value

    data = batch["data"].tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR"
    minus_one = b"J\xff\xff\xff\xff"
    state = b"(K\x03" + text(b"|") + b"NNN" + minus_one + minus_one + b"K\x00tb"
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR" + state
    shape = b"(" + b"".join(number(side) for side in batch["data"].shape) + b"t"
    array = empty + b"(K\x01" + shape + dtype + b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    labels = b"](" + b"".join(number(label) for label in batch["labels"]) + b"e"
    pairs = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + labels + text(b"data") + array
    return b"\x80\x02}(" + pairs + b"u."


def write_archive(path, files):
    """A .tar.gz of named contents, in the folder that the official one has."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


# ANNA says eight lines of 59 characters, which with a space after each are 480, and "Exit " besides: LEAF takes what
# stands at the right margin as spoken. 485 characters are 405 windows; 324 train, test windows begin at 324 + 79 = 403:
# two. BOB has three lines, 90 characters, 10 windows: 8 train, none is left for testing. CARA has two lines and DAN
# only 26 characters: no clients. EVE, in the play without indentation, has lines of 20, 20, 0, 20 and 19 characters: 84
# with the spaces, 83 as two in a row become one, 3 windows, 2 of them train. FAY has one line.
ANNA = ["".join("abcdefghij"[(row + column) % 10] for column in range(59)) for row in range(8)]
BOB = ["B" * 29, "b" * 29, "o" * 29]
EVE = ["v" * 20, "e" * 20, "", "E" * 20, "V" * 19]
PLAYS = f"""A table of contents, and who made this.

THE SONNETS

by William Shakespeare

  From fairest creatures. we desire increase,
    That thereby beauty's rose might never die,
    But as the riper should by time decease,

1603

THE PLAY OF ANNA

by William Shakespeare


Dramatis Personae

  ANNA, a letter
SCENE I.
A room

Enter ANNA

  ANNA. {ANNA[0]}
    {ANNA[1]}
    {ANNA[2]}
                                          Exit
  BOB. {BOB[0]}
<<A note of the publisher, which is not indented.>>
    {BOB[1]}
  CARA. One line.
    And another.
  Dan. Short.
    Shorter.
    Shortest.
  Anna. {ANNA[3]}
    {ANNA[4]}
    {ANNA[5]}
    {ANNA[6]}
    {ANNA[7]}
  BOB. {BOB[2]}

THE END


THE COMEDY OF ERRORS



by William Shakespeare

ACT I. SCENE 1
A hall

EVE. {EVE[0]}
{EVE[1]}
{EVE[2]}
{EVE[3]}
<<A note again.>>
is not spoken
FAY. Yes.
EVE. {EVE[4]}
"""


def use(monkeypatch):
    """Let `fetch` accept the miniatures."""
    for name, read in {
        "cifar10": partial(cifar10_files.read, train=TRAIN, test=TEST),
        "shakespeare": partial(shakespeare_text.read, plays=2),
    }.items():
        monkeypatch.setitem(store.SOURCES, name, replace(store.SOURCES[name], read=read))


def write(folder):
    """A cache with both miniatures in it."""
    np.savez(folder / "cifar10.npz", **cifar10())
    (folder / "plays.txt").write_text(PLAYS)
    store.fetch("cifar10", folder / "cifar10.npz", folder)
    store.fetch("shakespeare", folder / "plays.txt", folder)
