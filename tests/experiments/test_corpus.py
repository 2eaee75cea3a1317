"""Corpora of every kind, their errors, and batches as a function of seed and step."""

import hashlib
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import corpus as corpora
from experiments.corpus import Corpus, train_batches, validation_batches
from experiments.errors import InputError

CONTEXT = 8
WINDOWS = 37
NUMBERS = Corpus(
    # Token k of window w is 8 w + k, so that a row names its window; 5 tokens at the end fill no window.
    train=np.arange(WINDOWS * CONTEXT + 6, dtype=np.uint16),
    validation=np.arange(1000, 1000 + 21 * CONTEXT + 1, dtype=np.uint16),
    fingerprint="",
    description="",
)


def load(path, *, vocab_size=256, context=CONTEXT):
    return corpora.load(str(path), vocab_size=vocab_size, context=context)


def batches(start, stop, *, corpus=NUMBERS, batch_size=8, seed=3, **options):
    options = {"context": CONTEXT, "start_step": start, "stop_step": stop, **options}
    return list(train_batches(corpus, batch_size=batch_size, seed=seed, **options))


def write_texts(folder: Path, count: int = 200) -> dict[str, bytes]:
    texts = {f"{'sub/' * (i % 3)}{i:03d}.txt": b"%d." % i * (5 + i % 7) for i in range(count)}
    for name, content in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return texts


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 0.02 * 2**64


# --- training batches


def test_rows_are_windows_of_the_text():
    for batch in batches(0, 10):
        assert batch.shape == (8, CONTEXT + 1) and batch.dtype == np.int32
        assert (np.diff(batch) == 1).all()
        assert (batch[:, 0] % CONTEXT == 0).all()


def test_every_epoch_visits_every_window_once_in_a_new_order():
    starts = np.concatenate([batch[:, 0] for batch in batches(0, 2 * WINDOWS)])
    epochs = starts[: 16 * WINDOWS].reshape(16, WINDOWS) // CONTEXT
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(WINDOWS), (16, 1)))
    assert len(np.unique(epochs, axis=0)) == 16


def test_batches_depend_on_seed_and_step_alone():
    whole = batches(0, 12)
    np.testing.assert_array_equal(whole, batches(0, 12))
    for start in (1, 5, 11):
        np.testing.assert_array_equal(whole[start:], batches(start, 12))
    assert batches(12, 12) == []
    assert not np.array_equal(whole, batches(0, 12, seed=4))


def test_order_is_stable():
    # What a checkpoint of yesterday counts on: the order of an earlier build.
    starts = np.concatenate([batch[:, 0] for batch in batches(1000, 1002)]) // CONTEXT
    assert starts.tolist() == [7, 14, 22, 10, 32, 34, 28, 9, 21, 35, 6, 11, 13, 3, 19, 16]


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_processes_share_the_global_batch(process_count):
    shares = [
        batches(3, 9, process_index=index, process_count=process_count) for index in range(process_count)
    ]
    assert shares[0][0].shape == (8 // process_count, CONTEXT + 1)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), batches(3, 9))


def test_batches_come_ahead_of_their_use():
    reads = []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    watched = Corpus(NUMBERS.train.view(Watched), NUMBERS.validation, "", "")
    iterator = train_batches(watched, batch_size=4, context=CONTEXT, seed=0, start_step=0, stop_step=10**6)
    next(iterator)
    deadline = time.monotonic() + 10
    while len(reads) <= 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    iterator.close()
    assert 4 < len(reads) < 100


# --- validation batches


def test_validation_batches_are_fixed_and_without_repetition():
    found = validation_batches(NUMBERS, batch_size=4, context=CONTEXT, count=3)
    np.testing.assert_array_equal(found, validation_batches(NUMBERS, batch_size=4, context=CONTEXT, count=3))
    starts = np.concatenate([batch[:, 0] for batch in found])
    assert found[0].shape == (4, CONTEXT + 1) and found[0].dtype == np.int32
    assert len(found) == 3 and len(set(starts)) == 12
    assert (np.diff(found[0]) == 1).all() and ((starts - 1000) % CONTEXT == 0).all()
    # Spread over the text: a window from each of its thirds at least.
    assert set((starts - 1000) // CONTEXT // 7) == {0, 1, 2}


def test_validation_has_as_many_whole_batches_as_there_are():
    found = validation_batches(NUMBERS, batch_size=4, context=CONTEXT, count=100)
    assert len(found) == 5  # of 21 windows
    with pytest.raises(InputError, match=r"21 windows of 8 tokens, too few for one batch of 22"):
        validation_batches(NUMBERS, batch_size=22, context=CONTEXT, count=1)


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_validation_batches(process_count):
    shares = [
        validation_batches(
            NUMBERS, batch_size=4, context=CONTEXT, count=3, process_index=i, process_count=process_count
        )
        for i in range(process_count)
    ]
    whole = validation_batches(NUMBERS, batch_size=4, context=CONTEXT, count=3)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: batches(0, 1, **o),
        lambda **o: validation_batches(NUMBERS, batch_size=8, context=CONTEXT, count=1, **o),
    ],
    ids=["train", "validation"],
)
def test_batch_must_divide_among_processes(make):
    with pytest.raises(InputError, match="batch of 8 rows is not divisible by 3 processes"):
        make(process_index=0, process_count=3)
    with pytest.raises(InputError, match=r"process_index must be in \[0, 2\), got 2"):
        make(process_index=2, process_count=2)


def test_training_text_shorter_than_a_window():
    short = Corpus(NUMBERS.train[:CONTEXT], NUMBERS.validation, "", "")
    with pytest.raises(InputError, match="train part of the corpus has 8 tokens"):
        batches(0, 1, corpus=short)


# --- corpora


def test_standard_library_is_the_default_text():
    found = load(corpora.STDLIB)
    root = Path(sysconfig.get_path("stdlib"))
    assert found.train.dtype == np.uint8
    assert len(found.train) > 5_000_000
    assert 0.003 < len(found.validation) / len(found.train) < 0.05
    train, validation = found.train.tobytes(), found.validation.tobytes()
    for name in ("ast.py", "argparse.py", "json/decoder.py"):
        assert (root / name).read_bytes() in (validation if is_held_out(name) else train)
    some_test = next((root / "test").glob("test_a*.py"), None)
    if some_test is not None:
        assert some_test.read_bytes() not in train + validation
    assert load(corpora.STDLIB).fingerprint == found.fingerprint


def test_folder_holds_out_whole_files_by_the_hash_of_their_name(tmp_path):
    texts = write_texts(tmp_path)
    found = load(tmp_path)
    held_out = set(filter(is_held_out, texts))
    assert 1 <= len(held_out) <= 12
    expected = {
        part: b"".join(texts[name] for name in sorted(texts) if (name in held_out) == (part == "validation"))
        for part in ("train", "validation")
    }
    assert found.train.tobytes() == expected["train"]
    assert found.validation.tobytes() == expected["validation"]


def test_adding_a_file_moves_no_other(tmp_path):
    write_texts(tmp_path)
    before = load(tmp_path).validation.tobytes()
    (tmp_path / "new.txt").write_bytes(b"#" * 50)
    after = load(tmp_path)
    assert after.validation.tobytes().replace(b"#" * 50, b"") == before


def test_small_folder_still_holds_out_a_file(tmp_path):
    write_texts(tmp_path, count=3)
    found = load(tmp_path)
    assert len(found.train) and len(found.validation)


def test_folder_leaves_out_binary_and_hidden_files(tmp_path):
    write_texts(tmp_path)
    before = load(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".notes").write_text("hidden")
    assert load(tmp_path).fingerprint == before.fingerprint


def test_text_file_holds_out_its_end(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_bytes(bytes(range(256)) * 4)
    found = load(path)
    assert (len(found.train), len(found.validation)) == (1004, 20)
    assert found.train.tobytes() + found.validation.tobytes() == path.read_bytes()


def test_bin_is_mapped_and_holds_out_its_end(tmp_path):
    tokens = np.arange(5000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    found = load(tmp_path / "tokens.bin", vocab_size=5000)
    np.testing.assert_array_equal(np.concatenate([found.train, found.validation]), tokens)
    assert len(found.validation) == 100
    assert isinstance(found.train, np.memmap)
    # Its tokens are no bytes: a small vocabulary is no error.
    (tokens % 50).tofile(tmp_path / "tokens.bin")
    assert load(tmp_path / "tokens.bin", vocab_size=50).train.max() == 49


def test_folder_of_train_and_val_bins(tmp_path):
    train, validation = np.arange(100, dtype=np.uint16), np.arange(300, 350, dtype=np.uint16)
    train.tofile(tmp_path / "train.bin")
    validation.tofile(tmp_path / "val.bin")
    (tmp_path / "prepare.py").write_text("not part of the corpus")
    found = load(tmp_path, vocab_size=400)
    np.testing.assert_array_equal(found.train, train)
    np.testing.assert_array_equal(found.validation, validation)
    assert isinstance(found.validation, np.memmap)


def test_fingerprint_covers_names_contents_and_where_files_end(tmp_path):
    def fingerprint(**texts):
        folder = tmp_path / f"corpus{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_texts(folder, count=60)
        for name, text in texts.items():
            (folder / name).write_text(text)
        return load(folder).fingerprint

    variants = [
        fingerprint(a="xy", b="z"),
        fingerprint(a="x", b="yz"),
        fingerprint(a="xy", c="z"),
        fingerprint(a="xy"),
        # Without the lengths both would add the same bytes, "zabc".
        fingerprint(za="bc"),
        fingerprint(zab="c"),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint(a="xy", b="z") == variants[0]


def test_large_bins_are_checked_in_chunks(tmp_path, monkeypatch):
    path = tmp_path / "tokens.bin"
    tokens = np.arange(1000, dtype=np.uint16) % 50
    tokens.tofile(path)
    whole = load(path, vocab_size=50).fingerprint
    monkeypatch.setattr(corpora, "_CHUNK", 64)
    assert load(path, vocab_size=50).fingerprint == whole
    tokens[-1] = 50
    tokens.tofile(path)
    with pytest.raises(InputError, match="has token 50, outside model.vocab_size 50"):
        load(path, vocab_size=50)


def test_missing_corpus(tmp_path):
    with pytest.raises(InputError, match="no corpus at .*nowhere: give a text file"):
        load(tmp_path / "nowhere")
    (tmp_path / "val.bin").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="lacks train.bin"):
        load(tmp_path)


def test_empty_corpus(tmp_path):
    with pytest.raises(InputError, match="holds no text files"):
        load(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="empty.txt is empty"):
        load(tmp_path / "empty.txt")


def test_part_shorter_than_a_context(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 400)  # 392 and 8 tokens
    with pytest.raises(InputError, match="validation part of the corpus has 8 tokens"):
        load(path)
    assert len(load(path, context=7).validation) == 8
    with pytest.raises(InputError, match="train part of the corpus has 392 tokens"):
        load(path, context=392)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "one.txt").write_bytes(b"x" * 400)
    with pytest.raises(InputError, match="train part of the corpus has 0 tokens.*whole files are held out"):
        load(tmp_path / "only")


def test_bin_of_odd_length(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"x" * 101)
    with pytest.raises(InputError, match="odd.bin has 101 bytes, an odd number"):
        load(tmp_path / "odd.bin")


@pytest.mark.parametrize("kind", ["stdlib", "folder", "file"])
def test_text_needs_256_tokens(tmp_path, kind):
    write_texts(tmp_path)
    path = {"stdlib": "stdlib", "folder": tmp_path, "file": tmp_path / "000.txt"}[kind]
    with pytest.raises(InputError, match="model.vocab_size of 256 or more, got 255"):
        load(path, vocab_size=255)
