"""A run that is interrupted, killed or damaged goes on exactly, or one line says why not."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import (
    SMALL,
    TEXT,
    At,
    Killed,
    Run,
    assert_refused,
    assert_same,
    is_picture,
    kill,
    listing,
    press_ctrl_c,
    tensors,
)

import train

# ---- Interrupting and resuming ------------------------------------------------------------------


LONG = ["--steps=12", "--log-every=2", "--probe-every=2", "--eval-every=3", "--save-every=4"]
RESUMED = {
    "pre": [],
    "gpas, accumulated": ["--norm=gpas", "--accum=2", "--gate-clip=0.01"],
    "mix, bfloat16": ["--norm=mix+gpas", "--dtype=bfloat16", "--gpas-gate=sublayer"],
}


@pytest.fixture(scope="module", params=RESUMED.values(), ids=RESUMED)
def unbroken(fit, request):
    run = fit(*LONG, *request.param)
    assert run.code == 0
    run.flags = [*LONG, *request.param]
    return run


def assert_same_run(run, unbroken, sample=True):
    assert run.code == 0
    assert run.timeless() == unbroken.timeless()
    for name in ("layers.csv", "sample.txt")[: 1 + sample]:
        assert run.text(name) == unbroken.text(name), name
    assert_same(run.weights, unbroken.weights)
    moments, want = tensors(run.ckpt["optimizer"]), tensors(unbroken.ckpt["optimizer"])
    assert len(moments) == len(want) > 0
    assert all(torch.equal(a, b) for a, b in zip(moments, want, strict=True))
    status, whole = run.json("status.json"), unbroken.json("status.json")
    for key in ("status", "step", "best"):
        assert status[key] == whole[key]


@pytest.mark.parametrize("step", [1, 5, 8])
def test_an_interrupted_run_that_is_resumed_is_the_unbroken_run(fit, unbroken, step):
    with At(step, press_ctrl_c):
        run = fit(*unbroken.flags)
    assert run.code == 130
    status = run.json("status.json")
    assert (status["status"], status["step"]) == ("interrupted", step)
    assert run.ckpt["state"]["step"] == step  # saved first
    torch.manual_seed(5)
    assert_same_run(fit(resume=run), unbroken)


@pytest.mark.parametrize("step", [7, 11])
def test_a_killed_run_that_is_resumed_is_the_unbroken_run(fit, unbroken, step):
    """Rows after the last checkpoint are made again, not twice."""
    run = killed(fit, step, *unbroken.flags)
    assert int(run.rows()[-1]["step"]) > 4 * (step // 4)
    assert_same_run(fit(resume=run), unbroken)


def killed(fit, step, *flags):
    """The Run of a run that ended without notice in update `step` (0: see where it is called)."""
    folders = set(train.HERE.glob("out*"))  # the fixture `place`
    try:
        with At(step, kill):
            fit(*flags)
    except Killed:
        [folder] = set(train.HERE.glob("out*")) - folders
        return Run(folder)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(fit):
    unbroken = fit(*LONG)
    run = killed(fit, 3, *LONG)
    assert not (run.folder / "ckpt.pt").exists()
    assert_same_run(fit(resume=run), unbroken)


def test_a_row_cut_off_by_a_crash_is_made_again(fit, unbroken):
    run = killed(fit, 11, *unbroken.flags)
    for name in ("log.csv", "layers.csv"):
        path = run.folder / name
        path.write_bytes(path.read_bytes()[:-9])
    assert_same_run(fit(resume=run), unbroken)


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(fit):
    run = fit(*LONG)
    before, rows = run.weights, run.rows()
    again = fit(resume=run)
    assert (again.code, again.json("status.json")["status"]) == (0, "finished")
    assert_same(again.weights, before)
    assert again.rows() == rows


def test_what_does_not_touch_the_weights_may_change_on_resume(fit):
    unbroken = fit(*LONG, "--checkpoint-activations")
    with At(5, press_ctrl_c):
        run = fit(*LONG)
    changes = ["--log-every=1", "--eval-every=5", "--save-every=2", "--checkpoint-activations"]
    run = fit(*changes, resume=run)
    assert run.code == 0
    assert_same(run.weights, unbroken.weights)
    assert {str(step) for step in range(6, 13)} <= {row["step"] for row in run.rows()}
    assert run.json("config.json")["log_every"] == 1


@pytest.mark.parametrize(
    "change",
    "--lr=0.02 --norm=lns --norm=pre --seed=5 --steps=20 --layers=3 --dim=32 --batch=1 --accum=2 "
    "--warmup=1 --clip=0 --data=shakespeare --dtype=bfloat16 --gpas-gate=sublayer --vocab=300 "
    "--no-gpas-stop-gradient --embed-norm --compile=on".split(),
)
def test_what_would_change_the_weights_is_refused_on_resume(fit, stopped, change, capsys):
    before = listing(stopped.folder)
    code = fit(change, "--log-every=1", resume=stopped).code
    assert_refused(code, capsys, change.removeprefix("--no").removeprefix("--").split("=")[0])
    assert listing(stopped.folder) == before


def test_a_setting_given_again_unchanged_is_no_change(fit, place):
    with At(2, press_ctrl_c):
        run = fit("--norm=gpas")
    again = ["--norm=pre+gpas", "--lr=1e-2", "--dtype=auto", "--data", place / "text.txt"]
    assert fit(*again, resume=run).code == 0


@pytest.mark.parametrize("flags", [["--size=tiny"], ["--out=elsewhere"]])
def test_size_and_out_do_not_go_with_resume(fit, stopped, flags, capsys):
    assert_refused(fit(*flags, resume=stopped).code, capsys, flags[0].split("=")[0], "--resume")


def test_another_text_is_refused_on_resume(fit, place, capsys):
    text = place / "changing.txt"
    text.write_bytes(TEXT.encode())
    with At(2, press_ctrl_c):
        run = fit("--data", text)
    text.write_bytes(TEXT.replace("la", "lo").encode())
    capsys.readouterr()
    assert_refused(fit(resume=run).code, capsys, "changed")
    text.write_bytes(TEXT.encode())
    assert fit(resume=run).code == 0


def test_a_run_is_resumed_from_another_folder_than_it_was_begun_in(fit, place, monkeypatch):
    """The text was named by a path relative to the folder one was in."""
    monkeypatch.chdir(place)
    with At(2, press_ctrl_c):
        run = fit("--data=text.txt")
    (place / "sub").mkdir()
    monkeypatch.chdir(place / "sub")
    assert fit(resume=run).code == 0


DAMAGE = {
    "no config": ("config.json", None),
    "half a config": ("config.json", '{"size": "tiny", "layers"'),
    "another program's config": ("config.json", '{"n_layer": 12}'),
    "a list for a config": ("config.json", "[]"),
    "half a checkpoint": ("ckpt.pt", 2000),
    "text for a checkpoint": ("ckpt.pt", "hello\n"),
}


@pytest.mark.parametrize("file, content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_refused_in_one_line(fit, stopped, tmp_path, file, content, capsys):
    for path in stopped.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / file
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        path.write_bytes(path.read_bytes()[:content])
    else:
        path.write_text(content, encoding="utf-8")
    assert_refused(fit(resume=Run(tmp_path)).code, capsys, file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows a machine without CUDA")
def test_a_run_from_a_gpu_gives_a_line_on_a_machine_without(fit, stopped, tmp_path, capsys):
    """Also when one follows the advice to say --device auto."""
    for path in stopped.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"device": "cuda"}))
    assert_refused(fit(resume=Run(tmp_path)).code, capsys, "cuda")
    assert fit("--device=auto", resume=Run(tmp_path)).code in (0, 2)


def fail_in_the_second_save(monkeypatch, error):
    """The second checkpoint is half written when the error comes. Returns the list of calls."""
    save, calls = torch.save, []

    def half(obj, file, *more):
        calls.append(1)
        if len(calls) < 2:
            return save(obj, file, *more)
        file.write(b"PK half a file")
        raise error

    monkeypatch.setattr(torch, "save", half)
    return calls


def test_there_is_a_whole_checkpoint_while_another_is_written(fit, monkeypatch):
    """A full disk, or the end of the process, in the midst of the second save."""
    calls = fail_in_the_second_save(monkeypatch, Killed())
    run = killed(fit, 0, *LONG)
    monkeypatch.undo()
    assert len(calls) == 2
    assert run.ckpt["model"].keys()
    unbroken = fit(*LONG)
    assert_same_run(fit(resume=run), unbroken)


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(fit, monkeypatch, capsys):
    fail_in_the_second_save(monkeypatch, OSError(28, "No space left on device"))
    run = fit(*LONG)
    assert_refused(run.code, capsys, "space")
    assert run.ckpt["state"]["step"] == 4
    assert not [path for path in run.folder.iterdir() if "tmp" in path.name]


def test_the_checkpoint_before_the_last_may_be_named_to_resume_from(fit):
    unbroken = fit(*LONG)
    with At(10, press_ctrl_c):
        run = fit(*LONG)
    (run.folder / "ckpt.pt").write_bytes(b"damaged")
    code = train.main(["--resume", str(run.folder / "ckpt.prev.pt")])
    assert_same_run(Run(run.folder, code), unbroken, sample=False)


def test_a_checkpoint_of_another_model_is_refused(fit, stopped, tmp_path, capsys):
    for path in stopped.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    other = fit("--norm=gpas", "--layers=3", "--steps=1")
    (tmp_path / "ckpt.pt").write_bytes((other.folder / "ckpt.pt").read_bytes())
    capsys.readouterr()
    assert_refused(fit(resume=Run(tmp_path)).code, capsys, "ckpt.pt", r"--layers 2 \(3\)")


def test_a_second_process_is_kept_out_of_a_folder_in_use(fit, stopped, capsys):
    pytest.importorskip("fcntl")
    codes = []
    with At(1, lambda: codes.append(fit(resume=stopped).code)):
        # the hook fires in the outer run below, which holds the folder of `stopped`
        with At(1, lambda: None):
            outer = Run(stopped.folder, train.main(["--resume", str(stopped.folder)]))
    assert outer.code == 0
    assert codes == [2]
    assert "in use" in capsys.readouterr().err


def test_ctrl_c_before_the_first_step_gives_130_without_a_traceback(fit, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "prepare", interrupted)
    assert fit().code == 130


def test_sigterm_saves_as_ctrl_c_does(fit):
    with At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        run = fit()
    assert run.code == 130
    assert (run.json("status.json")["status"], run.ckpt["state"]["step"]) == ("interrupted", 3)


def test_ctrl_c_to_the_command_saves_and_exits_130(checkout, tmp_path):
    argv = [sys.executable, checkout / "train.py", *SMALL, "--steps=100000", "--log-every=1"]
    argv += ["--data", checkout / "text.txt", "--out", tmp_path / "run"]
    p = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    try:
        while not p.stdout.readline().startswith("step "):
            assert p.poll() is None
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert p.returncode == 130
    assert "Traceback" not in err
    run = Run(tmp_path / "run")
    status = run.json("status.json")
    assert status["status"] == "interrupted"
    assert 1 <= status["step"] == int(run.rows()[-1]["step"])
    assert len(run.ckpt["model"]) > 0
    assert "--resume" in out
    assert is_picture(run.folder / "loss.png")


def test_the_only_good_checkpoint_survives_a_resume_that_cannot_write(fit):
    """ckpt.pt is damaged and the one before it resumed: the damaged one must not replace it."""
    resource = pytest.importorskip("resource")
    run = fit("--save-every=1")
    ckpt = run.folder / "ckpt.pt"
    data = bytearray(ckpt.read_bytes())
    data[len(data) // 2] ^= 1
    ckpt.write_bytes(data)
    assert train.main(["--resume", str(run.folder)]) == 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))  # as on a full disk
    try:
        assert train.main(["--resume", str(run.folder / "ckpt.prev.pt")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert train.main(["--resume", str(run.folder)]) == 0


def test_a_finished_run_without_its_checkpoints_is_not_begun_anew(fit):
    run = fit()
    before = (run.folder / "log.csv").read_bytes()
    for path in run.folder.glob("ckpt*"):
        path.unlink()
    assert train.main(["--resume", str(run.folder)]) == 2
    assert (run.folder / "log.csv").read_bytes() == before
