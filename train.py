"""Train any variant on text, offline: `python train.py --norm gpas --layers 128`.

From top to bottom: the schedule and the optimizer, the training loop, the start of a run. The flags
and sizes are in data/settings.py, the batches in data/batches.py, the files of a run in
data/runs.py. A run is a pure function of its settings: the window that sample i of step s sees
depends on (seed, s, i) alone, so accumulation and resuming change nothing.

Exit codes: 0 finished, 2 bad input (one line, nothing written), 3 diverged (recorded as a result),
130 interrupted (saved first).
"""

import itertools
import math
import os
import platform
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from data.batches import evaluate, get_batch, window_starts
from data.prepare import load, one_line, prepare
from data.runs import (
    FORMAT,
    LAYERS,
    LOG,
    Table,
    copy_atomically,
    load_checkpoint,
    lock,
    plot,
    save_checkpoint,
    write_json,
)
from data.settings import DEFAULTS, FREE_ON_RESUME, TABLE, flag, parse, resolve, run_name, saved
from nanonorm import GATE_ACTS, VARIANTS, Transformer, block_grad_norms, stream_variance
from sample import sample_run

HERE = Path(__file__).resolve().parent

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


def memory_estimate(c, s):
    """Bytes a training step needs at its peak, roughly: weights, moments, activations, logits."""
    n, wide = s["batch"] * s["block"], 4 if s["dtype"] == "float32" else 2
    weights = c.layers * (4 * c.dim**2 + 3 * c.dim * c.ffn) + 2 * c.vocab * c.dim
    block = n * (4 * 4 * c.dim + wide * (7 * c.dim + 4 * c.ffn))
    kept = n * 4 * c.dim * c.layers + block if s["checkpoint_activations"] else block * c.layers
    return 16 * weights + kept + 3 * 4 * n * c.vocab + 16 * s["batch"] * s["accum"]


def memory_of(device):
    """Bytes of memory that the device has; infinite where that cannot be asked."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


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


def restore(ckpt, model, opt, scaler, state):
    """Fill all four from a checkpoint; ValueError if it does not fit them."""
    try:
        model.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["optimizer"])
        scaler.load_state_dict(ckpt["scaler"])
        if ckpt["state"].keys() != state.keys():
            raise KeyError("state")
        state |= ckpt["state"]
        for p in sum((group["params"] for group in opt.param_groups), []):
            for moment in ("exp_avg", "exp_avg_sq"):
                opt.state[p][moment].expand_as(p)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{ckpt['path']}: the checkpoint does not fit config.json") from None


def where_it_ran():
    """What else config.json says: versions and machine."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"versions": versions | {"numpy": np.__version__}, "platform": platform.platform(),
            "threads": torch.get_num_threads()}  # fmt: skip


def draw(folder):
    """Both pictures; a run does not fail for want of one."""
    try:
        plot(folder)
    except Exception as e:
        print(f"warning: no pictures: {e}", file=sys.stderr)


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
        restore(resume, model, opt, scaler, state)
        if resume["path"] != folder / "ckpt.pt":
            copy_atomically(resume["path"], folder / "ckpt.pt")  # in the place of the damaged one
    write_json(folder / "config.json", s | where_it_ran() | {"data_meta": meta})
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
            "settings": {k: s[k] for k in TABLE},
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
            draw(folder)
            print(f"\ndiverged at step {step}: {diverged} (loss {loss:.4g}, lr {lr:.3g}, gradient "
                  f"norm {norm:.3g}); recorded in {folder}")  # fmt: skip
            return 3
        if state["step"] < s["steps"]:
            write_status("interrupted")
            draw(folder)
            print(f"\nsaved at step {state['step']}; go on with --resume {folder}")
            return 130
        text = sample_run(folder, tokens=200, seed=s["seed"])
        (folder / "sample.txt").write_text(text, encoding="utf-8")
        write_status("finished", seconds=round(state["seconds"], 2))
        draw(folder)
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
    memory = memory_estimate(model.config, s)
    name = torch.cuda.get_device_name() if s["device"] == "cuda" else platform.machine()
    print(f"""device   {s["device"]} ({name}, {torch.get_num_threads()} threads)
dtype    float32 parameters, {s["dtype"]} matrix products: {s["dtype_why"]}
compile  {s["compile"]}: {s["compile_why"]}
data     {meta["name"]}: {meta["train_tokens"]:,} training tokens, {meta["val_tokens"]:,} held out
model    {s["norm"]}, {s["layers"]} blocks × {s["dim"]}, vocabulary {s["vocab"]:,}, init {s["init"]}
params   {model.num_params():,}; {model.num_params(embeddings=False):,} without embedding and head
update   {per_step:,} tokens ({s["batch"]} × block {s["block"]} × accum {s["accum"]})
steps    {s["steps"]:,}, {passes:.1f} passes over the text
memory   about {memory / 2**20:,.0f} MiB at the peak""", flush=True)  # fmt: skip


def new_folder(out, s):
    """(folder, its lock) of a new run. A name that is taken gets a number; one asked for does not.

    ValueError if the folder asked for holds a run, or is another process's.
    """
    base = out or HERE / "runs" / run_name(s)
    for folder in map(Path, itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))):
        try:
            folder.mkdir(parents=True, exist_ok=out is not None)
        except OSError as e:
            if isinstance(e, FileExistsError) and out is None:
                continue  # perhaps made by another process a moment ago
            raise ValueError(f"{one_line(e)}: name another folder with --out") from None
        held = lock(folder)
        refuse_taken(folder)
        return folder, held


def refuse_taken(folder):
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a run already: --resume {folder}, or another --out")


def build(s, config):
    """(model drawn under the run's seed, data of its text). ValueError if it cannot be trained."""
    if (need := memory_estimate(config, s)) > 1.25 * (have := memory_of(s["device"])):
        raise ValueError(f"this run needs about {need / 2**30:,.0f} GiB of memory, {s['device']} "
                         f"has {have / 2**30:,.0f}: smaller --batch, --layers, --dim?")  # fmt: skip
    data = load(prepare(s["data"], s["vocab"], block=s["block"]))
    torch.manual_seed(s["seed"])
    return Transformer(config).to(s["device"]), data


def reopen(folder, path, given):
    """(settings, model, data, checkpoint or None) of the run in `folder`, to go on with.

    path: which checkpoint. given: the flags given besides. ValueError if they do not fit together.
    """
    s, fingerprint = saved(folder)
    wanted, config = resolve(s["size"], {k: s[k] for k in TABLE} | given)
    auto = [k for k in ("device", "dtype", "compile") if given.get(k) == "auto"]
    fixed = [k for k in given if k not in (*FREE_ON_RESUME, *auto)]
    if refused := [f"{flag(k)} {wanted[k]} (was {s[k]})" for k in fixed if wanted[k] != s[k]]:
        raise ValueError(f"a resumed run cannot change {', '.join(refused)}: start a new one")
    s |= {k: wanted[k] for k in FREE_ON_RESUME}
    if "device" in auto:  # on another kind of machine the numbers change, if one asks for it
        s["device"] = wanted["device"]
    model, data = build(s, config)
    if fingerprint != data[2]["fingerprint"]:
        raise ValueError(f"the text {s['data']} has changed since the run in {folder} began")
    if not any(folder.glob("ckpt*.pt")):
        status = folder / "status.json"
        if status.exists() and '"running"' not in status.read_text(encoding="utf-8"):
            raise ValueError(f"the checkpoints of {folder} are gone: start a new run")
        return s, model, data, None  # killed before its first checkpoint: it begins anew
    ckpt = load_checkpoint(path)
    then, state = ckpt.get("settings"), ckpt.get("state")
    if not (isinstance(then, dict) and then.keys() == TABLE.keys() and isinstance(state, dict)
            and type(state.get("step")) is int and 0 <= state["step"] <= s["steps"]):  # fmt: skip
        raise ValueError(f"{path} does not fit the run that config.json describes")
    fixed = (k for k in TABLE if k not in (*FREE_ON_RESUME, "device", "data"))
    if other := [f"{flag(k)} {s[k]} ({then[k]})" for k in fixed if s[k] != then[k]]:
        raise ValueError(f"{path} is of other settings than config.json: {', '.join(other)}")
    if ckpt.get("data") != fingerprint:
        raise ValueError(f"{path} was trained on another text than config.json says")
    return s, model, data, ckpt | {"path": path}


def start(argv):
    """Train as the flags say. Returns the exit code; ValueError for what cannot be."""
    size, given, out, resume = parse(argv)
    if resume is None:
        s, config = resolve(size, given)
        if out:
            refuse_taken(Path(out))
        model, data = build(s, config)
        folder, held = new_folder(out, s)
        ckpt = None
    elif size or out:
        raise ValueError(f"--{'size' if size else 'out'} cannot be given with --resume")
    else:
        folder, path = Path(resume), Path(resume) / "ckpt.pt"
        if folder.is_file():  # a checkpoint by name, such as the one before
            folder, path = folder.parent, folder
        saved(folder)  # before the lock, which would leave a file in a folder that is no run's
        held = lock(folder)
        s, model, data, ckpt = reopen(folder, path, given)
    with held:
        try:
            return train(s, model, folder, data, ckpt)
        except OSError as e:
            then = f"then --resume {folder}" if folder.is_dir() else "its folder is gone"
            raise ValueError(f"cannot write the run ({one_line(e)}): mend that, {then}") from None
        except (MemoryError, RuntimeError) as e:
            full = isinstance(e, (MemoryError, torch.OutOfMemoryError))
            if not full and "can't allocate memory" not in str(e):
                raise
            write_json(folder / "status.json", {"status": "interrupted", "reason": "no memory"})
            raise ValueError(
                "out of memory: give a smaller --batch (and more --accum), or "
                "--checkpoint-activations; the checkpoints are intact"
            ) from None


def main(argv=None):
    """The command. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a plain C locale knows no × or β
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return start(argv)
    except (ValueError, OSError) as e:
        print(f"train.py: error: {one_line(e)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after training, where nothing is left to save
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
