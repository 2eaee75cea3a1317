"""Text as arrays of tokens, and its batches: a batch is a pure function of the seed and the step.

Text is read as bytes, so it needs no tokenizer; a `.bin` holds uint16 tokens, as nanoGPT writes them.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from experiments.errors import InputError

STDLIB = "stdlib"
HELD_OUT = 0.02
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# Tokens hashed and checked at a time: a `.bin` may be larger than memory.
_CHUNK = 1 << 24


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in two parts, each a 1-D array of uint8 (text) or uint16 (`.bin`) tokens."""

    train: np.ndarray
    validation: np.ndarray
    fingerprint: str
    """SHA-256 over the files' names and contents."""
    description: str


def load(corpus: str, *, vocab_size: int, context: int) -> Corpus:
    """Reads a corpus, checks its tokens and holds out about 2 % of it for validation.

    Args:
      corpus: `stdlib` (the running Python's own library, without its tests), a folder of text files, a text
        file, a `.bin` of uint16 tokens, or a folder with nanoGPT's `train.bin` and `val.bin`. From a folder
        whole files are held out, by the SHA-256 of their relative path; from a single file its end.
      vocab_size: the model's; at least 256 for text.
      context: tokens per sequence.

    Raises:
      InputError: nothing exists at that path, or the corpus is empty, too short for the context,
        malformed, or has tokens outside the vocabulary.
    """
    digest = hashlib.sha256()
    path = Path(corpus)
    if corpus == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        parts = _read_folder(root, _stdlib_files(root), vocab_size, digest)
        description = f"library of Python {platform.python_version()}"
    elif not path.exists():
        raise InputError(
            f"no corpus at {path.absolute()}: give a text file, a folder of text files, a .bin of uint16 "
            f"tokens, a folder with train.bin and val.bin, or {STDLIB!r}, which needs no file"
        )
    else:
        parts = _read_path(path, vocab_size, digest)
        description = corpus
    for name, tokens in zip(("train", "validation"), parts, strict=True):
        _require_one_window(name, tokens, context)
    train, validation = parts
    description += f": {len(train):,} tokens to train on, {len(validation):,} held out"
    return Corpus(train, validation, digest.hexdigest(), description)


def train_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    context: int,
    seed: int,
    start_step: int,
    stop_step: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """This process's rows of the global batches of steps start_step..stop_step - 1, read ahead of their use.

    The windows of `context + 1` tokens that start at multiples of `context` are visited once per epoch, in
    an order drawn from the seed and the epoch. The global batch of a step depends on the seed and the step
    alone, so a run can resume at any step under any number of processes.

    Args:
      corpus: what `load` returned.
      batch_size: rows of the global batch.
      context: tokens per sequence.
      seed: of the order; not negative.
      start_step: first step wanted.
      stop_step: one past the last step wanted.
      process_index: whose contiguous share of the rows to give.
      process_count: number of equal shares.

    Returns:
      An iterator over int32 arrays (batch_size / process_count, context + 1).

    Raises:
      InputError: the processes cannot share a batch evenly, or no window fits.
    """
    share = _rows_per_process(batch_size, process_index, process_count)
    _require_one_window("train", corpus.train, context)
    rows = grain.MapDataset.source(_Windows(corpus.train, context)).seed(seed).shuffle().repeat()
    # Cut into shares, the endless sequence of rows holds this process's part of step s at s * count + index.
    mine = slice(start_step * process_count + process_index, stop_step * process_count, process_count)
    shares = rows.batch(share).slice(mine)
    return iter(shares.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def validation_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    context: int,
    count: int,
    process_index: int = 0,
    process_count: int = 1,
) -> list[np.ndarray]:
    """This process's rows of fixed held-out batches: different windows, spread evenly over the held-out text.

    Args:
      corpus: what `load` returned.
      batch_size: rows of a global batch.
      context: tokens per sequence.
      count: batches wanted; fewer are returned if the text has no more.
      process_index: whose contiguous share of the rows to give.
      process_count: number of equal shares.

    Returns:
      int32 arrays (batch_size / process_count, context + 1).

    Raises:
      InputError: the processes cannot share a batch evenly, or the text does not fill one batch.
    """
    share = _rows_per_process(batch_size, process_index, process_count)
    windows = _Windows(corpus.validation, context)
    batches = min(count, len(windows) // batch_size)
    if batches < 1:
        raise InputError(
            f"the validation part has {len(windows)} windows of {context} tokens, too few for one batch "
            f"of {batch_size}: take a larger corpus, a smaller data.batch_size or a smaller model.context"
        )
    spread = np.arange(batches * batch_size) * len(windows) // (batches * batch_size)
    mine = spread.reshape(batches, process_count, share)[:, process_index]
    return [np.stack([windows[i] for i in rows]) for rows in mine]


class _Windows:
    """Random access to windows of `context + 1` tokens, int32; a window's last token begins the next."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._context

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._context
        return self._tokens[start : start + self._context + 1].astype(np.int32)


def _rows_per_process(batch_size: int, process_index: int, process_count: int) -> int:
    if batch_size % process_count:
        raise InputError(
            f"a batch of {batch_size} rows is not divisible by {process_count} processes: "
            "make data.batch_size a multiple of their number"
        )
    if not 0 <= process_index < process_count:
        raise InputError(f"process_index must be in [0, {process_count}), got {process_index}")
    return batch_size // process_count


def _require_one_window(name: str, tokens: np.ndarray, context: int) -> None:
    if len(tokens) <= context:
        raise InputError(
            f"the {name} part of the corpus has {len(tokens)} tokens, less than a context of {context} and "
            "one more: take a larger corpus (of a folder whole files are held out) or a smaller model.context"
        )


def _require_bytes(vocab_size: int) -> None:
    if vocab_size < 256:
        raise InputError(f"text is read as bytes and needs model.vocab_size of 256 or more, got {vocab_size}")


def _read_path(path: Path, vocab_size: int, digest: "hashlib._Hash") -> tuple[np.ndarray, np.ndarray]:
    """The two parts of a corpus on disk; feeds its names and contents to `digest`."""
    train_bin, val_bin = path / "train.bin", path / "val.bin"
    if train_bin.exists() or val_bin.exists():
        for file in (train_bin, val_bin):
            if not file.exists():
                raise InputError(f"{path} has one of train.bin and val.bin but lacks {file.name}: add it")
        train = _map_tokens(train_bin, np.uint16, vocab_size, digest)
        return train, _map_tokens(val_bin, np.uint16, vocab_size, digest)
    if path.is_dir():
        return _read_folder(path, _text_files(path), vocab_size, digest)
    if path.suffix == ".bin":
        tokens = _map_tokens(path, np.uint16, vocab_size, digest)
    else:
        _require_bytes(vocab_size)
        tokens = _map_tokens(path, np.uint8, vocab_size, digest)
    cut = len(tokens) - round(HELD_OUT * len(tokens))
    return tokens[:cut], tokens[cut:]


def _map_tokens(path: Path, dtype: type[np.integer], vocab_size: int, digest: "hashlib._Hash") -> np.ndarray:
    """Maps a file of tokens into memory and, in one pass over it, checks them and feeds them to `digest`."""
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise InputError(f"{path} is empty: give a file with text or tokens")
    if size % width:
        raise InputError(
            f"{path} has {size} bytes, an odd number, so it is not an array of uint16 tokens: write it with "
            "`tokens.astype(np.uint16).tofile(...)`, or name a text file something else than .bin"
        )
    _digest_header(digest, path.name, size)
    tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        if chunk.max() >= vocab_size:
            raise InputError(
                f"{path} has token {chunk.max()}, outside model.vocab_size {vocab_size}: raise it to the "
                "vocabulary that the file was made with"
            )
        digest.update(chunk)
    return tokens


def _read_folder(
    root: Path, files: list[str], vocab_size: int, digest: "hashlib._Hash"
) -> tuple[np.ndarray, np.ndarray]:
    """Joins files (paths relative to `root`, sorted) into two parts and feeds them to `digest`."""
    _require_bytes(vocab_size)
    if not files:
        raise InputError(f"{root} holds no text files: give a folder with some")
    ranks = [int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64 for name in files]
    # A file is held out by its own name alone, whatever lies beside it; in a small folder the first to be.
    limit = max(HELD_OUT, min(ranks))
    train: list[bytes] = []
    validation: list[bytes] = []
    for name, rank in zip(files, ranks, strict=True):
        content = (root / name).read_bytes()
        _digest_header(digest, name, len(content))
        digest.update(content)
        (validation if rank <= limit else train).append(content)
    return np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(validation), np.uint8)


def _digest_header(digest: "hashlib._Hash", name: str, size: int) -> None:
    # With both lengths in it, no two different lists of files feed the same bytes.
    encoded = os.fsencode(name)
    digest.update(b"%d %d " % (len(encoded), size) + encoded)


def _files_under(root: Path, skip: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _stdlib_files(root: Path) -> list[str]:
    files = (file for file in _files_under(root, _NOT_LIBRARY) if file.suffix == ".py")
    return sorted(file.relative_to(root).as_posix() for file in files)


def _text_files(root: Path) -> list[str]:
    """The regular, visible files that have no NUL byte near their start, which is Git's test of a text."""
    files = []
    for file in _files_under(root, set()):
        if file.is_file():
            with file.open("rb") as stream:
                if b"\0" not in stream.read(8000):
                    files.append(file.relative_to(root).as_posix())
    return sorted(files)
