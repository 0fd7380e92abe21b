"""What analyze.ipynb stands on: small runs that are made once and kept, held-out text, verdicts.

Two modes from one notebook. Fast, the default: models of seconds, to see that every cell works.
Full, with NANONORM=full in the environment: the sizes that the figures are about. Runs are kept in
runs/analyze/ and are not made again, so an interrupted notebook goes on where it was. Those whose
tables are under data/results/core/ are made again only where their weights are needed.
"""

import csv
import hashlib
import json
import os
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

import train
from data.batches import get_batch
from data.grid import OUTCOMES, mean_of, summarize, write_csv
from data.prepare import load, prepare
from data.runs import quiet
from data.settings import short_name
from nanonorm import Config, Transformer
from sample import load_run

FULL = os.environ.get("NANONORM") == "full"
ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "data" / "results" / "core"
HOME = ROOT / "runs" / "analyze" / ("full" if FULL else "fast")
SEEDS = range(3 if FULL else 2)
# the core grid's runs, and shorter ones for the questions beside it
LONG = dict(layers=24, dim=64, heads=2, batch=8, steps=400, eval_every=400, save_every=400,
            probe_every=50, embed_std=0.02)  # fmt: skip
SHORT = LONG | dict(layers=12, steps=150, eval_every=150, save_every=150)
HOW = "12 blocks, 150 updates, at rates tuned on the long runs"  # of the SHORT ones
if not FULL:
    LONG |= dict(layers=6, dim=32, heads=1, batch=32, block=32, steps=8, probe_every=4)
    SHORT |= dict(layers=3, dim=32, heads=1, batch=32, block=32, steps=4, probe_every=4)


class Run:
    """A finished (or diverged) run: its tables, and its model when asked for."""

    def __init__(self, folder, made):
        self.folder, self._made = folder, made

    def table(self, name, column):
        with open(self.folder / name, encoding="utf-8", newline="") as f:
            return np.array([float(r[column] or "nan") for r in csv.DictReader(f)])

    def log(self, column):
        """A column of log.csv."""
        return self.table("log.csv", column)

    def layers(self, column):
        """A column of layers.csv: (steps, values of every probed step and block (steps, L))."""
        step, block = self.table("layers.csv", "step"), self.table("layers.csv", "block")
        values = self.table("layers.csv", column).reshape(-1, int(block.max()))
        return np.unique(step), values

    @cached_property
    def bpb(self):
        """Bits per byte of the held-out text at the end; NaN if it diverged."""
        return self.log("val_bpb")[-1]

    @cached_property
    def loss(self):
        """Training loss, mean of the logged steps of the last tenth, in nats."""
        step = self.log("step")
        return self.log("loss")[step > 0.9 * step[-1]].mean()

    @cached_property
    def model(self):
        """The trained model (made again if only its tables were kept), in eval mode."""
        if not (self.folder / "ckpt.pt").exists():
            self.folder = self._made()
        return load_run(self.folder)[0]


def run(norm, init="scale_init", lr=None, seed=0, base=None, **more):
    """The Run of these settings, trained now unless it was before. lr None: the tuned one.

    base: LONG (default) or SHORT; more: any setting of train.py.
    """
    lr = best_lr(norm, init) if lr is None else lr
    given = (LONG if base is None else base) | more
    extra = [f"{k}={v}" for k, v in more.items()]
    if base is not None:  # other sizes, other folders
        extra.append(hashlib.sha256(repr(sorted(base.items())).encode()).hexdigest()[:4])
    name = short_name("-".join([norm, init, f"lr{lr:g}", f"s{seed}", *extra]))
    folder = HOME / name

    def made():
        status = folder / "status.json"
        found = json.loads(status.read_text(encoding="utf-8")) if status.exists() else {}
        if found.get("status") not in OUTCOMES:
            flags = given | {"norm": norm, "init": init, "lr": float(lr), "seed": seed}
            asked = ("tiny", flags, str(folder), None)
            if (folder / "config.json").exists():  # interrupted: it goes on
                asked = (None, {}, None, str(folder))
            code = train.run(*asked, heading=name, bare=True)
            if code not in (0, 3):
                raise SystemExit(f"{name} ended with {code}")
        return folder

    kept = CORE / "runs" / name
    return Run(kept if FULL and kept.is_dir() and not folder.is_dir() else made(), made)


def runs(norm, init="scale_init", lr=None, base=None, **more):
    """The Runs of all SEEDS."""
    return [run(norm, init, lr, seed, base, **more) for seed in SEEDS]


def core():
    """The rows of the core grid's runs.csv: norm, init, lr, seed, status, val_bpb, loss, …"""
    with open(CORE / "runs.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    number = lambda v: float(v or "nan")
    return [r | {k: number(r[k]) for k in ("lr", "seed", "val_bpb", "loss")} for r in rows]


@cache
def core_summary():
    """The core grid, summed up as data/grid.py does: one row a variant, init and learning rate."""
    return summarize(core())


def best_lr(norm, init):
    """The tuned learning rate of a variant in the core grid; 3e-3 for what is not in it."""
    found = [r for r in core_summary() if (r["norm"], r["init"], r["best"]) == (norm, init, 1)]
    return found[0]["lr"] if found else 3e-3


@cache
def tokens():
    """(training ids, held-out ids) of shakespeare.txt."""
    return load(prepare("shakespeare", 2048, block=64, log=quiet))[:2]


def text(batch=8, T=None, seed=0):
    """(ids, targets), (batch, T) each, of the held-out text of shakespeare.txt."""
    T = T or (64 if FULL else 32)
    val = tokens()[1]
    starts = np.random.default_rng(seed).integers(0, len(val) - T - 1, batch)
    return get_batch(val, starts, T)


def fresh(norm, layers, dim=64, seed=0, **settings):
    """A model at its start, drawn under `seed`."""
    torch.manual_seed(seed)
    shape = dict(layers=layers, dim=dim, heads=max(1, dim // 32), vocab=2048, block=64)
    return Transformer(Config(norm=norm, **shape | settings))


def further(model, steps, lr, seed=0, batch=8):
    """Train a model on for some steps with AdamW at a constant rate; returns it."""
    ids = tokens()[0]
    T, rng = model.config.block, np.random.default_rng(seed)
    opt = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), fused=True)
    model.train()
    for _ in range(steps):
        opt.zero_grad(set_to_none=True)
        loss = model(*get_batch(ids, rng.integers(0, len(ids) - T - 1, batch), T))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return model.eval()


@torch.no_grad()
def held_out(model, batch=64):
    """Loss of a model, in nats per token, on some of the held-out text."""
    return model(*text(batch, model.config.block)).item()


# ---- Verdicts -----------------------------------------------------------------------------------

VERDICTS = []
WORDS = {True: "holds", False: "does not hold here", None: "too small to tell"}


def pm(values):
    """mean ± standard error, as text."""
    m, se = mean_of(values)
    return f"{m:.3g}" + (f" ± {se:.2g}" if se is not None else "")


def sure(differences, at_least=0.0):
    """Do paired differences say that the mean is above `at_least`? True, False, or None: unclear.

    Two standard errors decide; with three seeds that is a weak test, and is meant so.
    """
    m, se = mean_of([*differences])
    if se is None or abs(m - at_least) <= 2 * se:
        return None
    return bool(m > at_least)


def gain(norm, to="pre", init="scale_init", **more):
    """[loss of `to` minus that of `norm`, bits/byte, seed by seed], each at its tuned rate."""
    pairs = zip(runs(to, init, **more), runs(norm, init, **more), strict=True)
    return [a.bpb - b.bpb for a, b in pairs]


def verdict(question, claim, holds, evidence, settle):
    """Show and keep one verdict. holds: True, False, or None for too small to tell."""
    from IPython.display import Markdown, display

    word = WORDS[holds]
    VERDICTS.append(dict(question=question, claim=claim, evidence=evidence, verdict=word,
                         settle=settle))  # fmt: skip
    mode = "" if FULL else " *(fast mode: the numbers mean nothing)*"
    display(Markdown(f"**{question}. {claim}: {word}.** {evidence}{mode} *What would settle it:* "
                     f"{settle}"))  # fmt: skip


def write_verdicts():
    """data/results/verdicts.csv, from a full run of the notebook."""
    if FULL:
        write_csv(ROOT / "data" / "results" / "verdicts.csv", VERDICTS)
