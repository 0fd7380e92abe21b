"""The scripts in poor surroundings: a C locale, no home, a read-only install folder, odd paths,
another working folder, warnings as errors, no network. Each is a process of its own, as users
start them."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SMALL, TEXT, Run

import train
from data import prepare

ROOT = Path(train.__file__).resolve().parent
STRICT = ["-X", "utf8=0", "-X", "warn_default_encoding", "-W", "error::EncodingWarning",
          "-W", "error::FutureWarning"]  # fmt: skip
# Blocks every socket to the network, before the script starts (sitecustomize is Python's hook).
NO_NETWORK = """
import socket
def refuse(*args, **kw):
    raise AssertionError("the script wanted the network")
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
"""


@pytest.fixture(scope="module")
def poor(checkout, tmp_path_factory):
    """poor(script, flags…, cwd): the completed process of a script in poor surroundings."""
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0",
           "PYTHONPATH": str(hook), "OMP_NUM_THREADS": "1"}  # fmt: skip
    env |= {
        k: os.environ[k] for k in ("SYSTEMROOT", "TMPDIR", "LD_LIBRARY_PATH") if k in os.environ
    }

    def call(script, *argv, cwd, folder=checkout, strict=STRICT):
        command = [sys.executable, *strict, folder / script, *argv]
        return subprocess.run(list(map(os.fspath, command)), cwd=cwd, env=env, timeout=180,
                              capture_output=True)  # fmt: skip

    return call


def test_all_at_once(poor, tmp_path):
    """A run from another folder, in a folder and on a text with spaces and letters beyond ASCII."""
    text, out = tmp_path / "mein tëxt – 文.txt", tmp_path / "läufe hier" / "α run"
    text.write_bytes(TEXT.encode())
    (tmp_path / "else").mkdir()
    argv = [*SMALL, "--norm=gpas", "--data", text, "--out", out]
    done = poor("train.py", *argv, cwd=tmp_path / "else")
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    assert Run(out).json("status.json")["status"] == "finished"
    assert (out / "loss.png").stat().st_size > 1000
    assert not any((tmp_path / "else").iterdir())
    argv = [out, "--prompt", "naïve – 文".encode(), "--tokens=20"]
    done = poor("sample.py", *argv, cwd=tmp_path / "else")
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    assert done.stdout.startswith("naïve – 文".encode())
    done = poor("train.py", "--resume", tmp_path / "läufe hier" / "β run", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr.decode()


def test_the_table_of_variants_prints_in_a_c_locale(poor, tmp_path):
    done = poor("nanonorm.py", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()


def test_the_network_really_is_blocked(poor, tmp_path):
    (tmp_path / "call.py").write_text("import socket\nsocket.create_connection(('h', 80))\n")
    done = poor("call.py", cwd=tmp_path, folder=tmp_path, strict=[])
    assert done.returncode == 1 and b"wanted the network" in done.stderr


def test_a_read_only_install_folder(checkout, tmp_path):
    """The scripts and the text lie where one may not write: --out goes elsewhere."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    at, flags = tmp_path / "install", [*SMALL, "--vocab=258", f"--data={checkout}/text.txt"]
    at.mkdir()
    mount = f"mount --bind '{checkout}' '{at}' && mount -o remount,ro,bind '{at}'"

    def call(*argv):
        script = f'{mount} && touch "{at}/x" 2>/dev/null; exec "$@"'
        command = ["unshare", "-Urm", "sh", "-c", script, "sh", sys.executable, at / "train.py"]
        return subprocess.run([*command, *argv], capture_output=True, cwd=tmp_path, timeout=180,
                              env=os.environ | {"TMPDIR": str(tmp_path)})  # fmt: skip

    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    before = {path for path in checkout.rglob("*") if "__pycache__" not in path.parts}
    done = call(*flags)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr.decode()
    assert b"--out" in done.stderr
    done = call(*flags, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr.decode()
    assert Run(tmp_path / "out").json("status.json")["status"] == "finished"
    after = {path for path in checkout.rglob("*") if "__pycache__" not in path.parts}
    assert after == before


# ---- Streams that are closed, signals at any time ------------------------------------------------


@pytest.fixture
def command(checkout, tmp_path):
    argv = [sys.executable, checkout / "train.py", *SMALL, "--data", checkout / "text.txt"]
    argv += ["--out", tmp_path / "run", "--steps=100000", "--log-every=1"]
    return list(map(str, argv))


def wait_for_a_row(run, p):
    while not (run / "log.csv").exists() or (run / "log.csv").stat().st_size < 300:
        assert p.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("sig", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_though_the_reader_has_gone(command, tmp_path, sig):
    """Ctrl-C in `train.py 2>&1 | tee log` ends tee as well; a closed terminal ends both."""
    p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for_a_row(tmp_path / "run", p)
        p.stdout.close()
        time.sleep(0.2)
        assert p.poll() is None  # the run goes on
        p.send_signal(getattr(signal, sig))
        assert p.wait(60) == 130
    finally:
        p.kill()
    run = Run(tmp_path / "run")
    status = run.json("status.json")
    assert status["status"] == "interrupted" and status["step"] == run.ckpt["state"]["step"]


def test_without_streams_a_run_is_finished(command, tmp_path):
    close = f"exec {shlex.join([*command, '--steps=3'])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", close], timeout=60).returncode == 0
    assert Run(tmp_path / "run").json("status.json")["status"] == "finished"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_sample_that_cannot_be_written_is_one_line(fit, checkout):
    run = fit("--steps=1")
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, checkout / "sample.py", run.folder]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert b"No space left" in done.stderr and b"Traceback" not in done.stderr


def test_sigterm_while_the_text_is_prepared_leaves_nothing(place, monkeypatch, tmp_path):
    def stopped(*args, **kw):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    text = place / "stopped.txt"
    text.write_bytes(TEXT.encode() + b"more\n")
    before = {path for path in place.rglob("*")}
    monkeypatch.setattr(prepare, "encode", stopped)
    argv = [*SMALL, "--data", str(text), "--out", str(tmp_path / "run")]
    assert train.main(argv) == 130
    assert {path for path in place.rglob("*")} == before and not (tmp_path / "run").exists()


# ---- The same numbers twice ----------------------------------------------------------------------


def same_weights(a, b):
    return all(torch.equal(w, b.weights[name]) for name, w in a.weights.items())


@pytest.mark.parametrize("flags", [
    ["--eval-every=1"], ["--log-every=1"], ["--save-every=1"],
    ["--eval-every=1", "--log-every=1", "--save-every=1"],
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("norm", ["pre", "span+gpas"])
def test_looking_does_not_disturb(fit, norm, flags):
    """Every step, or only at the end: the same weights, optimizer included."""
    never = ["--eval-every=99", "--log-every=99", "--save-every=99"]
    plain, looked = fit("--norm", norm, *never), fit("--norm", norm, *never, *flags)
    assert same_weights(plain, looked)
    moments = [run.ckpt["optimizer"]["state"] for run in (plain, looked)]
    for i, state in moments[0].items():
        assert all(torch.equal(v, moments[1][i][k]) for k, v in state.items())
    assert plain.rows()[-1]["loss"] == looked.rows()[-1]["loss"]


def test_seed_0_is_a_seed(fit):
    zero, again, one = fit("--seed=0"), fit("--seed=0"), fit("--seed=1")
    assert same_weights(zero, again) and not same_weights(zero, one)


def test_what_was_drawn_before_does_not_matter(fit):
    torch.manual_seed(1)
    one = fit()
    torch.rand(17)
    assert same_weights(one, fit())
