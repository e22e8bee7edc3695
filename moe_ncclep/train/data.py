"""Text as bytes: where it comes from, which part is held out, and which windows a rank sees."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT = 0.05
MIN_HELD_OUT = 0.01
"""With whole files held out, at least this share of the bytes; otherwise the tail of the text is taken."""
MAX_BYTES = 64 * 2**20
MAX_EVAL_WINDOWS = 128
_PROBE_BYTES = 8192
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Two disjoint texts. ``train`` and ``held_out`` are ``[bytes]`` uint8 arrays."""

    source: str
    files: int
    """Files read, after identical ones were merged."""
    split: str
    """How the held-out part was chosen, in words."""
    train: np.ndarray
    held_out: np.ndarray
    truncated: bool
    """True if there was more text than ``MAX_BYTES``, and the rest was left out."""

    def digest(self) -> str:
        """SHA-256 over both splits."""
        h = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        h.update(self.train)
        h.update(self.held_out)
        return h.hexdigest()

    def check(self, world: int, seq: int, micro_batch: int) -> None:
        """Raise ``ValueError`` unless each rank gets one sequence of each split, and a step has distinct windows."""
        need = world * seq + 1
        for name, text in (("training", self.train), ("held-out", self.held_out)):
            if len(text) < need:
                raise ValueError(
                    f"{self.source}: too little text: the {name} part has {len(text)} bytes, "
                    f"but {world} ranks with --seq {seq} need at least {need}"
                )
        windows = len(self.train) - seq
        if world * micro_batch > windows:
            raise ValueError(
                f"{self.source}: the training part has only {windows} different sequences of --seq {seq}, "
                f"but a step takes {world} ranks x --micro-batch {micro_batch} = {world * micro_batch}"
            )

    def batch(self, step: int, rank: int, world: int, micro_batch: int, seq: int, seed: int) -> np.ndarray:
        """Training windows of one rank in one step.

        All ranks draw the same ``world * micro_batch`` distinct windows and take their share, so that the data of a
        step depends on its global batch size only, not on the number of ranks.

        Returns:
            ``[micro_batch, seq + 1]`` int64: inputs are ``[:, :-1]``, labels ``[:, 1:]``.
        """
        generator = np.random.default_rng([seed, step])
        starts = generator.choice(len(self.train) - seq, size=world * micro_batch, replace=False)
        return _windows(self.train, starts[rank * micro_batch : (rank + 1) * micro_batch], seq)

    def eval_windows(self, rank: int, world: int, seq: int) -> np.ndarray:
        """Held-out windows of one rank: non-overlapping, evenly spread, the same at every evaluation.

        Returns:
            ``[n, seq + 1]`` int64, with the same n >= 1 on every rank.
        """
        available = (len(self.held_out) - 1) // seq
        total = min(MAX_EVAL_WINDOWS, available) // world * world or world
        starts = np.arange(total) * available // total * seq
        return _windows(self.held_out, starts[rank::world], seq)

    def byte_frequency_entropy(self) -> float:
        """Entropy of the held-out bytes in nats: the loss of the best model that ignores context."""
        counts = np.bincount(self.held_out, minlength=256)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def load_corpus(path: str | None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Read text and split it, the same way on every call.

    Args:
        path: a file (any content), a folder (every text file in it and below, hidden ones and links left out), or None
            for the ``.py`` files of Python's standard library without its tests.
        max_bytes: read no more than this many bytes.

    Raises:
        ValueError: if the path is missing or unreadable, holds no text, or is neither file nor folder.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _from_folder(root, "*.py", f"Python standard library ({root})", max_bytes)
    root = Path(path)
    try:
        mode = root.stat().st_mode
    except OSError as error:
        raise ValueError(f"data path {path}: {error.strerror or error}") from None
    if stat.S_ISDIR(mode):
        return _from_folder(root, "*", str(path), max_bytes)
    if not stat.S_ISREG(mode):
        raise ValueError(f"data path {path} is neither a regular file nor a folder")
    try:
        with open(root, "rb") as f:
            text = f.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"data path {path}: {error.strerror or error}") from None
    if not text:
        raise ValueError(f"data file {path} is empty")
    return _by_tail(str(path), 1, text[:max_bytes], truncated=len(text) > max_bytes)


def _from_folder(root: Path, pattern: str, source: str, max_bytes: int) -> Corpus:
    texts: dict[bytes, bytes] = {}  # by content hash: a copy of a held-out file must not be trained on
    size, skipped, truncated = 0, 0, False
    for file in _walk(root, pattern):
        try:
            with open(file, "rb") as f:
                text = f.read(max_bytes - size + 1)
        except OSError:
            skipped += 1
            continue
        if b"\0" in text[:_PROBE_BYTES]:
            skipped += 1
            continue
        key = hashlib.sha256(text).digest()
        if not text or key in texts:
            continue
        if size + len(text) > max_bytes:
            truncated = True
            text = text[: max_bytes - size]
        if text:
            texts[key] = text
            size += len(text)
        if truncated:
            break
    if not texts:
        note = f" ({skipped} binary or unreadable files skipped)" if skipped else ""
        raise ValueError(f"data folder {root} holds no text{note}")
    held_out: set[bytes] = set()
    held_out_size = 0
    for key in sorted(texts):  # hash order is as good as random, and the same everywhere
        if held_out_size + len(texts[key]) <= HELD_OUT * size:
            held_out.add(key)
            held_out_size += len(texts[key])
    if held_out_size < MIN_HELD_OUT * size:
        return _by_tail(source, len(texts), b"".join(texts.values()), truncated)
    return Corpus(
        source=source,
        files=len(texts),
        split=f"{len(held_out)} of {len(texts)} whole files, chosen by content hash",
        train=_array(b"".join(text for key, text in texts.items() if key not in held_out)),
        held_out=_array(b"".join(text for key, text in texts.items() if key in held_out)),
        truncated=truncated,
    )


def _walk(root: Path, pattern: str) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        if Path(error.filename) == root:
            raise ValueError(f"data folder {root}: {error.strerror}") from None

    for folder, folders, files in os.walk(root, onerror=fail):
        skip = _SKIPPED_FOLDERS if pattern == "*.py" else ()
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(".") and file.match(pattern) and not file.is_symlink() and file.is_file():
                yield file


def _by_tail(source: str, files: int, text: bytes, truncated: bool) -> Corpus:
    cut = len(text) - int(len(text) * HELD_OUT)
    return Corpus(
        source=source,
        files=files,
        split=f"the last {HELD_OUT:.0%} of the text",
        train=_array(text[:cut]),
        held_out=_array(text[cut:]),
        truncated=truncated,
    )


def _array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def _windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(seq + 1)].astype(np.int64)
