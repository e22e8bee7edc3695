from __future__ import annotations

import itertools
import math
import os
import random

import numpy as np
import pytest

from moe_ncclep.train import data
from moe_ncclep.train.data import Corpus, load_corpus


def write_files(folder, count=60, size=400):
    """Text files of different content; returns them by name."""
    generator = random.Random(3)
    texts = {}
    for i in range(count):
        texts[f"f{i:02}.txt"] = f"<{i:04}>".encode() + bytes(generator.choices(range(32, 127), k=size)) + b"\n"
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return texts


def test_whole_files_are_held_out_and_splits_are_disjoint(tmp_path):
    texts = write_files(tmp_path)
    corpus = load_corpus(str(tmp_path))
    train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    held = [text for text in texts.values() if text in held_out]
    assert held
    assert b"".join(t for t in texts.values() if t in held) == held_out
    assert b"".join(t for t in texts.values() if t not in held) == train
    assert not any(text in train for text in held)
    assert data.MIN_HELD_OUT <= len(held_out) / (len(train) + len(held_out)) <= data.HELD_OUT


def test_same_split_on_every_call_whatever_the_names(tmp_path):
    texts = write_files(tmp_path)
    first = load_corpus(str(tmp_path))
    assert load_corpus(str(tmp_path)).digest() == first.digest()
    for name in texts:
        (tmp_path / name).rename(tmp_path / f"renamed-{name}")
    assert load_corpus(str(tmp_path)).digest() == first.digest()


def test_copy_of_a_held_out_file_is_not_trained_on(tmp_path):
    texts = write_files(tmp_path)
    first = load_corpus(str(tmp_path))
    held = next(text for text in texts.values() if text in first.held_out.tobytes())
    (tmp_path / "a-copy.txt").write_bytes(held)
    again = load_corpus(str(tmp_path))
    assert again.files == first.files
    assert held not in again.train.tobytes()


def test_single_file_holds_out_its_tail(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = load_corpus(str(file))
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == file.read_bytes()
    assert len(corpus.held_out) == 100


def test_few_files_hold_out_the_tail(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"y" * 1000)
    corpus = load_corpus(str(tmp_path))
    assert corpus.held_out.tobytes() == b"y" * 100


def test_folder_skips_binary_hidden_and_linked_files(tmp_path):
    (tmp_path / "text").write_bytes(b"text" * 100)
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0" * 100)
    (tmp_path / ".hidden").write_bytes(b"hidden" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"config" * 100)
    (tmp_path / "link").symlink_to("text")
    corpus = load_corpus(str(tmp_path))
    assert corpus.files == 1
    assert (corpus.train.tobytes() + corpus.held_out.tobytes()) == b"text" * 100


def test_more_than_the_limit_is_left_out(tmp_path):
    write_files(tmp_path)
    corpus = load_corpus(str(tmp_path), max_bytes=5000)
    assert corpus.truncated
    assert len(corpus.train) + len(corpus.held_out) == 5000
    single = load_corpus(str(tmp_path / "f00.txt"), max_bytes=100)
    assert single.truncated
    assert len(single.train) + len(single.held_out) == 100


def test_default_is_the_standard_library():
    corpus = load_corpus(None, max_bytes=2**20)
    assert corpus.files > 10
    assert b"import" in corpus.train.tobytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "missing: No such file or directory"),
        (lambda p: (p / "empty").write_bytes(b"") or p / "empty", "empty is empty"),
        (lambda p: (p / "folder").mkdir() or p / "folder", "folder holds no text"),
        (lambda p: (p / "b").write_bytes(b"\0" * 9) and p, r"holds no text \(1 binary or unreadable files skipped\)"),
        (lambda p: os.mkfifo(p / "fifo") or p / "fifo", "fifo is neither a regular file nor a folder"),
    ],
)
def test_bad_input_is_named(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(str(make(tmp_path)))


def corpus_of(train: bytes, held_out: bytes) -> Corpus:
    arrays = {"train": np.frombuffer(train, np.uint8), "held_out": np.frombuffer(held_out, np.uint8)}
    return Corpus(source="here", files=1, split="", truncated=False, **arrays)


def test_too_little_text_is_named():
    corpus_of(b"a" * 65, b"a" * 65).check(world=2, seq=32, micro_batch=1)
    with pytest.raises(ValueError, match="the training part has 64 bytes, but 2 ranks with --seq 32 need at least 65"):
        corpus_of(b"a" * 64, b"a" * 65).check(world=2, seq=32, micro_batch=1)
    with pytest.raises(ValueError, match="the held-out part has 64 bytes"):
        corpus_of(b"a" * 65, b"a" * 64).check(world=2, seq=32, micro_batch=1)
    with pytest.raises(ValueError, match="only 33 different sequences of --seq 32, but a step takes 2 ranks x"):
        corpus_of(b"a" * 65, b"a" * 65).check(world=2, seq=32, micro_batch=17)


def test_ranks_share_a_global_batch_without_overlap():
    text = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8).tobytes()
    corpus = corpus_of(text, text)
    alone = corpus.batch(5, 0, 1, 8, 16, seed=1)
    shared = [corpus.batch(5, rank, 4, 2, 16, seed=1) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(shared), alone)
    assert len({row.tobytes() for row in alone}) == 8
    assert (corpus.batch(6, 0, 1, 8, 16, seed=1) != alone).any()
    assert (corpus.batch(5, 0, 1, 8, 16, seed=2) != alone).any()
    for row in alone:
        assert row.astype(np.uint8).tobytes() in text


@pytest.mark.parametrize(("length", "world"), [(65, 2), (1000, 3), (100_000, 4)])
def test_eval_windows_do_not_overlap_and_ranks_get_the_same_number(length, world):
    text = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8).tobytes()
    corpus = corpus_of(text, text)
    ranks = [corpus.eval_windows(rank, world, 32) for rank in range(world)]
    assert len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) >= 1
    assert len(ranks[0]) <= data.MAX_EVAL_WINDOWS // world
    starts = sorted(text.index(row.astype(np.uint8).tobytes()) for row in np.concatenate(ranks))
    assert all(b - a >= 32 for a, b in itertools.pairwise(starts))


def test_entropy_of_byte_frequencies():
    corpus = corpus_of(b"z", b"ab" * 50)
    assert corpus.byte_frequency_entropy() == pytest.approx(math.log(2))
    assert corpus_of(b"z", bytes(range(256))).byte_frequency_entropy() == pytest.approx(math.log(256))
    assert corpus_of(b"z", b"aaaa").byte_frequency_entropy() == 0
