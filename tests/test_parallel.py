"""Several processes, as torchrun starts them, learn what one learns: replicated and sharded."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SMALL, Run, assert_refused

import train
from data import prepare, runs
from data.engine import World

FLAGS = ["--norm=lns+gpas", "--layers=3", "--steps=20", "--log-every=1", "--eval-every=7",
         "--save-every=10", "--clip=0.5", "--gate-clip=0.01", "--batch=4"]  # fmt: skip


def member(argv, place, env):
    """One of the processes: what torchrun tells it is in the environment."""
    os.environ |= env
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    prepare.BINS, train.HERE = Path(place) / "bins", Path(place)
    runs.plot = lambda folder: None
    os._exit(train.main(argv))


@pytest.fixture(scope="module")
def together(server, place):
    """together(n, flags…): the exit codes of n processes of one run."""

    def start(n, *argv):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        env = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        args = [str(a) for a in argv]
        members = [server.Process(target=member, args=(args, place, env | {
            "RANK": str(i), "LOCAL_RANK": str(i)})) for i in range(n)]  # fmt: skip
        for p in members:
            p.start()
        return members

    def codes(n, *argv):
        members = start(n, *argv)
        for p in members:
            p.join(100)
            if p.exitcode is None:
                found = [p.exitcode for p in members]
                [p.kill() for p in members]
                pytest.fail(f"they wait for each other: exit codes {found}")
        return [p.exitcode for p in members]

    codes.start = start
    return codes


def numbers(run, *columns):
    return [float(row[c]) for row in run.rows() for c in columns if row[c]]


SHARED = {
    "replicated, batches cut": ["--batch=4", "--accum=1"],
    "replicated, forwards shared": ["--batch=2", "--accum=2"],
    "sharded": ["--batch=4", "--shard"],
    "sharded, accumulated": ["--batch=1", "--accum=4", "--shard"],
    "sharded, activations recomputed": ["--batch=4", "--shard", "--checkpoint-activations"],
    "replicated, per sub-layer, bfloat16": ["--dtype=bfloat16", "--gpas-gate=sublayer"],
}


@pytest.mark.parametrize("how", SHARED)
def test_two_processes_learn_what_one_learns(how, together, fit, place):
    """The same losses, norms and evaluations over 20 updates; the held-out text does not divide."""
    flags, folder = [*FLAGS, *SHARED[how]], place / how
    alone = fit(*[f for f in flags if f != "--shard"])
    assert together(2, *SMALL, "--data", place / "text.txt", *flags, "--out", folder) == [0, 0]
    run = Run(folder)
    tolerance = 1e-5 if "bfloat16" not in how else 2e-3
    mine, theirs = (numbers(r, "loss", "val_loss", "grad_norm") for r in (run, alone))
    assert mine == pytest.approx(theirs, rel=tolerance)
    assert run.weights.keys() == alone.weights.keys()
    for name, w in run.weights.items():
        assert type(w) is torch.Tensor and w.shape == alone.weights[name].shape
        torch.testing.assert_close(w, alone.weights[name], rtol=1e-2, atol=10 * tolerance)
    assert len(run.rows("layers.csv")) == len(alone.rows("layers.csv"))  # one log
    assert run.json("status.json")["status"] == "finished"


@pytest.mark.parametrize("first, then", [((2, []), (1, [])), ((1, []), (2, [])),
                                         ((2, ["--shard"]), (1, ["--no-shard"])),
                                         ((1, []), (2, ["--shard"])),
                                         ((2, ["--shard"]), (2, ["--no-shard"]))])  # fmt: skip
def test_another_number_of_processes_goes_on(first, then, together, fit, place, tmp_path):
    """From the checkpoint after half of the updates, with moments and all."""
    whole, folder = fit(*FLAGS), tmp_path / "run"
    n, flags = first
    members = together.start(n, *SMALL, "--data", place / "text.txt", *FLAGS, *flags,
                             "--steps=20", "--out", folder)  # fmt: skip
    while not (folder / "ckpt.pt").exists() and members[0].is_alive():
        time.sleep(0.005)
    for p in members:
        p.kill()
        p.join()
    assert runs.load_checkpoint(folder / "ckpt.pt")["state"]["step"] == 10
    n, flags = then
    assert together(n, "--resume", folder, *flags) == [0] * n
    assert numbers(Run(folder), "loss") == pytest.approx(numbers(whole, "loss"), rel=1e-5)


def test_a_signal_to_one_stops_all_at_the_same_step(together, place, tmp_path):
    folder = tmp_path / "run"
    members = together.start(2, *SMALL, "--data", place / "text.txt", *FLAGS, "--steps=100000",
                             "--out", folder)  # fmt: skip
    while not (folder / "ckpt.pt").exists() and members[0].is_alive():
        time.sleep(0.005)
    os.kill(members[1].pid, signal.SIGTERM)
    for p in members:
        p.join(30)
    assert [p.exitcode for p in members] == [130, 130]
    status = Run(folder).json("status.json")
    assert status["status"] == "interrupted" and status["step"] == Run(folder).ckpt["state"]["step"]


def test_a_divergence_ends_all(together, place, tmp_path):
    flags = [*FLAGS, "--lr=1e6", "--norm=post", "--clip=0", "--warmup=0"]
    argv = [*SMALL, "--data", place / "text.txt", *flags, "--out", tmp_path / "run"]
    assert together(2, *argv) == [3, 3]


def test_without_torchrun_sharding_is_refused(fit, capsys):
    assert_refused(fit("--shard").code, capsys, "torchrun --nproc-per-node")


def shares(size, batch, accum):
    world = World()
    world.size, taken = size, []
    for world.rank in range(size):
        mine = world.shares(batch, accum)
        taken.append([i for s in mine for i in range(s.start, s.stop)])
    return taken


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch, accum", [(12, 1), (1, 12), (12, 12), (4, 3), (3, 4)])
def test_each_sample_has_one_process_and_all_have_as_many(size, batch, accum):
    taken = shares(size, batch, accum)
    assert sorted(sum(taken, [])) == list(range(batch * accum))
    assert {len(mine) for mine in taken} == {batch * accum // size}


def test_samples_that_cannot_be_shared_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="--batch 3 × --accum 5.* 2 processes.*multiple of 2"):
        shares(2, 3, 5)


def test_torchrun_itself(checkout, tmp_path):
    """One line of a fault, once; and a run as the README says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
               checkout / "train.py", *SMALL, "--data", checkout / "text.txt"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ask = lambda *argv: subprocess.run(
        [*map(str, command), *argv], capture_output=True, encoding="utf-8", env=env, timeout=120
    )
    done = ask("--steps=2", "--shard", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("update   32 tokens") == 1  # said once
    assert Run(tmp_path / "run").json("status.json")["status"] == "finished"
    done = ask("--batch=3", "--out", str(tmp_path / "bad"))
    assert done.returncode != 0 and done.stderr.count("train.py: error: --batch 3") == 1
    assert not (tmp_path / "bad").exists()
