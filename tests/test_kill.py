"""A run that is killed, again and again, ends as if it had not been (fault: a resume that replays
the first batches, repeats or loses rows of the log, or finds a half-written checkpoint)."""

import os
import random
import subprocess
import sys
import time

import torch
from conftest import SMALL

import train


def test_killed_at_random_moments_and_resumed_a_run_ends_bit_equal(place, fit):
    flags = ["--norm=lns+gpas", "--accum=2", "--steps=150", "--save-every=1", "--log-every=1"]
    unbroken = fit(*flags)
    folder, rng, kills = place / "killed", random.Random(0), 0
    start = [*SMALL, "--data", place / "text.txt", *flags, "--out", folder]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    while kills < 5:
        argv = ["--resume", folder] if folder.exists() else start
        command = [sys.executable, "-u", train.__file__, *map(str, argv)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=place) as run:
            for line in run.stdout:
                if line.startswith(b"step"):
                    break
            time.sleep(rng.uniform(0, 0.3))
            assert run.poll() is None, "the run ended before it could be killed"
            run.kill()
        kills += 1
        assert train.load_checkpoint(folder / "ckpt.pt")["state"]["step"] < 150
    killed = fit(resume=type(unbroken)(folder))
    assert killed.code == 0
    assert killed.timeless() == unbroken.timeless()
    assert killed.rows("layers.csv") == unbroken.rows("layers.csv")
    for part in ("model", "optimizer", "state"):
        mine, theirs = killed.ckpt[part], unbroken.ckpt[part]
        if part == "state":
            mine, theirs = ({k: v for k, v in s.items() if k != "seconds"} for s in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
