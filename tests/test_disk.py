"""Disks that are full, read-only or gone: one line, exit code 2, the last good checkpoint whole.

A real small disk (a tmpfs) is mounted for these tests, in a name space of their own; they are
skipped where that is not allowed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL, At, Run, assert_refused, listing, press_ctrl_c

import train
from data import runs

# In a process of its own, on a disk of its own: argv = disk, text, then the flags of the run
FULL = r"""
import json, os, subprocess, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = json.loads(os.environ["TEST_PATH"])
from conftest import At
from data import prepare, runs
import train
bins, copies, disk = map(Path, sys.argv[1:4])
flags, run = sys.argv[4:], disk / "run"
prepare.BINS, runs.plot = bins, lambda folder: None
state = lambda: {p.name: p.stat().st_mtime_ns for p in run.iterdir()}
tell = lambda **what: print("\ntold", json.dumps(what))

def fill():
    with open(disk / "filler", "wb", buffering=0) as f:
        while True:
            try:
                f.write(bytes(4096))
            except OSError:
                break

with At(9, fill):
    tell(full=train.main([*flags, "--out", str(run)]))
tell(left=[*state()], saved=torch.load(run / "ckpt.pt", weights_only=True)["state"]["step"])
(disk / "filler").unlink()
tell(resumed=train.main(["--resume", str(run)]))
subprocess.run(["cp", run / "log.csv", run / "ckpt.pt", copies], check=True)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
before = state()
tell(read_only=[train.main(["--resume", str(run)]), train.main([*flags, "--out", f"{disk}/new"])])
tell(untouched=before == state())
"""
RUN = ["--steps=30", "--save-every=4", "--log-every=1"]


def disk(at, script, *argv):
    """Run a script as root of a user name space with a disk of 1 MB at the folder `at`."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    at.mkdir()
    mount = f"mount -t tmpfs -o size=1000k small '{at}'"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no disk may be mounted here")
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    path = [str(Path(train.__file__).parent), str(Path(__file__).parent)]
    env = os.environ | {"TEST_PATH": json.dumps(path)}
    return subprocess.run([*command, sys.executable, "-c", script, *map(str, argv)],
                          capture_output=True, encoding="utf-8", env=env, timeout=120)  # fmt: skip


def test_a_disk_that_fills_up_or_is_read_only_loses_nothing(tmp_path, place, fit):
    unbroken, at = fit(*RUN), tmp_path / "disk"
    flags = [*SMALL, "--data", place / "text.txt", *RUN]
    done = disk(at, FULL, place / "bins", tmp_path, at, *flags)
    told = {}
    for line in done.stdout.splitlines():
        if line.startswith("told "):
            told |= json.loads(line[5:])
    assert done.returncode == 0, done.stderr
    assert (told["full"], told["resumed"]) == (2, 0), done.stderr
    assert told["saved"] >= 8  # whole, though the disk was full when the next was written
    assert not [name for name in told["left"] if name.endswith(".tmp")]
    assert Run(tmp_path).timeless() == unbroken.timeless()
    for name, w in unbroken.weights.items():
        assert torch.equal(Run(tmp_path).weights[name], w)
    assert (told["read_only"], told["untouched"]) == ([2, 2], True)
    errors = [line for line in done.stderr.splitlines() if line]
    assert len(errors) == 3, done.stderr
    for line, words in zip(
        errors, ("No space left", "Read-only", "cannot be written"), strict=True
    ):
        assert line.startswith("train.py: error: ") and words in line
    assert "--resume" in errors[0]


def test_a_folder_that_is_deleted_meanwhile_is_one_line(fit, place, capsys):
    folder = place / "deleted"
    argv = [*SMALL, "--data", str(place / "text.txt"), *RUN, "--out", str(folder)]
    with At(6, lambda: shutil.rmtree(folder)):
        code = train.main(argv)
    assert_refused(code, capsys, "gone")
    assert not folder.exists()


def test_a_checkpoint_that_is_deleted_meanwhile_is_made_again(place):
    folder = place / "without"
    argv = [*SMALL, "--data", str(place / "text.txt"), *RUN, "--out", str(folder)]
    with At(6, lambda: [path.unlink() for path in folder.glob("ckpt*")]):
        assert train.main(argv) == 0
    assert Run(folder).ckpt["state"]["step"] == 30


def test_memory_that_runs_out_is_one_line_and_the_run_can_go_on(fit, capsys, monkeypatch):
    unbroken = fit(*RUN)

    def full():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    with At(6, full):
        run = fit(*RUN)
    assert_refused(run.code, capsys, "memory", "--batch")
    assert run.json("status.json")["status"] == "interrupted"
    assert run.ckpt["state"]["step"] == 4
    again = fit(resume=run)
    assert again.code == 0 and again.timeless() == unbroken.timeless()


def test_without_pictures_a_run_is_finished_all_the_same(fit, monkeypatch, capsys):
    def broken(folder):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(runs, "plot", broken)
    monkeypatch.setattr(train, "sample_run", lambda folder, **options: "")
    run = fit(whole=True)
    assert (run.code, run.json("status.json")["status"]) == (0, "finished")
    assert "warning: no pictures: no matplotlib" in capsys.readouterr().err


# ---- Files that are not what they should be ------------------------------------------------------


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of a run that waits to be resumed, in a folder of its own."""
    return Run(shutil.copytree(stopped.folder, tmp_path / "copy"))


def changed(**new):
    def change(state):
        return state | new

    return change


def other_shape(state):
    return state | {"model": {k: v[..., :1].clone() for k, v in state["model"].items()}}


def moments_of_another(state):
    optimizer = state["optimizer"]
    return state | {"optimizer": optimizer | {"state": {0: {"step": torch.tensor(1.0)}}}}


def of_optimizer(**new):
    """Change these moments of the first parameter."""

    def change(state):
        of = state["optimizer"]["state"]
        first = of[0] | {k: v(of[0][k]) if callable(v) else v for k, v in new.items()}
        return state | {"optimizer": state["optimizer"] | {"state": of | {0: first}}}

    return change


def of_state(**new):
    return lambda s: s | {"state": s["state"] | new}


WRONG = {  # what is done to the checkpoint's dict: the words of the line
    "an older version": (changed(format=1), "format"),
    "a newer version": (changed(format=99), "format"),
    "no version": (lambda state: {k: v for k, v in state.items() if k != "format"}, "format"),
    "a list": (lambda state: [state], "format"),
    "other shapes": (other_shape, "fit"),
    "no weights": (lambda state: {k: v for k, v in state.items() if k != "model"}, "fit"),
    "weights that are no dict": (changed(model=3), "fit"),
    "another's moments": (moments_of_another, "fit"),
    "no state": (changed(state=None), "fit"),
    "a step beyond the end": (lambda s: s | {"state": s["state"] | {"step": 10**6}}, "fit"),
    "moments of other shapes": (of_optimizer(exp_avg=torch.zeros(1)), "fit"),
    "moments that are whole numbers": (of_optimizer(exp_avg=lambda v: v.int()), "fit"),
    "a step count that is no number": (of_optimizer(step=torch.zeros(3)), "fit"),
    "whole numbers for weights": (
        lambda s: s | {"model": {k: v.int() for k, v in s["model"].items()}},
        "fit",
    ),
    "a best that is none": (of_state(best=5), "fit"),
    "a best without numbers": (of_state(best={"step": "x"}), "fit"),
    "a first loss that is a text": (of_state(first="a"), "fit"),
    "no running mean": (of_state(mean="x"), "fit"),
    "endless seconds": (of_state(seconds=float("nan")), "fit"),
    "no count of spikes": (of_state(spikes=None), "fit"),
    "a version that is a tensor": (changed(format=torch.tensor([2, 2])), "format"),
    "a setting that is a tensor": (
        lambda s: s | {"settings": s["settings"] | {"lr": torch.tensor([1.0, 2.0])}},
        "--lr",
    ),
    "another text": (changed(data="0" * 64), "text"),
    "other settings": (lambda s: s | {"settings": s["settings"] | {"lr": 0.5}}, "--lr"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_touched(case, copy, capsys):
    change, word = WRONG[case]
    torch.save(change(copy.ckpt), copy.folder / "ckpt.pt")
    before = listing(copy.folder)
    assert_refused(train.main(["--resume", str(copy.folder)]), capsys, "ckpt|checkpoint", word)
    assert listing(copy.folder) == before


@pytest.mark.parametrize("where", ["whole file", "model", "state", "optimizer"])
def test_a_malicious_pickle_does_nothing(where, copy, tmp_path, capsys):
    made = tmp_path / "made by the checkpoint"
    evil = Evil(made)
    torch.save(evil if where == "whole file" else copy.ckpt | {where: evil},
               copy.folder / "ckpt.pt")  # fmt: skip
    assert_refused(train.main(["--resume", str(copy.folder)]), capsys, "ckpt.pt")
    assert not made.exists()
    torch.load(copy.folder / "ckpt.pt", weights_only=False)
    assert made.exists()  # it is a real one: read the unsafe way it runs


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_every_flipped_bit_is_noticed(copy, capsys):
    """One in every so many bytes of the file; none of them may pass for the checkpoint."""
    path = copy.folder / "ckpt.pt"
    data = path.read_bytes()
    good = runs.load_checkpoint(path)
    for at in range(0, len(data), max(1, len(data) // 200)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        try:
            state = runs.load_checkpoint(path)
        except ValueError:
            continue  # noticed; where the bit has no meaning (padding), nothing may differ
        assert same(state, good)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused_and_the_one_before_offered(share, copy, capsys):
    path = copy.folder / "ckpt.pt"
    data = path.read_bytes()
    shutil.copy(path, copy.folder / "ckpt.prev.pt")
    path.write_bytes(data[: int(share * len(data))])
    assert_refused(train.main(["--resume", str(copy.folder)]), capsys, "ckpt.prev.pt")
    assert train.main(["--resume", str(copy.folder / "ckpt.prev.pt")]) == 0


EDITED = {"lr": -1.0, "steps": 0, "batch": "4", "clip": None, "dtype": "float8", "seed": 1.5,
          "layers": 2.5, "norm": "nothing", "checkpoint_activations": 1, "warmup": 10**9,
          "size": "huge", "beta2": float("nan"), "lr ": 3, "accum": 10**400, "eval_every": 10**400,
          "norm_eps": 10**400, "device": "auto", "compile": "auto"}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_config_is_refused(name, copy, capsys):
    path = copy.folder / "config.json"
    d = json.loads(path.read_text(encoding="utf-8"))
    if name not in d:
        del d[name.strip()]
    path.write_text(json.dumps(d | {name: EDITED[name]}), encoding="utf-8")
    before = listing(copy.folder)
    assert_refused(
        train.main(["--resume", str(copy.folder)]), capsys, name.strip().replace("_", ".")
    )
    assert listing(copy.folder) == before


TABLES = {  # what log.csv holds instead
    "another program's": "epoch,acc\n1,0.5\n",
    "no header": "1,32,0.1,5.5,,,0.001,0.5,300\n",
    "other columns": "step,foo\n1,2\n",
    "a blank line": "{log}\n\n",
    "a byte-order mark": "\ufeff{log}",
    "rows out of order": "{header}\n2{rest}\n1{rest}\n",
    "rows with fewer cells": "{header}\n1,2,3\n2{rest}\n",
    "an endless number": "{header}\n" + "9" * 5000 + "{rest}\n1{rest}\n",
    "a picture": "\x89PNG\r\n\x1a\n\0\0",
}


@pytest.mark.parametrize("file", ["log.csv", "layers.csv"])
@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_is_not_the_runs_is_left_as_it_is(case, file, copy, capsys):
    path = copy.folder / file
    log = path.read_text(encoding="utf-8")
    header = log.splitlines()[0]
    parts = {"log": log, "header": header, "rest": "," * header.count(",")}
    path.write_text(TABLES[case].format(**parts), encoding="utf-8")
    shutil.copy(copy.folder / "ckpt.pt", copy.folder / "ckpt.prev.pt")
    before = listing(copy.folder)
    for name in ("", "ckpt.prev.pt"):
        assert_refused(train.main(["--resume", str(copy.folder / name)]), capsys, file)
        assert listing(copy.folder) == before


def test_hard_links_of_a_killed_resume_are_not_written_through(copy):
    """ckpt.pt, the one before and a leftover of a kill are one file under three names."""
    ckpt, older = copy.folder / "ckpt.pt", copy.folder / "ckpt.prev.pt"
    for name in (older, copy.folder / "ckpt.pt.tmp", copy.folder / "ckpt.prev.pt.tmp"):
        os.link(ckpt, name)
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ckpt.stat().st_size // 2, hard))  # a full disk
    try:
        assert train.main(["--resume", str(older)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert runs.load_checkpoint(ckpt)["state"]["step"] == 2
    assert runs.load_checkpoint(older)["state"]["step"] == 2
    assert train.main(["--resume", str(copy.folder)]) == 0
    assert runs.load_checkpoint(ckpt)["state"]["step"] == 6


def test_a_checkpoint_under_another_name_is_read_and_kept(copy):
    for name, link in (("keep.pt", os.link), ("latest.pt", lambda a, b: os.symlink(a.name, b))):
        at = copy.folder / name
        data = (copy.folder / "ckpt.pt").read_bytes()
        link(copy.folder / "ckpt.pt", at)
        assert train.main(["--resume", str(at)]) == 0
        assert not (copy.folder / "ckpt.pt").is_symlink()
        if name == "keep.pt":
            assert at.read_bytes() == data
            shutil.copy(at, copy.folder / "ckpt.pt")


def test_a_named_checkpoint_is_used_though_ckpt_is_gone(copy, capsys):
    (copy.folder / "ckpt.pt").rename(copy.folder / "mine.pt")
    (copy.folder / "status.json").write_text('{"status": "running"}', encoding="utf-8")
    (copy.folder / "log.csv").unlink()
    assert train.main(["--resume", str(copy.folder / "mine.pt")]) == 0
    assert int(copy.rows()[0]["step"]) == 6  # it went on from step 2: only the last is logged


def test_settings_of_an_edited_optimizer_have_no_effect(copy, fit):
    whole = fit("--norm=gpas")
    state = copy.ckpt
    groups = [g | {"betas": (0.1, 0.2), "weight_decay": 9.0, "maximize": True, "lr": 3.0}
              for g in state["optimizer"]["param_groups"]]  # fmt: skip
    torch.save(state | {"optimizer": state["optimizer"] | {"param_groups": groups}},
               copy.folder / "ckpt.pt")  # fmt: skip
    assert train.main(["--resume", str(copy.folder)]) == 0
    assert all(torch.equal(w, whole.weights[k]) for k, w in copy.weights.items())


def test_token_files_that_were_changed_are_made_again(fit, place):
    text = place / "spoilt.txt"
    text.write_bytes(LINE.encode() * 200)
    whole = fit("--data", text)
    folder = next((place / "bins").glob("spoilt-*"))
    for name, data in (("train.bin", bytes((folder / "train.bin").stat().st_size)),
                       ("val.bin", b"\xff" * (folder / "val.bin").stat().st_size)):  # fmt: skip
        (folder / name).write_bytes(data)
        again = fit("--data", text)
        assert again.code == 0 and again.timeless() == whole.timeless()


def test_a_text_that_moved_is_the_same_text(fit, place, capsys):
    text, moved = place / "here.txt", place / "there.txt"
    text.write_bytes(LINE.encode() * 200)
    with At(2, press_ctrl_c):
        run = fit("--data", text)
    capsys.readouterr()
    text.rename(moved)
    assert_refused(fit(resume=run).code, capsys, "here.txt")
    assert fit("--data", moved, resume=run).code == 0
    moved.write_bytes(LINE.encode() * 201)
    assert_refused(fit("--data", moved, resume=run).code, capsys, "changed")


@pytest.mark.parametrize("left", ["config.json", "log.csv", "ckpt.pt"])
def test_a_folder_with_files_of_a_run_is_not_taken(left, copy, place, capsys):
    for path in copy.folder.iterdir():
        if path.name != left:
            path.unlink()
    before = listing(copy.folder)
    argv = [*SMALL, "--data", str(place / "text.txt"), "--out", str(copy.folder)]
    assert_refused(train.main(argv), capsys, "holds a run")
    assert listing(copy.folder) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_no_text(fit, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(fit("--data", tmp_path / "pipe").code, capsys, "regular file")


# ---- Texts ---------------------------------------------------------------------------------------

LINE = "a line of text, and another — ünï\n"
TEXTS = {  # content, exit code, words of the line
    "empty": (b"", 2, "empty"),
    "one byte": (b"x", 2, "too short"),
    "shorter than a block": (b"ten words of text", 2, "too few|too short"),
    "no line break": (LINE.replace("\n", " ").encode() * 200, 0, ""),
    "Windows line ends": (LINE.replace("\n", "\r\n").encode() * 200, 0, ""),
    "old Mac line ends": (LINE.replace("\n", "\r").encode() * 200, 0, ""),
    "a byte-order mark": (b"\xef\xbb\xbf" + LINE.encode() * 200, 0, ""),
    "NUL bytes": (b"a\0b\0" * 2000, 0, ""),
    "only line breaks": (b"\n" * 3000, 0, ""),
    "only spaces": (b" " * 3000, 0, ""),
    "one character": ("🙂".encode() * 1000, 0, ""),
    "only separators": (b"<|endoftext|>\n" * 500, 2, "too short|empty|too few"),
    "separators inside lines": (b"<|endoftext|> and <|endoftext|>\n" * 500, 0, ""),
    "control characters": (bytes(range(32)) * 200, 0, ""),
    "invalid UTF-8": (LINE.encode() * 200 + b"\xff\xfe" + LINE.encode(), 2, "UTF-8 at byte"),
    "cut inside a character": (LINE.encode() * 200 + "ü".encode()[:1], 2, "UTF-8 at byte"),
    "UTF-16": (LINE.encode("utf-16") * 20, 2, "UTF-8"),
    "a surrogate": (LINE.encode() * 200 + b"\xed\xa0\x80", 2, "UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20, 2, "UTF-8"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_any_text_trains_or_is_one_line(case, place, fit, capsys):
    content, code, word = TEXTS[case]
    text = place / f"{case}.txt"
    text.write_bytes(content)
    before = {path for path in place.rglob("*")}
    run = fit("--data", text, "--steps=2")
    assert run.code == code
    if code == 2:
        assert_refused(code, capsys, word)
        assert {path for path in place.rglob("*")} == before
    else:
        assert run.json("status.json")["status"] == "finished"


def test_a_text_too_short_leaves_nothing(place, fit, capsys):
    """Neither a run nor its tokens."""
    text = place / "fifty.txt"
    text.write_bytes(b"0123456789" * 50)
    before = {path for path in place.rglob("*")}
    for block in (60, 470):
        assert_refused(fit("--data", text, f"--block={block}").code, capsys, f"--block {block}")
    assert {path for path in place.rglob("*")} == before
    assert fit("--data", text, "--block=40").code == 0
    assert_refused(fit("--data", text, "--block=60").code, capsys, "--block 60")


def test_a_folder_or_a_pipe_is_no_text(place, fit, capsys):
    assert_refused(fit("--data", place).code, capsys, "folder")
    assert_refused(fit("--data", place / "text.txt" / "x").code, capsys, "no file")
    assert fit("--data", os.devnull).code == 2


def test_one_line_of_50_megabytes(place, fit, thorough):
    if not thorough:
        pytest.skip("with --thorough only: minutes")
    text = place / "long.txt"
    text.write_bytes(b"all on one line, " * 3_000_000)
    assert fit("--data", text, "--vocab=2048", "--steps=1", "--block=512", "--batch=8").code == 0
