"""A run's folder on the disk: files that survive a kill at any moment, and its pictures."""

import csv
import json
import math
import os
import platform
import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from data.figures import plain_pyplot
from data.settings import FREE_ON_RESUME, TABLE, flag
from nanonorm import LAYER_COLUMNS

FORMAT = 2  # of ckpt.pt
LOG = ("step", "tokens", "seconds", "loss", "val_loss", "val_bpb", "lr", "grad_norm", "tok_per_s")
LAYERS = ("step", "block", *LAYER_COLUMNS)
DRAWN_LARGE = ("variance", "grad_norm")
PICTURES = {  # of each column of layers.csv: what it is, and whether its axis is logarithmic
    "variance": ("stream variance of each block", True),
    "grad_norm": ("gradient norm of each block", True),
    "grad_norm_ffn": ("gradient norm, FFN matrices", True),
    "weight_norm": ("weight norm", False),
    "gate_attn": ("gate after attention, SiLU(α)", False),
    "gate_ffn": ("gate after the FFN, SiLU(α)", False),
    "influence": ("Block Influence, 1 − cos", True),
    "angle": ("angular distance, in π", False),
    "ratio_attn": ("attention over stream, rms", True),
    "ratio_ffn": ("FFN over stream, rms", True),
    "sigma_attn": ("std of the sum, attention", True),
    "sigma_ffn": ("std of the sum, FFN", True),
    "kurtosis": ("kurtosis of the channels", False),
    "entropy": ("attention entropy, nats", False),
}


def write_atomically(path, write):
    """write(file) into a temporary file, flush it to the disk, then rename it to `path`."""
    tmp = path.with_name(path.name + ".tmp")
    tmp.unlink(missing_ok=True)  # left by a kill it may be a second name of a file to be kept
    try:
        with open(tmp, "xb") as f:
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
    """Make `to` the same file as `path`, with a whole file under both names at every moment.

    The two may share their bytes on the disk: no file of a run is ever changed in place.
    """
    path = path.resolve()  # a link to a symbolic link would be a link to its name
    tmp = to.with_name(to.name + ".tmp")
    tmp.unlink(missing_ok=True)
    try:
        try:
            os.link(path, tmp)
        except OSError:  # a file system without links
            shutil.copyfile(path, tmp)
        os.replace(tmp, to)
    finally:
        tmp.unlink(missing_ok=True)  # it is still there if both were the same file already


def save_checkpoint(folder, state):
    """ckpt.pt, with the one before kept as ckpt.prev.pt; there is a whole one at every moment."""
    ckpt = folder / "ckpt.pt"
    if ckpt.exists():
        copy_atomically(ckpt, folder / "ckpt.prev.pt")
    try:
        write_atomically(ckpt, lambda f: torch.save(state, f))
    except RuntimeError as e:  # what torch makes of a write that failed
        raise OSError(f"{ckpt} could not be written; is the disk full?") from e


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
    if (
        not isinstance(state, dict)
        or type(found := state.get("format")) is not int
        or found != FORMAT
    ):
        raise ValueError(f"{path} is not a nanonorm checkpoint of format {FORMAT}{hint}")
    return state


def checkpoint(path, s, fingerprint):
    """The checkpoint to go on with, None before the first. ValueError if it is another run's."""
    folder = path.parent
    if path.name == "ckpt.pt" and not any(folder.glob("ckpt*.pt")):
        status = folder / "status.json"
        if status.exists() and '"running"' not in status.read_text(encoding="utf-8"):
            raise ValueError(
                f"{folder} ended, and has no checkpoint to go on from: start a new run"
            )
        return None  # killed before its first checkpoint: it begins anew
    ckpt = load_checkpoint(path)
    then, state = ckpt.get("settings"), ckpt.get("state")
    if not (isinstance(then, dict) and then.keys() == TABLE.keys() and isinstance(state, dict)
            and type(state.get("step")) is int and 0 <= state["step"] <= s["steps"]):  # fmt: skip
        raise ValueError(f"{path} does not fit the run that config.json describes")
    differs = lambda a, b: type(a) is not type(b) or a != b
    fixed = [k for k in TABLE if k not in (*FREE_ON_RESUME, "device", "data")]
    if other := [f"{flag(k)} {s[k]} ({then[k]})" for k in fixed if differs(s[k], then[k])]:
        raise ValueError(f"{path} is of other settings than config.json: {', '.join(other)}")
    if ckpt.get("data") != fingerprint:
        raise ValueError(f"{path} was trained on another text than config.json says")
    return ckpt | {"path": path}


def check_state(found, start):
    """ValueError unless a checkpoint's `state` has what a run remembers, each of its kind."""
    number = lambda v: type(v) in (int, float) and math.isfinite(v)
    good = found.keys() == start.keys() and number(found["seconds"])
    good = good and all(found[k] is None or number(found[k]) for k in ("first", "mean", "var"))
    good = good and all(
        type(found[k]) is int and found[k] >= 0 for k in ("step", "above", "spikes")
    )
    if not good or (found["best"] is not None and not all(map(number, found["best"].values()))):
        raise ValueError("not a run's state")


class Table:
    """A CSV file, flushed row by row; rows after `step` (of a run that was killed) are cut off.

    Nothing is written before `begin`. ValueError if the file is not such a table.
    """

    def __init__(self, path, columns, step):
        self.path, self.columns, self.f, self.end, last = path, columns, None, 0, 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for i, line in enumerate(lines):
            cells = line.decode("utf-8", "replace").rstrip("\r\n").split(",")
            whole = len(cells) == len(columns) and line.endswith(b"\n")
            if i and i == len(lines) - 1 and not whole:
                break  # cut off by a kill; made again
            number = int(cells[0]) if i and cells[0].isdecimal() and len(cells[0]) < 20 else -1
            good = whole and number >= last if i else tuple(cells) == columns
            if not good:
                raise ValueError(f"{path}, line {i + 1}, is not of a run: {cells[0][:40]!r}")
            if i and number > step:
                break
            last, self.end = max(last, number), self.end + len(line)

    def begin(self):
        self.f = open(self.path, "a", encoding="utf-8", newline="")
        self.f.truncate(self.end)
        self.writer = csv.writer(self.f, lineterminator="\n")
        if not self.end:
            self.write([self.columns])

    def write(self, rows):
        self.writer.writerows([f"{v:.7g}" if isinstance(v, float) else v for v in r] for r in rows)
        self.f.flush()

    def close(self):
        if self.f:
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


def refuse_taken(folder):
    """ValueError if no new run can be put there: found before anything is written, if it can be."""
    if any((folder / name).exists() for name in ("config.json", "log.csv", "ckpt.pt")):
        raise ValueError(f"{folder} holds a run already: --resume {folder}, or another --out")
    base = next(p for p in (folder, *folder.parents) if p.exists())
    if not base.is_dir() or not os.access(base, os.W_OK):
        raise ValueError(f"{folder} cannot be written: name another folder with --out")


def say(text, end="\n"):
    """Print; a reader that has gone (a closed terminal, `| head`) must not end the run."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def quiet(*_):
    """In the place of print where many runs would say the same."""


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def show_progress(row, steps, bpb, left, heading=""):
    """One line. On a terminal it is rewritten in place; in a log file each is a line of its own.

    Of a run in a grid, which has a `heading`, only the terminal sees it.
    """
    if heading and not sys.stdout.isatty():
        return
    line = (f"step {row['step']}/{steps} ({row['step'] / steps:.0%})  "
            f"loss {row['loss']:.4f}  {bpb:.3f} bits/byte  "
            f"{row['tok_per_s']:,.0f} tokens/s  {clock(left)} left")  # fmt: skip
    evaluated = row["val_loss"] != ""
    if evaluated:
        line += f"  held-out: loss {row['val_loss']:.4f}, {row['val_bpb']:.4f} bits/byte"
    live = sys.stdout.isatty()
    line = f"\r{line:<110}" if live else line
    say(line, end="" if live and not evaluated else "\n")


def plot(folder):
    """Draw loss.png and layers.png from log.csv and layers.csv; a divergence is marked."""
    plt = plain_pyplot("Agg")
    import matplotlib.ticker

    def columns(name, keys):
        with open(folder / name, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
        return [np.array([float(r[k] or "nan") for r in rows]) for k in keys]

    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))

    def finish(fig, axes, name):
        for ax in axes:
            ax.set_xlabel("step (updates)", fontsize=8)
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

    step, block, *values = columns("layers.csv", LAYERS)
    values = dict(zip(LAYERS[2:], values, strict=True))
    there = [k for k, v in values.items() if np.isfinite(v).any()]  # without GPAS there is no gate
    small = [k for k in there if k not in DRAWN_LARGE]
    rows = -(-len(small) // 4)
    places = [[k for k in DRAWN_LARGE for _ in range(2)]]
    places += [(small + ["."] * 3)[4 * r : 4 * r + 4] for r in range(rows)]
    fig, axes = plt.subplot_mosaic(places, figsize=(10, 3.6 + 2 * rows), layout="constrained",
                                   height_ratios=[3.4] + [2] * rows)  # fmt: skip
    last = int(block.max()) if len(block) else 1
    shown = np.unique(np.linspace(1, last, 16).round())
    for name, ax in axes.items():
        what, log = PICTURES[name]
        for b in shown:
            y = values[name]
            at = (block == b) & np.isfinite(y) & ((y > 0) | (not log))
            ax.plot(step[at], y[at], lw=1.2, color=plt.cm.viridis((b - 1) / max(1, last - 1)))
        ax.set_yscale("log" if log else "linear")
        ax.set_title(what, fontsize=10 if name in DRAWN_LARGE else 8)
        ax.tick_params(which="both", labelsize=8 if name in DRAWN_LARGE else 6)
    key = plt.cm.ScalarMappable(plt.Normalize(1, max(2, last)), "viridis")
    whole = matplotlib.ticker.MaxNLocator(integer=True)
    bar = fig.colorbar(key, ax=[*axes.values()], ticks=whole, aspect=40)
    bar.set_label("block (1: next to the embedding)")
    finish(fig, axes.values(), "layers.png")


class Record:
    """What a run writes into its folder, from its beginning to its end."""

    def __init__(self, folder, heading="", bare=False):
        self.folder, self.heading, self.bare, self.tables = folder, heading, bare, []

    def begin(self, s, meta, step, ckpt):
        """Write config.json and open the tables; `ckpt` takes the place of a damaged ckpt.pt."""
        for name, columns in (("log.csv", LOG), ("layers.csv", LAYERS)):
            self.tables.append(Table(self.folder / name, columns, step))
        if ckpt and ckpt != self.folder / "ckpt.pt":
            copy_atomically(ckpt, self.folder / "ckpt.pt")
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        where = {"versions": versions | {"numpy": np.__version__}, "data_meta": meta,
                 "platform": platform.platform(), "threads": torch.get_num_threads()}  # fmt: skip
        write_json(self.folder / "config.json", s | where)
        for table in self.tables:
            table.begin()

    def log(self, row):
        self.tables[0].write([row.values()])

    def layers(self, rows):
        self.tables[1].write(rows)

    def status(self, d):
        write_json(self.folder / "status.json", d)

    def save(self, state):
        save_checkpoint(self.folder, state)

    def text(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def draw(self):
        """Both pictures; a run does not fail for want of one."""
        if self.bare:
            return
        try:
            plot(self.folder)
        except Exception as e:
            with suppress(OSError):
                print(f"warning: no pictures: {e}", file=sys.stderr)

    def close(self):
        for table in self.tables:
            table.close()


class Silence:
    """In the place of a Record where another process writes: each of its calls does nothing."""

    folder, heading = None, ""

    def __getattr__(self, name):
        return lambda *args, **kw: None
