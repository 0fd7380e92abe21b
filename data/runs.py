"""A run's folder on the disk: files that survive a kill at any moment, and its pictures."""

import csv
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

FORMAT = 2  # of ckpt.pt
LOG = ("step", "tokens", "seconds", "loss", "val_loss", "val_bpb", "lr", "grad_norm", "tok_per_s")
LAYERS = ("step", "block", "variance", "grad_norm", "gate_attn", "gate_ffn")


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
        try:
            os.link(path, tmp)
        except OSError:  # a file system without links
            shutil.copyfile(path, tmp)
        os.replace(tmp, to)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def save_checkpoint(folder, state):
    """ckpt.pt, with the one before kept as ckpt.prev.pt; there is a whole one at every moment."""
    ckpt = folder / "ckpt.pt"
    if ckpt.exists():
        copy_atomically(ckpt, folder / "ckpt.prev.pt")
    try:
        write_atomically(ckpt, lambda f: torch.save(state, f))
    except RuntimeError as e:  # what torch makes of a write that failed
        raise OSError(f"{ckpt} could not be written: {e}") from None


def load_checkpoint(path):
    """The dict in a run's ckpt.pt: format, config, step and best in state, model, optimizer, …

    ValueError, in one line, if the file is missing, damaged or not one of ours. No code in the file
    can run: it is read with `weights_only=True`.
    """
    path = Path(path)
    older = path.with_name("ckpt.prev.pt")
    hint = f"; the one before it is there: {older}" if older.exists() and older != path else ""
    if not path.is_file():
        raise ValueError(f"{path} does not exist{hint}")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch.load itself checks no CRC
        state = torch.load(path, map_location="cpu", weights_only=True) if not damaged else None
    except Exception:
        raise ValueError(f"{path} is cut short, damaged or not a checkpoint{hint}") from None
    if damaged:
        raise ValueError(f"{path} is damaged{hint}")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a nanonorm checkpoint of format {FORMAT}{hint}")
    return state


class Table:
    """A CSV file, flushed row by row; rows after `step` (of a run that was killed) are cut off."""

    def __init__(self, path, columns, step):
        self.f = open(path, "a+", encoding="utf-8", newline="")
        self.f.seek(0)
        end = 0
        while (line := self.f.readline()).endswith("\n"):
            first = line.split(",")[0]
            if first != "step" and not first.isdecimal():
                raise ValueError(f"{path} is not a table of a run: {line.strip()[:40]!r}")
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
    """Hold the folder until the returned file is closed; ValueError if another process holds it."""
    f = open(folder / ".lock", "a", encoding="utf-8")
    try:
        import fcntl  # not on Windows: there two runs in one folder are not told apart

        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        raise ValueError(f"{folder} is in use by another run") from None
    return f


def plot(folder):
    """Draw loss.png and layers.png from log.csv and layers.csv; a divergence is marked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EncodingWarning)  # matplotlib's own
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
