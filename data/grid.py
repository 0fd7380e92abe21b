"""Many runs from one command: `train.py --norm pre,gpas --lr 1e-3,3e-3 --seed 0,1,2`.

Every combination is a run in a folder of its own, made one after the other. What is finished (or
diverged: a result too) is left as it is, so the same command goes on after an interruption, and
another one with the same --out adds to the grid. After each run summary.csv, runs.csv and
compare.png tell what all runs in the folder say so far.
"""

import csv
import io
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np

from data.engine import Interrupts
from data.figures import label_lines, pyplot, shown, style
from data.prepare import read_source
from data.runs import clock, lock, say, write_atomically
from data.settings import (
    FREE_ON_RESUME,
    TABLE,
    cpu_seconds,
    flag,
    resolve,
    run_name,
    short_name,
)
from nanonorm import VARIANTS

# settings that do not tell two results apart, or that follow from another one
FOLLOWS = ("device", "dtype", "compile", "min_lr", "warmup", "embed_norm", *FREE_ON_RESUME)
OUTCOMES = ("finished", "diverged")


def plan(size, given):
    """(grid folder's name, [(name of a run, its flags, its settings)]), all of them checked.

    The seeds come last: every variant is seen once before any is seen twice. Compared variants
    share one output init, unless --init says otherwise: ValueError for what cannot be.
    """
    swept = [k for k, v in given.items() if isinstance(v, list)]
    for name in swept:
        if len(set(map(str, given[name]))) < len(given[name]):
            raise ValueError(f"{flag(name)} names a value twice")
    given = dict(given)
    norms = given["norm"] if "norm" in swept else []
    if "init" not in given and len({resolve(size, {"norm": n})[1].init for n in norms}) > 1:
        given["init"] = "scale_init"
    swept.sort(key=lambda k: k != "seed")  # the slowest to change
    runs = []
    for values in itertools.product(*(given[k] for k in swept)):
        flags = given | dict(zip(swept, values, strict=True))
        s, _ = resolve(size, flags)
        tail = "".join(f"-{k}={s[k]}" for k in swept if k in FOLLOWS and k != "device")
        runs.append((short_name(run_name(s) + tail), flags, s))
    names = [name for name, *_ in runs]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise ValueError(f"two runs of the grid are the same: {twice}")
    fixed = {k: v for k, v in given.items() if k not in swept}
    said = [f"{k}={','.join(map(str, given[k]))}" for k in sorted(swept)]
    said += [f"{k}={Path(v).stem if k == 'data' else v}" for k, v in sorted(fixed.items())]
    return short_name("-".join(["grid", size or "tiny", *said])), runs


def state_of(folder, s, flags=None):
    """finished, diverged, stopped (can go on), new, or busy. ValueError for another run there.

    flags: those given, of which device, dtype and compile count unless they are auto.
    """
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:  # killed before it could say anything, or never begun
        status = "running" if (folder / "config.json").exists() else None
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{folder} is damaged: delete it, and it is made again") from None
    else:
        free = [k for k in ("device", "dtype", "compile") if (flags or {}).get(k, "auto") == "auto"]
        differs = [k for k in TABLE if k in found and found[k] != s[k] and k not in
                   (*free, *FREE_ON_RESUME)]  # fmt: skip
        if differs:
            raise ValueError(f"{folder} is a run of another {flag(differs[0])}")
        if status in OUTCOMES:
            return status
    if folder.exists():
        try:
            lock(folder).close()
        except ValueError:
            return "busy"
    return "stopped" if status else "new"


def clear(folder):
    """Remove what a run left that ended before its first checkpoint: it is made anew."""
    for name in ("config.json", "log.csv", "layers.csv", "status.json"):
        (folder / name).unlink(missing_ok=True)


def run_grid(size, given, out, home, run):
    """Make every run of the grid with run(size, flags, folder, resume, heading) → exit code.

    Returns the exit code: 0 when all are finished or diverged, 130 when interrupted, else that of
    the run that could not be made.
    """
    name, runs = plan(size, given)
    folder = Path(out) if out else home / "runs" / name
    if any((folder / f).exists() for f in ("config.json", "ckpt.pt")):
        raise ValueError(f"{folder} holds a run: name another folder for the grid with --out")
    for data in dict.fromkeys(s["data"] for *_, s in runs):
        if data != "c4":
            read_source([data])  # all texts are there, before the first run
    Interrupts.pressed = False
    states = [state_of(folder / name, s, flags) for name, flags, s in runs]
    ready, total = sum(st in OUTCOMES for st in states), len(runs)
    say(f"grid     {total} runs in {folder}" + (f", {ready} there already" if ready else ""))
    first = runs[0][1]
    if "init" in first and "init" not in given:
        say("init     scale_init for all: only the wiring differs (--init own: each its own)")
    swept = [k for k, v in given.items() if isinstance(v, list)]
    cost = [cpu_seconds(s) for *_, s in runs]
    started, spent, scale = time.perf_counter(), 0.0, 1.0
    for i, (name, flags, s) in enumerate(runs):
        # read again: another process may work on the same grid
        states = [state_of(folder / n, settings) for n, _, settings in runs[i:]]
        state = states[0]
        if state in (*OUTCOMES, "busy"):
            continue
        left = [c for c, st in zip(cost[i:], states, strict=True) if st not in OUTCOMES]
        what = " ".join(f"{k}={str(s[k]).rpartition('/')[2]}" for k in swept)
        heading = f"run {i + 1}/{total}  {what}  about {clock(scale * sum(left))} left"
        say(heading)
        if state == "stopped" and not any((folder / name).glob("ckpt*.pt")):
            clear(folder / name)
            state = "new"
        if state == "stopped":
            code = run(None, {}, None, str(folder / name), heading)
        else:
            code = run(size, flags, str(folder / name), None, heading)
        if code == 2 and state_of(folder / name, s) == "busy":
            continue  # the other process was first
        if code in (0, 3) and Interrupts.pressed and i + 1 < total:
            code = 130  # pressed in its last update: the run is finished, the grid is not
        if code in (0, 3):
            spent += cost[i]
            scale = (time.perf_counter() - started) / spent
            write_summary(folder)
        else:
            say(f"{'stopped' if code == 130 else 'failed'} at run {i + 1} of {total}; "
                "the same command goes on from here")  # fmt: skip
            return code
    table = write_summary(folder)
    open_runs = sum(state_of(folder / n, s) not in OUTCOMES for n, _, s in runs)
    if open_runs:
        say(f"{open_runs} runs are being made by another process")
    say(as_text(table))
    say(f"{folder}/summary.csv, runs.csv, compare.png")
    return 0


# ---- What the runs say --------------------------------------------------------------------------


def read_runs(folder):
    """[one dict a run] of the runs in `folder` that are finished or diverged, in order of name.

    All settings; folder, status, seconds; val_loss (nats), val_bpb (bits/byte) and loss (mean
    training loss of the last tenth, nats) at the end, NaN if it diverged.
    """
    found = []
    for path in sorted(Path(folder).glob("*/status.json")):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            s = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
            with open(path.parent / "log.csv", encoding="utf-8", newline="") as f:
                log = list(csv.DictReader(f))
            if status["status"] not in OUTCOMES:
                continue
            good = status["status"] == "finished"
            last = [float(r["loss"]) for r in log if int(r["step"]) > 0.9 * s["steps"]]
            found.append({k: s[k] for k in TABLE if k in s} | {
                "folder": path.parent.name, "status": status["status"],
                "seconds": float(log[-1]["seconds"]),
                "val_loss": float(log[-1]["val_loss"]) if good else math.nan,
                "val_bpb": float(log[-1]["val_bpb"]) if good else math.nan,
                "loss": float(np.mean(last)) if good else math.nan,
            })  # fmt: skip
        except (OSError, ValueError, LookupError, TypeError):
            raise ValueError(f"{path.parent} is damaged: delete it, and it is made again") from None
    return found


def telling(runs):
    """The settings besides lr and seed that differ between the runs: what is compared."""
    several = [k for k in TABLE if len({str(r.get(k)) for r in runs}) > 1]
    differ = [k for k in several if k not in ("lr", "seed", *FOLLOWS)]
    for k in several:  # what can follow from other settings counts where nothing else differs
        if k in FOLLOWS and k not in FREE_ON_RESUME:
            groups = {}
            for r in runs:
                key = tuple(str(r.get(q)) for q in (*differ, "lr", "seed"))
                groups.setdefault(key, set()).add(str(r.get(k)))
            differ += [k] if max(map(len, groups.values())) > 1 else []
    return sorted(differ, key=lambda k: k != "norm") or ["norm"]


def name_of(key, keys):
    """A line's name: the variant, then what else differs."""
    d = dict(zip(keys, key, strict=True))
    rest = [f"{k} {v}" for k, v in d.items() if k != "norm"]
    return ", ".join([shown(d["norm"]), *rest] if "norm" in d else rest)


def summarize(runs):
    """[one dict for each compared thing and learning rate], the best learning rate of each marked.

    n: finished seeds; diverged: the others; val_bpb: their mean, se: its standard error (None of
    one seed). best: 1 at the lowest mean, over the seeds that all rates have, among the rates where
    the smallest share diverges; edge: that rate is the lowest or highest tried, so a better one may
    lie outside. ahead, ahead_se: the loss of the first norm (pre, if there) of the same other
    settings minus this one's, seed by seed, each at its own best rate: above 0 this one is better.
    """
    keys, rows, groups = telling(runs), [], {}
    for r in runs:
        groups.setdefault(tuple(r.get(k) for k in keys), {}).setdefault(r["lr"], []).append(r)
    norms = ["pre", "pre+gpas", *VARIANTS]  # the baseline first
    place = lambda v: (
        (norms.index(v), "") if v in norms else (v if type(v) in (int, float) else 99, str(v))
    )
    baselines = {}
    for key in sorted(groups, key=lambda key: [*map(place, key)]):
        by_lr = groups[key]
        mean = {lr: mean_of([r["val_bpb"] for r in rs]) for lr, rs in by_lr.items()}
        lost = {lr: sum(r["status"] == "diverged" for r in rs) for lr, rs in by_lr.items()}
        alive = [lr for lr in by_lr if math.isfinite(mean[lr][0])]
        # a rate that only some seeds were run at is judged by the seeds that all rates have
        shared = set.intersection(*({r["seed"] for r in rs} for rs in by_lr.values()))
        score = {lr: mean_of([r["val_bpb"] for r in by_lr[lr] if r["seed"] in shared or not shared])
                 for lr in alive}  # fmt: skip
        best = min(alive, key=lambda lr: (lost[lr] / len(by_lr[lr]), score[lr][0]), default=None)
        mine = {r["seed"]: r["val_bpb"] for r in by_lr.get(best, [])}
        # the first of the same init, depth, …; if all of its runs diverged, nobody is ahead of it
        baseline = baselines.setdefault(key[1:] if keys[0] == "norm" else (), mine)
        ahead = mean_of([baseline[s] - mine[s] for s in mine if s in baseline])
        for lr in sorted(by_lr):
            edge = "" if len(by_lr) == 1 else {min(by_lr): "lowest", max(by_lr): "highest"}.get(lr)
            at_best = lr == best
            rows.append(dict(zip(keys, key, strict=True)) | {
                "lr": lr, "n": len(by_lr[lr]) - lost[lr], "diverged": lost[lr],
                "val_bpb": mean[lr][0], "se": mean[lr][1], "best": int(at_best),
                "edge": (edge or "") if at_best else "",
                "ahead": ahead[0] if at_best else None, "ahead_se": ahead[1] if at_best else None,
                "name": name_of(key, keys),
            })  # fmt: skip
    return rows


def mean_of(values):
    """(mean, its standard error or None) of the finite values; (NaN, None) if there are none."""
    v = np.array([x for x in values if math.isfinite(x)])
    if not len(v):
        return math.nan, None
    return float(v.mean()), float(v.std(ddof=1) / len(v) ** 0.5) if len(v) > 1 else None


def write_csv(path, rows):
    """Rows of one kind as a table; floats to six places, nothing for None and NaN."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    shape = lambda v: ("" if v is None or v != v else f"{v:.6g}") if (
        v is None or isinstance(v, float)) else v  # fmt: skip
    writer.writerows({k: shape(v) for k, v in row.items()} for row in rows)
    write_atomically(path, lambda f: f.write(text.getvalue().encode()))


def write_summary(folder):
    """summary.csv, runs.csv and compare.png of the runs in `folder`; returns the summary's rows."""
    runs = read_runs(folder)
    if not runs:
        return []
    rows = summarize(runs)
    keys = [*telling(runs), "lr", "seed"]
    ends = ("status", "val_bpb", "val_loss", "loss", "seconds", "folder")
    write_csv(folder / "runs.csv", [{k: r.get(k) for k in (*keys, *ends)} for r in runs])
    write_csv(folder / "summary.csv", rows)
    try:
        draw(runs, rows, folder / "compare.png")
    except (ImportError, RuntimeError) as e:  # a result must not be lost for want of a picture
        say(f"warning: no compare.png: {e}")
    return rows


def as_text(rows):
    """The best row of each compared thing, as a table to read."""
    best = [r for r in rows if r["best"]]
    width = max([len(r["name"]) for r in rows] + [4])
    lines = [f"{'':<{width}}  best lr  bits/byte (± standard error)  ahead of the first  diverged"]
    pm = lambda m, se, plus="": f"{m:{plus}.4f}" + (f" ± {se:.4f}" if se is not None else "")
    for r in best:
        edge = f" ({r['edge']} tried)" if r["edge"] else ""
        lost = sum(q["diverged"] for q in rows if q["name"] == r["name"])
        ahead = pm(r["ahead"], r["ahead_se"], "+") if math.isfinite(r["ahead"]) else ""
        lines.append(f"{r['name']:<{width}}  {r['lr']:<7g}  {pm(r['val_bpb'], r['se']):<28}  "
                     f"{ahead:<18}  {lost}{edge}")  # fmt: skip
    dead = {r["name"] for r in rows} - {r["name"] for r in best}
    return "\n".join(lines + [f"{name:<{width}}  every run diverged" for name in sorted(dead)])


def draw(runs, rows, path):
    """compare.png. Left: loss against the learning rate (or what else was swept), mean and standard
    error over seeds. Right: each at its own best learning rate, every seed a dot."""
    plt = pyplot()
    keys = telling(runs)
    numbers = [k for k in keys if all(type(r.get(k)) in (int, float) for r in runs)]
    x = numbers[0] if numbers else "lr"
    best = sorted((r for r in rows if r["best"]), key=lambda r: -r["val_bpb"])
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, max(4, 1.5 + 0.3 * len(best))),
                                      width_ratios=(1.2, 1))  # fmt: skip
    lines = {}
    for r in rows if x == "lr" else best:
        rest = tuple(r[k] for k in keys if k != x)
        lines.setdefault(rest, []).append(r)
    ends, seen = [], {}
    for rest, points in lines.items():
        points.sort(key=lambda r: r[x])
        norm = points[0].get("norm", runs[0]["norm"])
        look, count = style(norm), seen.get(norm, 0)
        seen[norm] = count + 1
        look["ls"] = ("-", "--", ":", "-.")[count % 4] if count else look["ls"]
        xs, ys = [r[x] for r in points], [r["val_bpb"] for r in points]
        left.errorbar(xs, ys, [r["se"] or 0 for r in points], capsize=2, **look)
        name = name_of(rest, [k for k in keys if k != x]) if rest else "all"
        if alive := [p for p in zip(xs, ys, strict=True) if math.isfinite(p[1])]:
            ends.append((*alive[-1], name, look["color"]))
    lost = [r for r in rows if r["diverged"]]
    for r in lost if x == "lr" else ():
        at = r["val_bpb"] if math.isfinite(r["val_bpb"]) else left.get_ylim()[1]
        left.plot(r[x], at, "x", ms=9, color=style(r.get("norm", "pre"))["color"])
    ticks = sorted({r[x] for r in rows})
    left.set(xscale="log", xlabel="peak learning rate" if x == "lr" else x.replace("_", " "),
             ylabel="held-out text, bits/byte (lower is better)")  # fmt: skip
    left.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
    left.set_xticks([], minor=True)
    left.set_title("mean and standard error over seeds" + ("; × diverged" if lost else ""))
    for i, r in enumerate(best):
        color = style(r.get("norm", runs[0]["norm"]))["color"]
        dots = [q["val_bpb"] for q in runs if q["lr"] == r["lr"]
                and all(q.get(k) == r[k] for k in keys)]  # fmt: skip
        right.plot(dots, [i] * len(dots), ".", color=color, alpha=0.5, ms=5)
        right.errorbar(r["val_bpb"], i, xerr=r["se"] or 0, capsize=3, **style(r.get("norm", "pre")))
        text = f" lr {r['lr']:g}" + (f", the {r['edge']} tried" if r["edge"] else "")
        right.annotate(text, (max(d for d in dots if d == d), i), (6, 0), fontsize=7, va="center",
                       textcoords="offset points", color="0.35")  # fmt: skip
    right.set_yticks(range(len(best)), [r["name"] for r in best])
    right.margins(x=0.25)
    right.set_xlabel("held-out text, bits/byte (lower is better)")
    right.set_title("each at its own best learning rate")
    label_lines(left, ends)
    fig.savefig(path)
    plt.close(fig)
