"""A run that is killed, again and again, ends as if it had not been (fault: a resume that replays
the first batches, repeats or loses rows of the log, or finds a half-written checkpoint).

The runs are children of a server that has imported torch, so that a start takes a moment. Half of
the kills come from outside at a random time; half are the process's own SIGKILL at a random place
inside the writing of a file: in the middle of the bytes, before or after the flush to the disk,
before or after a rename or a link.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SMALL

import train
from data import prepare, runs

FLAGS = ["--norm=lns+gpas", "--steps=240", "--save-every=1", "--log-every=1", "--eval-every=40"]
MODES = {
    "float32, gates, accumulated": ["--accum=2"],
    "bfloat16, gate per sub-layer": ["--dtype=bfloat16", "--gpas-gate=sublayer"],
    "compiled": ["--compile=on"],
    "compiled, bfloat16, activations recomputed": [
        "--compile=on", "--dtype=bfloat16", "--checkpoint-activations"],
}  # fmt: skip


def bomb(rng):
    """Arm this process: SIGKILL at one of its next file operations of a random kind."""
    left = [rng.randint(1, 12)]
    kind = rng.choice(["write", "fsync", "replace", "link"])
    after = rng.random() < 0.5

    def tick(of):
        if kind == of:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    def armed(of, call):
        def with_bomb(*args, **kw):
            if not after:
                tick(of)
            result = call(*args, **kw)
            if after:
                tick(of)
            return result

        return with_bomb

    for name in ("fsync", "replace", "link"):
        setattr(os, name, armed(name, getattr(os, name)))
    save = torch.save

    class Half:  # a file that is cut off in the middle of a piece, inside one of the checkpoints
        def __init__(self, f):
            self.f, self.pieces = f, rng.randint(1, 20)

        def write(self, piece):
            self.pieces -= 1
            if kind == "write" and self.pieces == 0 and left[0] <= 1:
                self.f.write(bytes(piece)[: len(piece) // 2])
                self.f.flush()
                tick("write")
            return self.f.write(piece)

        def flush(self):
            self.f.flush()

    def half(state, f):
        if kind == "write" and left[0] > 1:
            left[0] -= 1
        save(state, Half(f) if kind == "write" else f)

    torch.save = half


def child(argv, place, seed):
    """A run in a process of its own; with a seed it kills itself somewhere."""
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")
    prepare.BINS, train.HERE = Path(place) / "bins", Path(place)
    runs.plot = lambda folder: None
    if seed is not None:
        bomb(random.Random(seed))
    os._exit(train.main(argv))


def rows(folder):
    log = folder / "log.csv"
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_moments_and_resumed_a_run_ends_bit_equal(
    mode, place, fit, server, thorough
):
    flags = [*FLAGS, *MODES[mode]]
    compiled = "--compile=on" in flags
    if compiled and mode != "compiled" and not thorough:
        pytest.skip("with --thorough only: starts of compiled runs take seconds")
    want = 20 if thorough or not compiled else 2
    unbroken = fit(*flags)
    folder, rng, kills, inside = place / f"killed {mode}", random.Random(mode), 0, 0
    start = [*SMALL, "--data", place / "text.txt", *flags, "--out", folder]
    while kills < want:
        argv = ["--resume", folder] if (folder / "config.json").exists() else start
        seed = rng.random() if kills % 2 else None
        had = rows(folder)
        run = server.Process(target=child, args=([str(a) for a in argv], place, seed))
        run.start()
        if seed is None:
            deadline = time.monotonic() + 120
            while rows(folder) <= had and run.is_alive() and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.1))
            run.kill()
        run.join(120)
        assert run.exitcode == -signal.SIGKILL, f"ended with {run.exitcode} before the kill"
        kills += 1
        inside += any(folder.glob("*.tmp"))
        if any(folder.glob("ckpt*.pt")):  # there is a whole one at every moment
            assert runs.load_checkpoint(folder / "ckpt.pt")["state"]["step"] < 240
    assert inside or want < 20, "no kill met a file half written"
    killed = fit(resume=type(unbroken)(folder))
    assert killed.code == 0
    assert killed.timeless() == unbroken.timeless()
    assert killed.rows("layers.csv") == unbroken.rows("layers.csv")
    for part in ("model", "optimizer", "scaler", "state"):
        mine, theirs = killed.ckpt[part], unbroken.ckpt[part]
        if part == "state":
            mine, theirs = ({k: v for k, v in s.items() if k != "seconds"} for s in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert not any(folder.glob("*.tmp")), "a leftover of a kill was never removed"
