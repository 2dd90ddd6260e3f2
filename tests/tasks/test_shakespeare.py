"""Plays to clients to windows, worked out by hand in `miniatures`."""

import lzma
import zipfile

import numpy as np
import pytest
import torch

from fedfq import tasks
from fedfq.tasks import shakespeare, shakespeare_text
from fedfq.tasks.shakespeare_text import ALPHABET
from tests.tasks.miniatures import ANNA, BOB, EVE, PLAYS

ANNAS_TEXT = " ".join([*ANNA[:3], "Exit", *ANNA[3:], ""])
BOBS_TEXT = " ".join([*BOB, ""])
EVES_TEXT = " ".join([line for line in EVE if line] + [""])


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "plays.txt").write_text(PLAYS)
    return tmp_path / "plays.txt"


def decode(codes):
    return "".join(ALPHABET[code] for code in codes)


# Text to clients


def test_plays_and_characters():
    of_anna, of_errors = shakespeare_text.split_into_plays(PLAYS)
    assert list(of_anna) == ["ANNA", "BOB", "CARA", "DAN"]
    assert of_anna["ANNA"][:3] == ANNA[:3] and of_anna["ANNA"][4:] == ANNA[3:]
    assert of_anna["ANNA"][3].strip() == "Exit"
    assert of_anna["BOB"] == BOB
    assert of_anna["CARA"] == ["One line.", "And another."]
    assert of_errors == {"EVE": EVE, "FAY": ["Yes."]}


def test_no_plays():
    assert shakespeare_text.split_into_plays("") == []
    assert shakespeare_text.split_into_plays("by William Shakespeare\n  ANNA. Hello.\n") == []
    assert shakespeare_text.split_into_plays("  ANNA. Hello.\n  BOB. Hello.\n") == []


def test_alphabet():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80


# Clients to windows


def test_windows(plays):
    arrays = shakespeare_text.read(plays, plays=2)
    assert decode(arrays["codes"]) == ANNAS_TEXT + BOBS_TEXT + EVES_TEXT
    assert [len(ANNAS_TEXT), len(BOBS_TEXT), len(EVES_TEXT)] == [485, 90, 83]
    assert arrays["train_sizes"].tolist() == [324, 8, 2]
    assert arrays["train_starts"].tolist() == [*range(324), *range(485, 493), 575, 576]
    assert arrays["test_starts"].tolist() == [403, 404]
    assert shakespeare_text.summary(arrays) == "3 clients, 334 training and 2 test windows"


def test_no_test_window_shares_a_character_with_one_for_training(plays):
    arrays = shakespeare_text.read(plays, plays=2)
    train, test = (arrays[name][:, None] + np.arange(80) for name in ("train_starts", "test_starts"))
    assert not set(train.ravel()) & set(test.ravel())


def test_examples(filled):
    data = tasks.get("shakespeare-lstm").load(None)
    x, y = data.train.take(np.array([0, 323, 324, 333]))
    assert [decode(window) for window in x[:2]] == [ANNAS_TEXT[:80], ANNAS_TEXT[323:403]]
    assert [decode(window) for window in x[2:]] == [BOBS_TEXT[:80], EVES_TEXT[1:81]]
    assert decode(y) == ANNAS_TEXT[80] + ANNAS_TEXT[403] + BOBS_TEXT[80] + EVES_TEXT[81]
    everything = np.arange(len(data.train))
    assert np.array_equal(data.train.labels, data.train.take(everything)[1])
    assert [group.tolist() for group in data.groups] == [[*range(324)], [*range(324, 332)], [332, 333]]
    assert decode(data.test.take(np.array([1]))[0][0]) == ANNAS_TEXT[404:484]


def test_the_test_set_is_a_fixed_sample(filled, monkeypatch):
    monkeypatch.setattr(shakespeare, "TEST_WINDOWS", 1)
    one, again = (tasks.get("shakespeare-lstm").load(None).test for _ in range(2))
    assert len(one) == 1 and one.starts.tolist() == again.starts.tolist()


def test_batches_and_the_network(filled):
    task = tasks.get("shakespeare-lstm")
    data = task.load(None)
    x, y = task.prepare(*data.train.take(np.arange(10)), np.random.default_rng(0))
    assert x.shape == (10, 80) and x.dtype == y.dtype == torch.int64
    accuracy, loss = tasks.evaluate(task.model(0), task, data.test)
    assert 0 <= accuracy <= 1 and loss == pytest.approx(np.log(80), rel=0.05)


# Files


def test_compressed_files_and_folders(tmp_path, plays):
    expected = shakespeare_text.read(plays, plays=2)
    (tmp_path / "crlf.txt").write_bytes(b"\xef\xbb\xbf" + PLAYS.replace("\n", "\r\n").encode())
    (tmp_path / "plays.txt.xz").write_bytes(lzma.compress(PLAYS.encode()))
    with zipfile.ZipFile(tmp_path / "plays.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("100.txt", PLAYS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.md").write_text("unrelated")
    (tmp_path / "folder" / "plays.txt.xz").write_bytes(lzma.compress(PLAYS.encode()))
    for name in ("crlf.txt", "plays.txt.xz", "plays.zip", "folder"):
        arrays = shakespeare_text.read(tmp_path / name, plays=2)
        assert all(np.array_equal(arrays[key], expected[key]) for key in expected)


def test_another_text_is_refused(plays):
    with pytest.raises(ValueError, match=r"plays.txt: 2 plays found, not 36: it is not Project Gutenberg's edition"):
        shakespeare_text.read(plays)


def test_strange_characters_are_refused(plays):
    plays.write_text(PLAYS.replace("abc", "äbc"))
    with pytest.raises(ValueError, match="the character 'ä' is none of LEAF's 80"):
        shakespeare_text.read(plays, plays=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xz", b"no xz", "not a readable .xz file"),
        ("a.xz", lzma.compress(PLAYS.encode())[:-20], "ends too early"),
        ("a.xz", b"", "ends too early"),
        ("a.xz", lzma.compress(bytes(300_000)), "longer than 100,000 bytes"),
        ("a.txt", bytes(300_000), "longer than 100,000 bytes"),
        ("a.zip", b"no zip", "not a readable .zip file"),
        ("a.txt", b"\xff\xfe", "not a text in UTF-8"),
    ],
)
def test_unreadable_files(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(shakespeare_text, "MAX_BYTES", 100_000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        shakespeare_text.read(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))


def test_zip_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare_text, "MAX_BYTES", 100_000)
    for members, message in (({"a.txt": bytes(300_000)}, "longer than"), ({"a.txt": b"", "b.txt": b""}, "not one")):
        with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        with pytest.raises(ValueError, match=message):
            shakespeare_text.read(tmp_path / "a.zip")


def test_which_file_of_a_folder(tmp_path):
    with pytest.raises(ValueError, match="0 files in it end in .txt or .xz or .zip"):
        shakespeare_text.read(tmp_path)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match="2 files in it end in .txt or .xz or .zip; name the one to take"):
        shakespeare_text.read(tmp_path)
