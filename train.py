"""Train any variant on text, offline: `python train.py --norm gpas --layers 128`.

From top to bottom: the settings, the data, the schedule and the evaluation, the run's folder, the
training loop, the pictures. A run is a pure function of its settings: the window that sample i of
step s sees depends on (seed, s, i) alone, so accumulation and resuming change nothing.

Exit codes: 0 finished, 2 bad input (one line, nothing written), 3 diverged (recorded as a result),
130 interrupted (saved first).
"""

import argparse
import csv
import difflib
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from data.batches import evaluate, get_batch, window_starts
from data.prepare import NAMES, load, prepare
from nanonorm import (
    GATE_ACTS,
    VARIANTS,
    Config,
    Transformer,
    block_grad_norms,
    one_of,
    stream_variance,
)
from sample import FORMAT, Parser, load_checkpoint, sample_run

HERE = Path(__file__).resolve().parent

# ---- Settings: the flags in one table, the sizes in another -------------------------------------

# name: (type or choices, help, smallest, largest); Config has the model's types, help and ranges
FLAGS = {
    "Model": {f.name: (f.type, f.metadata["help"]) for f in fields(Config)},
    "Data and batches": {
        "data": (str, "shakespeare, sotu, c4 or a UTF-8 text file"),
        "batch": (int, "sequences in one forward", 1, 2**20),
        "accum": (int, "forwards added up in one update", 1, 2**20),
    },
    "Optimization": {
        "steps": (int, "number of updates", 1, 2**40),
        "lr": (float, "peak learning rate of AdamW", 0),
        "warmup": (int, "updates of linear warm-up (default: a tenth of the steps)", 0),
        "min_lr": (float, "where the cosine ends (default: a tenth of the peak)", 0),
        "weight_decay": (float, "on matrices only", 0),
        "beta1": (float, "AdamW β₁", 0, 0.999999),
        "beta2": (float, "AdamW β₂", 0, 0.999999),
        "clip": (float, "clip the gradient to this norm; 0 is off", 0),
        "gate_clip": (float, "clip the GPAS gates' gradient to this norm, apart; 0 is off", 0),
        "seed": (int, "of the weights and of the order of the data", 0, 2**63 - 1),
    },
    "Running": {
        "eval_every": (int, "updates between evaluations; the last is always evaluated", 1),
        "log_every": (int, "updates between rows of log.csv and layers.csv", 1),
        "save_every": (int, "updates between checkpoints", 1),
        "device": (("auto", "cpu", "cuda", "mps"), "where to run"),
        "dtype": (("auto", "float32", "bfloat16", "float16"), "type of the matrix products"),
        "compile": (("auto", "on", "off"), "torch.compile the blocks"),
        "checkpoint_activations": (bool, "recompute each block in the backward to save memory"),
    },
}  # fmt: skip
TABLE = {name: row for group in FLAGS.values() for name, row in group.items()}

DEFAULTS = {f.name: f.default for f in fields(Config)} | {
    "data": "shakespeare", "accum": 1, "warmup": None, "min_lr": None, "weight_decay": 0.1,
    "beta1": 0.9, "beta2": 0.95, "clip": 1.0, "gate_clip": 0.0, "seed": 0, "eval_every": 250,
    "log_every": 20, "save_every": 250, "device": "auto", "dtype": "auto", "compile": "auto",
    "checkpoint_activations": False,
}  # fmt: skip

# The papers' recipe (2506.22049, 2502.05795): 512 sequences of 256 tokens an update, Adam without
# decay or clipping, warm-up over a tenth of the steps, cosine to a tenth of the peak.
# Where their texts and their code disagree the code counts, since it made the published numbers:
# - beta2: 0.999 in all released code; a rebuttal says 0.95.
# - embed_std: √(2/5) for every variant in the Mix-LN and GPAS code, and in the LayerNorm-Scaling
#   code until January 2026, then 0.02.
PAPER = {
    "vocab": 32_000, "block": 256, "batch": 64, "accum": 8, "weight_decay": 0.0, "clip": 0.0,
    "beta2": 0.999, "embed_std": 0.4**0.5, "seed": 42, "eval_every": 1000, "save_every": 1000,
}  # fmt: skip
SIZES = {
    # about a minute on two cores. Pre-LN would learn faster from a larger embedding (std 0.2, lr
    # 4e-3), but SpanNorm collapses there; data/results/ has both runs
    "tiny": dict(layers=8, dim=96, heads=3, vocab=2048, block=64, batch=12, steps=500, lr=3e-3,
                 embed_std=0.1, log_every=20, eval_every=70, save_every=100),
    "71m": PAPER | dict(layers=12, dim=512, ffn=1368, heads=8, steps=10_000, lr=1e-3),
    "130m": PAPER | dict(layers=12, dim=768, ffn=2048, heads=12, steps=20_000, lr=1e-3),
    # width 768 as in every released config (247M parameters); Mix-LN's table says 1024
    "250m": PAPER | dict(layers=24, dim=768, ffn=2560, heads=16, steps=40_000, lr=1e-3),
    # lr 5e-4 as in the script and the GPAS rebuttal; the LNS paper says 1e-3
    "350m": PAPER | dict(layers=24, dim=1024, ffn=2736, heads=16, steps=60_000, lr=5e-4),
    # warm-up a tenth of the steps as in the papers; two released scripts have a hundredth
    "1b": PAPER | dict(layers=24, dim=2048, ffn=5461, heads=32, steps=100_000, lr=5e-4,
                       batch=16, accum=32),
    # SpanNorm's depth stress (2601.22580) is width 384 at 32–512 layers; the rest is not published
    "deep": dict(layers=128, dim=384, heads=6, vocab=8192, block=256, batch=16, steps=1000,
                 lr=1e-3),
}  # fmt: skip

COMPILE_PAYS = 1e11  # layers × dim² × tokens of a run on a CPU from which compiling is repaid

# Settings that may change on resume, because the weights do not depend on them.
FREE_ON_RESUME = ("eval_every", "log_every", "save_every", "checkpoint_activations")


class BadInput(ValueError):
    """A fault of the user's: shown as one line, exit code 2."""


def parse(argv):
    """(size or None, {flag: value given}, out, resume). BadInput for no flag, or no value."""
    p = Parser(prog="train.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--size", metavar="X", help=f"shape and recipe: {' '.join(SIZES)} (tiny)")
    for group, flags in FLAGS.items():
        g = p.add_argument_group(group)
        for name, (kind, text, *_) in flags.items():
            switch = kind in (bool, bool | None)
            kw = {"action": argparse.BooleanOptionalAction} if switch else {"metavar": "X"}
            shown = SIZES["tiny"].get(name, DEFAULTS.get(name))
            text += f" ({shown})" if shown is not None else ""
            g.add_argument(flag(name), help=text, **kw)
    g.add_argument("--out", metavar="DIR", help="the run's folder (runs/, named by the settings)")
    g.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    args, rest = p.parse_known_args(argv)
    if rest:
        known = [option for a in p._actions for option in a.option_strings]
        near = difflib.get_close_matches(rest[0].split("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"unknown argument {rest[0]}{hint} (--help lists all)")
    given = {name: typed(name, v) for name in TABLE if (v := getattr(args, name)) is not None}
    return args.size, given, args.out, args.resume


def flag(name):
    return "--" + name.replace("_", "-")


def typed(name, text):
    """A flag's value from its text, in its type and range."""
    kind, _, low, high = (*TABLE[name], None, None)[:4]
    if isinstance(kind, tuple):
        return one_of(flag(name), text, kind)
    number = next((t for t in (int, float) if kind in (t, t | None)), None)
    if number is None:
        return text
    try:
        value = number(text)
    except ValueError:
        what = "whole number" if number is int else "number"
        raise BadInput(f"{flag(name)} needs a {what}, not {text!r}") from None
    if not math.isfinite(value) or (low is not None and value < low):
        raise BadInput(f"{flag(name)} {text} must be {'finite' if low is None else f'≥ {low}'}")
    if high is not None and value > high:
        raise BadInput(f"{flag(name)} {text} must be ≤ {high}")
    return value


def resolve(size, given):
    """Every setting, from the flags given, the size and the defaults; and the model's Config."""
    size = one_of("--size", size or "tiny", SIZES)
    s = {"size": size} | DEFAULTS | SIZES[size] | given
    if "dim" in given and "ffn" not in given:
        s["ffn"] = None  # follow the new width
    config = Config(**{f.name: s[f.name] for f in fields(Config)})
    s |= config.to_dict()
    if s["data"] not in NAMES:
        s["data"] = os.path.abspath(s["data"])  # a resume may come from another working folder
    s["warmup"] = s["steps"] // 10 if s["warmup"] is None else s["warmup"]
    s["min_lr"] = s["lr"] / 10 if s["min_lr"] is None else s["min_lr"]
    if s["lr"] == 0:
        raise BadInput("--lr 0 would train nothing")
    if s["warmup"] >= s["steps"]:
        raise BadInput(f"--warmup {s['warmup']} must be below --steps {s['steps']}")
    if s["min_lr"] > s["lr"]:
        raise BadInput(f"--min-lr {s['min_lr']} is above --lr {s['lr']}")
    s["device"] = pick_device(s["device"])
    s["dtype"], s["dtype_why"] = pick_dtype(s["dtype"], s["device"], s["dim"])
    s["compile"], s["compile_why"] = pick_compile(s["compile"], s)
    return s, config


def pick_device(want):
    have = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if want == "auto":
        return next(d for d in ("cuda", "mps", "cpu") if have[d])
    if not have[want]:
        raise BadInput(f"--device {want}: this machine has none; use --device auto")
    return want


def pick_dtype(want, device, dim):
    """(dtype of the matrix products, why). Parameters, norms and the stream are always float32."""
    if want == "float16" and device == "cpu":
        raise BadInput("--dtype float16 overflows on a CPU; use bfloat16 or float32")
    if want != "auto":
        return want, "asked for"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return "bfloat16", f"compute capability {major}.{minor} has it"
        return "float32", f"compute capability {major}.{minor} only emulates bfloat16"
    if device == "mps":
        return "float32", "16-bit types are unreliable on mps"
    fast = any(
        getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("amx_tile", "avx512_bf16")
    )
    if fast and dim >= 256:
        return "bfloat16", "this processor multiplies it fast"
    return "float32", "width below 256" if fast else "this processor has no fast bfloat16"


def pick_compile(want, s):
    """(on or off, why). On a CPU compiling costs about half a minute: short runs do without."""
    if want == "off":
        return want, "asked for"
    # the blocks' multiplications by weights in the whole run, in units that cancel
    work = s["steps"] * s["batch"] * s["accum"] * s["block"] * s["layers"] * s["dim"] ** 2
    if want == "auto" and s["device"] == "mps":
        return "off", "not reliable on mps"
    if want == "auto" and s["device"] == "cpu" and work < COMPILE_PAYS:
        return "off", "the run is too short to repay it"
    try:  # without a working compiler the fault comes at the first call, and is long
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=s["device"]))
    except Exception:
        if want == "on":
            raise BadInput("--compile on: no working compiler here; use --compile auto") from None
        return "off", "no working compiler here"
    return "on", "asked for" if want == "on" else "the run is long enough to repay it"


# ---- Schedule, optimizer ------------------------------------------------------------------------


def lr_at(step, s):
    """Learning rate of update `step` (from 0): up from lr/(warmup + 1), cosine down to min_lr."""
    if step < s["warmup"]:
        return s["lr"] * (step + 1) / (s["warmup"] + 1)
    t = (step - s["warmup"]) / max(1, s["steps"] - 1 - s["warmup"])
    return s["min_lr"] + 0.5 * (s["lr"] - s["min_lr"]) * (1 + math.cos(math.pi * t))


def optimizer_for(model, s):
    """AdamW with weight decay on the matrices only: gains and gates have none."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": s["weight_decay"]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = s["device"] in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=s["lr"], betas=(s["beta1"], s["beta2"]), fused=fused)


def memory_estimate(model, s):
    """Bytes a training step needs at its peak, roughly: weights, moments, activations, logits."""
    c, n, wide = model.config, s["batch"] * s["block"], 4 if s["dtype"] == "float32" else 2
    block = n * (4 * 4 * c.dim + wide * (7 * c.dim + 4 * c.ffn))
    kept = n * 4 * c.dim * c.layers + block if s["checkpoint_activations"] else block * c.layers
    return 16 * model.num_params() + kept + 3 * 4 * n * c.vocab


# ---- The run's folder ---------------------------------------------------------------------------

LOG = ("step", "tokens", "seconds", "loss", "val_loss", "val_bpb", "lr", "grad_norm", "tok_per_s")
LAYERS = ("step", "block", "variance", "grad_norm", "gate_attn", "gate_ffn")


def run_name(s):
    """A folder name from what tells runs apart: variant, size, shape, lr, seed, other changes."""
    base = {**DEFAULTS, **SIZES[s["size"]]}
    base |= {"init": Config(norm=s["norm"]).init, "embed_norm": Config(norm=s["norm"]).embed_norm}
    shown = ("norm", "layers", "dim", "lr", "seed", "ffn", "warmup", "min_lr", "device", "dtype")
    shown += ("compile", *FREE_ON_RESUME)
    changed = [k for k in TABLE if s[k] != base[k] and k not in shown]
    extra = [f"{k}={Path(s[k]).stem if k == 'data' else s[k]}" for k in changed]
    parts = [s["norm"], s["size"], f"{s['layers']}x{s['dim']}", f"lr{s['lr']:g}", f"s{s['seed']}"]
    name = "-".join(parts + extra)
    return "".join(ch if ch.isalnum() or ch in "-+=." else "_" for ch in name)[:120]


def write_atomically(path, write):
    """write(file) into a temporary file, flush it to the disk, then rename it to `path`."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)  # a full disk must not stay full because of us
        raise


def write_json(path, d):
    write_atomically(path, lambda f: f.write((json.dumps(d, indent=1) + "\n").encode()))


def copy_atomically(path, to):
    """Make `to` the same file as `path`, with a whole file under both names at every moment."""
    tmp = to.with_name(to.name + ".tmp")
    tmp.unlink(missing_ok=True)
    try:
        os.link(path, tmp)
    except OSError:  # a file system without links
        shutil.copyfile(path, tmp)
    os.replace(tmp, to)


def save_checkpoint(folder, state):
    """ckpt.pt, with the one before kept as ckpt.prev.pt; there is a whole one at every moment."""
    ckpt = folder / "ckpt.pt"
    if ckpt.exists():
        copy_atomically(ckpt, folder / "ckpt.prev.pt")
    try:
        write_atomically(ckpt, lambda f: torch.save(state, f))
    except RuntimeError as e:  # what torch makes of a write that failed
        raise OSError(f"cannot write {ckpt} ({e}); the checkpoint before is intact") from None


class Table:
    """A CSV file, flushed row by row; rows after `step` (of a run that was killed) are cut off."""

    def __init__(self, path, columns, step):
        self.f = open(path, "a+", encoding="utf-8", newline="")
        self.f.seek(0)
        end = 0
        while (line := self.f.readline()).endswith("\n"):
            first = line.split(",")[0]
            if first != "step" and not first.isdecimal():
                raise BadInput(f"{path} is not a table of a run: {line.strip()[:40]!r}")
            if first != "step" and int(first) > step:
                break
            end = self.f.tell()
        self.f.truncate(end)
        self.writer = csv.writer(self.f, lineterminator="\n")
        if not end:
            self.write([columns])

    def write(self, rows):
        self.writer.writerows([f"{v:.7g}" if isinstance(v, float) else v for v in r] for r in rows)
        self.f.flush()

    def close(self):
        self.f.close()


def lock(folder):
    """Hold the folder until the returned file is closed; BadInput if another process holds it."""
    f = open(folder / ".lock", "a", encoding="utf-8")
    try:
        import fcntl  # not on Windows: there two runs in one folder are not told apart

        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        raise BadInput(f"{folder} is in use by another run") from None
    return f


def plot(folder):
    """Draw loss.png and layers.png from log.csv and layers.csv; a divergence is marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def columns(name, keys):
        with open(folder / name, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
        return [np.array([float(r[k] or "nan") for r in rows]) for k in keys]

    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))

    def finish(fig, axes, name):
        for ax in axes:
            ax.set_xlabel("step (updates)")
            ax.spines[["top", "right"]].set_visible(False)
            if status["status"] == "diverged":
                ax.axvline(status["step"] + 1, color="crimson", ls=":")
                ax.text(status["step"] + 1, ax.get_ylim()[1], "diverged ", color="crimson",
                        ha="right", va="top")  # fmt: skip
        name_shown = os.fsencode(folder.name).decode("utf-8", "replace")  # in any locale
        fig.suptitle(name_shown, fontsize=9, parse_math=False)
        fig.savefig(folder / name, dpi=120)
        plt.close(fig)

    step, loss, val = columns("log.csv", ("step", "loss", "val_loss"))
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    ax.plot(step, loss, lw=1, color="0.6", label="training, one batch")
    ax.plot(step[val == val], val[val == val], "o-", ms=4, color="tab:blue", label="held-out text")
    ax.set_ylabel("loss (nats per token)")
    ax.legend(frameon=False)
    finish(fig, [ax], "loss.png")

    step, block, variance, grad = columns("layers.csv", LAYERS[:4])
    fig, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    last = int(block.max()) if len(block) else 1
    shown = np.unique(np.linspace(1, last, 16).round())
    for ax, y, what in zip(
        axes, (variance, grad), ("stream variance", "gradient norm"), strict=True
    ):
        for b in shown:
            at = (block == b) & np.isfinite(y) & (y > 0)
            ax.plot(step[at], y[at], lw=1.2, color=plt.cm.viridis((b - 1) / max(1, last - 1)))
        ax.set_yscale("log")
        ax.set_title(f"{what} of each block", fontsize=10)
    key = plt.cm.ScalarMappable(plt.Normalize(1, max(2, last)), "viridis")
    fig.colorbar(key, ax=axes, label="block (1: next to the embedding)")
    finish(fig, axes, "layers.png")


# ---- Training -----------------------------------------------------------------------------------


class Interrupts:
    """The first SIGINT or SIGTERM asks the loop to stop after its step; a second ends at once."""

    def __enter__(self):
        self.asked = False
        signals = (signal.SIGINT, signal.SIGTERM)
        self.old = {sig: signal.signal(sig, self.ask) for sig in signals}
        return self

    def ask(self, *_):
        if self.asked:
            os._exit(130)  # files are replaced as a whole: none can be left half written
        self.asked = True
        print("\nstopping after this step (once more: at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        for sig, handler in self.old.items():
            signal.signal(sig, handler)


def show_progress(row, steps, bpb, left):
    """One line. On a terminal it is rewritten in place; in a log file each is a line of its own."""
    left = f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
    line = (f"step {row['step']}/{steps} ({row['step'] / steps:.0%})  loss {row['loss']:.4f}  "
            f"{bpb:.3f} bits/byte  {row['tok_per_s']:,.0f} tokens/s  {left} left")  # fmt: skip
    evaluated = row["val_loss"] != ""
    if evaluated:
        line += f"  held-out: loss {row['val_loss']:.4f}, {row['val_bpb']:.4f} bits/byte"
    live = sys.stdout.isatty()
    line = f"\r{line:<110}" if live else line
    print(line, end="" if live and not evaluated else "\n", flush=True)


def diverges(state, loss, norm, patience):
    """Why the run has diverged, or None; counts loss spikes, and steps above the first loss."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"{'gradient' if math.isfinite(loss) else 'loss'} is not finite"
    if state["first"] is None:
        state |= {"first": loss, "mean": loss, "var": 0.0}
    # a spike: 6 running standard deviations (but at least half a nat) above the running mean
    state["spikes"] += loss - state["mean"] > max(6 * state["var"] ** 0.5, 0.5)
    state["var"] = 0.95 * state["var"] + 0.05 * (loss - state["mean"]) ** 2
    state["mean"] = 0.95 * state["mean"] + 0.05 * loss
    state["above"] = state["above"] + 1 if loss > state["first"] else 0
    return f"loss above its start for {patience} steps" if state["above"] >= patience else None


def train(s, model, folder, data, resume=None):
    """Train by the settings `s` in `folder`. Returns the exit code: 0, 3 or 130."""
    (train_ids, val_ids, meta), config = data, model.config
    device, block, per_step = s["device"], s["block"], s["batch"] * s["accum"]
    model.checkpoint_activations = s["checkpoint_activations"]
    opt = optimizer_for(model, s)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda" and s["dtype"] == "float16")
    autocast = torch.autocast(device, getattr(torch, s["dtype"]), enabled=s["dtype"] != "float32")
    gates = [a for of_block in model.gates() for a in of_block if a.requires_grad]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is a for a in gates)]
    # All that a run remembers besides weights and moments; the checkpoint holds it.
    state = {"step": 0, "seconds": 0.0, "first": None, "mean": None, "var": None, "above": 0,
             "spikes": 0, "best": None}  # fmt: skip
    if resume:
        try:
            model.load_state_dict(resume["model"])
            opt.load_state_dict(resume["optimizer"])
            scaler.load_state_dict(resume["scaler"])
            state |= resume["state"]
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            raise BadInput("the checkpoint does not fit the run's config.json") from None
    describe(model, s, meta)
    if s["compile"] == "on":
        model.compile_blocks()
    bits = meta["train_tokens"] / meta["train_bytes"] / math.log(2)  # (nats/token) to (bits/byte)
    val_bits = (len(val_ids) - 1) / meta["val_bytes"] / math.log(2)
    diverged, mark, stream = None, (state["step"], state["seconds"]), []
    act, total_norm = GATE_ACTS[config.gpas_act], torch.nn.utils.get_total_norm

    def watch(l, x):  # the stream after block l; 0 is the embedding
        if l:
            stream.append(stream_variance(x))

    def loss_of(ids, targets):
        with autocast:
            return model(ids.to(device), targets.to(device))

    def write_status(status, **more):
        d = {"status": status, "step": state["step"], "steps": s["steps"], "best": state["best"]}
        write_json(folder / "status.json", d | {"spikes": state["spikes"]} | more)

    def save():
        save_checkpoint(folder, {
            "format": FORMAT, "config": config.to_dict(), "data": meta["fingerprint"],
            "state": state, "model": model.state_dict(), "optimizer": opt.state_dict(),
            "scaler": scaler.state_dict(),
        })  # fmt: skip

    write_status("running")
    with (
        closing(Table(folder / "log.csv", LOG, state["step"])) as log,
        closing(Table(folder / "layers.csv", LAYERS, state["step"])) as layers,
        Interrupts() as interrupts,
    ):
        while state["step"] < s["steps"] and not interrupts.asked:
            started, step = time.perf_counter(), state["step"] + 1
            logging = step in (1, s["steps"]) or step % s["log_every"] == 0
            evaluating = step == s["steps"] or step % s["eval_every"] == 0
            lr, loss = lr_at(step - 1, s), 0.0
            starts = window_starts(s["seed"], step - 1, per_step, len(train_ids), block)
            for i in range(0, per_step, s["batch"]):
                # the stream is watched in the last forward of an update that is logged
                model.tap = watch if logging and i + s["batch"] == per_step else None
                ids, targets = get_batch(train_ids, starts[i : i + s["batch"]], block)
                part = loss_of(ids, targets) / s["accum"]
                scaler.scale(part).backward()
                loss += part.item()
            model.tap = None
            scaler.unscale_(opt)
            norms = [total_norm([p.grad for p in part]) for part in (others, gates)]
            norm = math.hypot(*(n.item() for n in norms))
            if scaler.is_enabled() and math.isfinite(loss):
                diverged = None  # an overflow of scaled fp16 gradients is the scaler's to handle
            else:
                diverged = diverges(state, loss, norm, patience=max(50, s["steps"] // 10))
            if logging or diverged:
                block_norms = block_grad_norms(model)  # before clipping
                shrink = [[act(a).item() for a in of_block] for of_block in model.gates()]
            if diverged:  # the weights are not touched; look at the blocks once more, as they are
                stream.clear()
                model.tap = watch
                with torch.no_grad():
                    loss_of(ids, targets)
                logging = True
            else:
                for part, most, n in zip(
                    (others, gates), ("clip", "gate_clip"), norms, strict=True
                ):
                    if s[most]:
                        torch.nn.utils.clip_grads_with_norm_(part, s[most], n)
                for group in opt.param_groups:
                    group["lr"] = lr
                scaler.step(opt)
                scaler.update()
                state["step"] = step
            opt.zero_grad(set_to_none=True)
            state["seconds"] += time.perf_counter() - started
            if logging:
                rows = zip(stream, block_norms.tolist(), shrink, strict=True)
                layers.write([step, i, v.item(), g, *(z[:1] + z[-1:] or ["", ""])]
                             for i, (v, g, z) in enumerate(rows, 1))  # fmt: skip
                stream.clear()
            if logging or evaluating:
                rate = (step - mark[0]) * per_step * block / (state["seconds"] - mark[1])
                mark = step, state["seconds"]
                row = dict.fromkeys(LOG, "") | {
                    "step": step, "tokens": step * per_step * block, "seconds": state["seconds"],
                    "loss": loss, "lr": lr, "grad_norm": norm, "tok_per_s": rate,
                }  # fmt: skip
                if evaluating and not diverged:
                    val = evaluate(loss_of, val_ids, block, s["batch"])
                    row |= {"val_loss": val, "val_bpb": val * val_bits}
                    if not math.isfinite(val):
                        diverged = "held-out loss is not finite"
                    elif state["best"] is None or val < state["best"]["val_loss"]:
                        state["best"] = {k: row[k] for k in ("step", "val_loss", "val_bpb")}
                log.write([row.values()])
                left = state["seconds"] / step * (s["steps"] - step)
                show_progress(row, s["steps"], loss * bits, left)
            if diverged:
                break
            if step % s["save_every"] == 0 or step == s["steps"] or interrupts.asked:
                save()
                write_status("running")
        if diverged:
            moment = {"loss": loss, "lr": lr, "grad_norm": norm}
            write_status("diverged", reason=diverged, at_step=step, **{
                k: v if math.isfinite(v) else str(v) for k, v in moment.items()})  # fmt: skip
            plot(folder)
            print(f"\ndiverged at step {step}: {diverged} (loss {loss:.4g}, lr {lr:.3g}, gradient "
                  f"norm {norm:.3g}); recorded in {folder}")  # fmt: skip
            return 3
        if state["step"] < s["steps"]:
            write_status("interrupted")
            plot(folder)
            print(f"\nsaved at step {state['step']}; go on with --resume {folder}")
            return 130
        text = sample_run(folder, tokens=200, seed=s["seed"])
        (folder / "sample.txt").write_text(text, encoding="utf-8")
        write_status("finished", seconds=round(state["seconds"], 2))
        plot(folder)
    best = state["best"]
    print(f"\n{text}\n\nfinished: {state['seconds']:.1f} s of training, held-out "
          f"{best['val_bpb']:.4f} bits/byte (step {best['step']}); {folder}")  # fmt: skip
    return 0


def idle_settings(s, config):
    """The flags whose setting, not the default, has no effect with this variant and init."""
    idle = {"lns": config.variant is not VARIANTS["lns"], "gpas": not config.gpas,
            "mix": config.variant is not VARIANTS["mix"], "gate_clip": not config.gpas,
            "scale_init": config.init != "scale_init"}  # fmt: skip
    starts = tuple(what for what, no in idle.items() if no)
    return [flag(k) for k in TABLE if k.startswith(starts) and s[k] != DEFAULTS[k]]


def describe(model, s, meta):
    """Say what is about to run, and why so."""
    if idle := idle_settings(s, model.config):
        print(f"note     no effect with {s['norm']}, init {s['init']}: {', '.join(idle)}")
    per_step = s["batch"] * s["accum"] * s["block"]
    passes = s["steps"] * per_step / meta["train_tokens"]
    name = torch.cuda.get_device_name() if s["device"] == "cuda" else platform.machine()
    print(f"""device   {s["device"]} ({name}, {torch.get_num_threads()} threads)
dtype    float32 parameters, {s["dtype"]} matrix products: {s["dtype_why"]}
compile  {s["compile"]}: {s["compile_why"]}
data     {meta["name"]}: {meta["train_tokens"]:,} training tokens, {meta["val_tokens"]:,} held out
model    {s["norm"]}, {s["layers"]} blocks × {s["dim"]}, vocabulary {s["vocab"]:,}, init {s["init"]}
params   {model.num_params():,}; {model.num_params(embeddings=False):,} without embedding and head
update   {per_step:,} tokens ({s["batch"]} × block {s["block"]} × accum {s["accum"]})
steps    {s["steps"]:,}, {passes:.1f} passes over the text
memory   about {memory_estimate(model, s) / 2**20:,.0f} MiB at the peak""", flush=True)  # fmt: skip


def new_folder(out, s):
    """The folder for a new run; a name that is taken gets a number, a folder asked for does not."""
    if out is None:
        base = HERE / "runs" / run_name(s)
        names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))]
        return next(n for n in names if not n.exists())
    folder = Path(out)
    if (folder / "config.json").exists():
        raise BadInput(f"{folder} holds a run already: --resume {folder}, or another --out")
    return folder


def prepared(s):
    """(train tokens, held-out tokens, meta) of the text, prepared now if need be."""
    data = load(prepare(s["data"], s["vocab"]))
    for split, tokens in zip(("training", "held-out"), data[:2], strict=True):
        if len(tokens) <= s["block"]:
            raise BadInput(f"the {split} text has {len(tokens)} tokens, too few for --block "
                           f"{s['block']}: give a smaller block or a longer text")  # fmt: skip
    return data


def build(s, config):
    """The model, drawn under the run's seed. BadInput if it does not fit into memory."""
    torch.manual_seed(s["seed"])
    try:
        return Transformer(config).to(s["device"])
    except (MemoryError, RuntimeError):
        raise BadInput("the model does not fit into memory: give fewer --layers, --dim") from None


def setup(argv):
    """(settings, model, folder, data, checkpoint or None). Raises ValueError; makes no folder."""
    size, given, out, resume = parse(argv)
    if resume is None:
        s, config = resolve(size, given)
        folder, data = new_folder(out, s), prepared(s)
        return s, build(s, config), folder, data, None
    folder, path = Path(resume), Path(resume) / "ckpt.pt"
    if folder.is_file():  # a checkpoint by name, such as the one before
        folder, path = folder.parent, folder
    if size or out:
        raise BadInput(f"--{'size' if size else 'out'} cannot be given with --resume")
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        s = {k: saved[k] for k in ("size", "dtype_why", "compile_why", *TABLE)}
        fingerprint = saved["data_meta"]["fingerprint"]
        wanted, config = resolve(s["size"], {k: s[k] for k in TABLE} | given)
    except FileNotFoundError:
        raise BadInput(f"{folder} has no config.json: nothing to resume") from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{folder}/config.json is damaged, or not of a run") from None
    auto = [k for k in ("device", "dtype", "compile") if given.get(k) == "auto"]
    fixed = [k for k in given if k not in (*FREE_ON_RESUME, *auto)]
    if refused := [f"{flag(k)} {wanted[k]} (was {s[k]})" for k in fixed if wanted[k] != s[k]]:
        raise BadInput(f"a resumed run cannot change {', '.join(refused)}: start a new one")
    s |= {k: wanted[k] for k in FREE_ON_RESUME}
    if "device" in auto:  # on another kind of machine the numbers change, if one asks for it
        s["device"] = wanted["device"]
    data, model = prepared(s), build(s, config)
    if fingerprint != data[2]["fingerprint"]:
        raise BadInput(f"the text {s['data']} has changed since the run in {folder} began")
    if not any(folder.glob("ckpt*.pt")):
        status = folder / "status.json"
        if status.exists() and '"running"' not in status.read_text(encoding="utf-8"):
            raise BadInput(f"the checkpoints of {folder} are gone: start a new run")
        return s, model, folder, data, None  # killed before its first checkpoint: it begins anew
    ckpt = load_checkpoint(path)
    own = ckpt.get("config") == config.to_dict() and ckpt.get("data") == fingerprint
    step = ckpt["state"].get("step") if isinstance(ckpt.get("state"), dict) else None
    if not (own and type(step) is int and 0 <= step <= s["steps"]):
        raise BadInput(f"{path} does not fit the run that config.json describes")
    ckpt["path"] = path
    return s, model, folder, data, ckpt


def main(argv=None):
    """The command. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a plain C locale knows no × or β
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        s, model, folder, data, ckpt = setup(argv)
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record = s | {"versions": versions | {"numpy": np.__version__}, "data_meta": data[2]}
        record |= {"platform": platform.platform(), "threads": torch.get_num_threads()}
        write_json(folder / "config.json", record)
        if ckpt and ckpt["path"] != folder / "ckpt.pt":
            copy_atomically(ckpt["path"], folder / "ckpt.pt")  # in the place of the damaged one
        code = train(s, model, folder, data, ckpt)
        held.close()
        return code
    except (ValueError, OSError) as e:
        print(f"train.py: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after training, where nothing is left to save
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
