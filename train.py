"""Train any variant on text, offline: `python train.py --norm gpas --layers 128`.

From top to bottom: the schedule and the optimizer, the training loop, the start of a run. The flags
and sizes are in data/settings.py, the batches in data/batches.py, the files of a run in
data/runs.py, one process or several in data/engine.py. A run is a pure function of its settings:
the window that sample i of step s sees depends on (seed, s, i) alone, so accumulation, resuming and
the number of processes change nothing.

Exit codes: 0 finished, 2 bad input (one line, nothing written), 3 diverged (recorded as a result),
130 interrupted (saved first). A run that cannot be written, or runs out of memory, ends with 2 too;
its checkpoints are whole and --resume goes on from there.
"""

import signal

if __name__ == "__main__":  # Ctrl-C while torch is loaded: an end without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import itertools
import math
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import torch

from data.batches import evaluate, get_batch, window_starts
from data.engine import (
    Captured,
    Interrupts,
    World,
    describe,
    ended_as_by_ctrl_c,
    memory_estimate,
    memory_of,
    placed_moments,
    to,
    whole,
)
from data.grid import run_grid
from data.prepare import load, one_line, open_streams, prepare
from data.runs import (
    FORMAT,
    LOG,
    Record,
    Silence,
    check_state,
    checkpoint,
    lock,
    quiet,
    refuse_taken,
    say,
    show_progress,
)
from data.settings import (
    FREE_ON_RESUME,
    TABLE,
    flag,
    parse,
    resolve,
    run_name,
    saved,
)
from nanonorm import Transformer, layer_table
from sample import sample_run

HERE = Path(__file__).resolve().parent
PROBED = 512  # so many tokens of an update are enough to look at its blocks

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


# ---- Training -----------------------------------------------------------------------------------


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


def ready(s, model, world, ckpt):
    """(optimizer, scaler, state) of a run from its start, or from a checkpoint that must fit."""
    model.checkpoint_activations = s["checkpoint_activations"]
    try:
        if ckpt:
            if any(w.dtype != torch.float32 for w in ckpt["model"].values()):
                raise TypeError("parameters are float32")
            model.load_state_dict(ckpt["model"])
    except (RuntimeError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{ckpt['path']}: its weights do not fit config.json") from None
    if s["compile"] == "on":
        model.compile_blocks()
    world.wrap(model, s["shard"])
    opt = optimizer_for(model, s)
    scaled = s["device"] == "cuda" and s["dtype"] == "float16"
    scaler = torch.amp.GradScaler(s["device"], enabled=scaled)
    # All that a run remembers besides weights and moments; the checkpoint holds it.
    state = {"step": 0, "seconds": 0.0, "first": None, "mean": None, "var": None, "above": 0,
             "spikes": 0, "best": None}  # fmt: skip
    if ckpt:
        try:
            moments = placed_moments(ckpt["optimizer"]["state"], opt)
            opt.load_state_dict(opt.state_dict() | {"state": moments})  # settings: config.json's
            scaler.load_state_dict(ckpt["scaler"])
            check_state(ckpt["state"], state)
            state |= ckpt["state"]
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{ckpt['path']}: its moments do not fit config.json") from None
    return opt, scaler, state


def train(s, model, opt, scaler, state, data, world, record):
    """Train from `state` on, writing to `record`. Returns the exit code: 0, 3 or 130."""
    (train_ids, val_ids, meta), config = data, model.config
    block, per_step, device = s["block"], s["batch"] * s["accum"], world.device
    shares = world.shares(s["batch"], s["accum"])
    autocast = torch.autocast(device.type, getattr(torch, s["dtype"]),
                              enabled=s["dtype"] != "float32")  # fmt: skip
    gates = [a for of_block in model.gates() for a in of_block if a.requires_grad]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is a for a in gates)]
    bits = meta["train_tokens"] / meta["train_bytes"] / math.log(2)  # (nats/token) to (bits/byte)
    val_bits = (len(val_ids) - 1) / meta["val_bytes"] / math.log(2)
    diverged, moment, unread = None, {}, []
    mark = state["step"], state["seconds"]
    total_norm = torch.nn.utils.get_total_norm
    broken = torch.zeros((), device=device)  # 1 from the first loss or gradient that is not finite

    def look():
        """The rows of layers.csv: every block as this step finds it, before its update."""
        few = starts[: max(1, PROBED // block)]  # the same ones, however many processes there are
        with autocast:
            table = layer_table(model, to(device, get_batch(train_ids, few, block)[0]))
        return [(step, l, *row) for l, row in enumerate(zip(*table.values(), strict=True), 1)]

    def read():
        """Look at the numbers of the updates since the last look: why has the run diverged?"""
        nonlocal moment
        for at, lr, *numbers in unread:
            loss, norm = (v.item() for v in numbers)
            moment = {"at_step": at, "loss": loss, "lr": lr, "grad_norm": norm}
            if scaler.is_enabled() and math.isfinite(loss):
                continue  # an overflow of scaled fp16 gradients is the scaler's to handle
            if why := diverges(state, loss, norm, patience=max(50, s["steps"] // 10)):
                if not math.isfinite(loss + norm):
                    state["step"] = at - 1  # later updates did nothing
                unread.clear()
                return why
        unread.clear()

    def loss_of(ids, targets):
        with autocast:
            return world.run(to(device, ids), to(device, targets))

    def forward_backward(ids, targets):
        part = loss_of(ids, targets) / len(shares)
        scaler.scale(part).backward()
        return part.detach()

    step_of = forward_backward

    def status(word, **more):
        d = {"status": word, "step": state["step"], "steps": s["steps"], "best": state["best"]}
        record.status(d | {"spikes": state["spikes"]} | more)

    def save():
        parts = whole({"model": model.state_dict(), "optimizer": opt.state_dict()})
        record.save({
            "format": FORMAT, "config": config.to_dict(), "data": meta["fingerprint"],
            "settings": {k: s[k] for k in TABLE}, "state": state, "scaler": scaler.state_dict(),
        } | parts)  # fmt: skip
        status("running")

    status("running")
    with Interrupts() as interrupts:
        while state["step"] < s["steps"]:
            started, step = time.perf_counter(), state["step"] + 1
            logging = step in (1, s["steps"]) or step % s["log_every"] == 0
            probing = step in (1, s["steps"]) or step % s["probe_every"] == 0
            evaluating = step == s["steps"] or step % s["eval_every"] == 0
            saving = step == s["steps"] or step % s["save_every"] == 0
            lr, loss = lr_at(step - 1, s), torch.zeros((), device=device)
            starts = window_starts(s["seed"], step - 1, per_step, len(train_ids), block)
            for share in shares:
                last = share is shares[-1]
                batch = [to(device, x) for x in get_batch(train_ids, starts[share], block)]
                if s["cuda_graph"] and step_of is forward_backward:
                    step_of = Captured(step_of, others + gates, *batch)
                with world.forward_of(last):
                    loss += step_of(*batch)
            scaler.unscale_(opt)
            loss = world.mean(loss)
            norms = [whole(total_norm([p.grad for p in part])) for part in (others, gates)]
            unread.append((step, lr, loss, torch.hypot(*norms)))
            reading = device.type == "cpu" or logging or evaluating or saving or scaler.is_enabled()
            diverged = read() if reading else None
            if probing or diverged:
                record.layers(look())
            if diverged:  # the weights are not touched
                logging = True
            else:
                for part, most, n in zip(
                    (others, gates), ("clip", "gate_clip"), norms, strict=True
                ):
                    if s[most]:
                        torch.nn.utils.clip_grads_with_norm_(part, s[most], n)
                for group in opt.param_groups:
                    group["lr"] = lr
                if device.type == "cuda" and not scaler.is_enabled():
                    # nobody waits for the number: the update itself does nothing once one is broken
                    broken = torch.maximum(broken, 1 - unread[-1][3].isfinite().float())
                    opt.found_inf = broken
                scaler.step(opt)
                scaler.update()
                state["step"] = step
            opt.zero_grad(set_to_none=not s["cuda_graph"])
            stopping = (reading or world.size == 1) and world.any(interrupts.asked)
            if unread and stopping:
                diverged = diverged or read()
            state["seconds"] += time.perf_counter() - started
            if logging or evaluating:
                rate = (step - mark[0]) * per_step * block / (state["seconds"] - mark[1])
                mark = step, state["seconds"]
                row = dict.fromkeys(LOG, "") | {
                    "step": step, "tokens": step * per_step * block, "seconds": state["seconds"],
                    **{k: moment[k] for k in ("loss", "lr", "grad_norm")}, "tok_per_s": rate,
                }  # fmt: skip
                if evaluating and not diverged:
                    val = evaluate(loss_of, val_ids, block, s["batch"], world)
                    row |= {"val_loss": val, "val_bpb": val * val_bits}
                    if not math.isfinite(val):
                        diverged = "held-out loss is not finite"
                    elif state["best"] is None or val < state["best"]["val_loss"]:
                        state["best"] = {k: row[k] for k in ("step", "val_loss", "val_bpb")}
                record.log(row)
                left = state["seconds"] / step * (s["steps"] - step)
                show_progress(row, s["steps"], moment["loss"] * bits, left, record.heading)
            if diverged:
                break
            if saving or stopping:
                save()
            if stopping:
                break
        if diverged:
            status("diverged", reason=diverged, **{
                k: v if math.isfinite(v) else str(v) for k, v in moment.items()})  # fmt: skip
            record.draw()
            numbers = "loss {loss:.4g}, lr {lr:.3g}, gradient norm {grad_norm:.3g}".format(**moment)
            say(f"\ndiverged at step {moment['at_step']}: {diverged} ({numbers}); recorded in "
                f"{record.folder}")  # fmt: skip
            return 3
        if state["step"] < s["steps"]:
            status("interrupted")
            record.draw()
            say(f"\nsaved at step {state['step']}; go on with --resume {record.folder}")
            return 130
        if world.chief:
            text = "" if record.bare else sample_run(record.folder, tokens=200, seed=s["seed"])
            record.text("sample.txt", text)
            status("finished", seconds=round(state["seconds"], 2))
            record.draw()
            best = "{val_bpb:.4f} bits/byte (step {step})".format(**state["best"])
            text = "" if record.heading else f"\n{text}\n\n"
            say(f"{text}finished: {state['seconds']:.1f} s of training, held-out {best}; "
                f"{record.folder}")  # fmt: skip
    return 0


def new_folder(out, s):
    """(folder, its lock) of a new run. A name that is taken gets a number; one asked for does not.

    ValueError if the folder asked for holds a run, or is another process's.
    """
    base = HERE / "runs" / run_name(s) if out is None else out
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


def build(s, config, log=print):
    """(model drawn under the run's seed, data of its text)."""
    data = load(prepare(s["data"], s["vocab"], block=s["block"], log=log))
    torch.manual_seed(s["seed"])
    return Transformer(config).to(s["device"]), data


def resumed(folder, given):
    """(settings, config, fingerprint of the text) of a run to go on with; `given`: flags besides.

    ValueError for a flag that would change the run.
    """
    s, fingerprint = saved(folder)
    wanted, config = resolve(s["size"], {k: s[k] for k in TABLE} | given)
    auto = [k for k in ("device", "dtype", "compile") if given.get(k) == "auto"]
    fixed = [k for k in given if k not in (*FREE_ON_RESUME, *auto, "data")]
    if refused := [f"{flag(k)} {wanted[k]} (was {s[k]})" for k in fixed if wanted[k] != s[k]]:
        raise ValueError(f"a resumed run cannot change {', '.join(refused)}: start a new one")
    s |= {k: wanted[k] for k in FREE_ON_RESUME}
    s["data"] = wanted["data"]  # the text may have moved: its fingerprint tells
    if "device" in auto:  # on another kind of machine the numbers change, if one asks for it
        s["device"] = wanted["device"]
    return s, config, fingerprint


def start(size, given, out, resume, world, heading, bare):
    """All that `train` needs, as the flags say. ValueError for what cannot be, nothing written."""
    folder = ckpt = None
    if resume is None:
        s, config = resolve(size, given)
        if out is not None:
            refuse_taken(Path(out))
    elif size is not None or out is not None:
        raise ValueError(f"--{'out' if size is None else 'size'} cannot be given with --resume")
    else:
        folder, path = Path(resume), Path(resume) / "ckpt.pt"
        if folder.is_file():  # a checkpoint by name, such as the one before
            folder, path = folder.parent, folder
        s, config, fingerprint = resumed(folder, given)
    if (need := memory_estimate(config, s)) > 1.25 * (have := memory_of(s["device"])):
        raise ValueError(f"this run needs about {need / 2**30:,.0f} GiB of memory, {s['device']} "
                         f"has {have / 2**30:,.0f}: smaller --batch, --layers, --dim?")  # fmt: skip
    world.open(s)
    if resume and world.chief:
        world.held = lock(folder)
    if not world.chief:  # the text is prepared once
        world.wait()
    model, data = build(s, config, quiet if heading else print)
    if world.chief:
        world.wait()
    if resume:
        if fingerprint != data[2]["fingerprint"]:
            raise ValueError(f"--data {s['data']} has changed since the run in {folder} began")
        ckpt = checkpoint(path, s, fingerprint)
    elif world.chief:
        folder, world.held = new_folder(out, s)
    record = Record(folder, heading, bare) if world.chief else Silence()
    opt, scaler, state = ready(s, model, world, ckpt)
    record.begin(s, data[2], state["step"], ckpt and ckpt["path"])
    if not heading:
        describe(model, s, data[2], world)
    return s, model, opt, scaler, state, data, world, record


def refusal(e, record):
    """The line for what the user or the machine did, before or (with a record) in training."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e):
        if record:
            record.status({"status": "interrupted", "reason": "out of memory"})
        return ("out of memory: give a smaller --batch (and more --accum), --layers or --dim, or "
                "--checkpoint-activations")  # fmt: skip
    if isinstance(e, OSError) and record:
        with suppress(OSError):
            record.status({"status": "interrupted", "reason": one_line(e)})
        then = f"then --resume {record.folder}" if record.folder.is_dir() else "its folder is gone"
        return f"cannot write the run ({one_line(e)}): mend that, {then}"
    if isinstance(e, (OSError, ValueError)) and not record:
        return one_line(e)
    return None  # a fault of ours


def run(size, given, out, resume, heading="", bare=False):
    """One run, new or resumed; with a comma list among the flags, a grid. Returns the exit code.

    heading: of one among many runs, which says little; bare: without pictures and sample.
    """
    record = None
    with ended_as_by_ctrl_c(), closing(World()) as world:
        try:
            if any(isinstance(v, list) for v in given.values()):
                if resume or world.launched:
                    what = "--resume" if resume else "torchrun"
                    raise ValueError(f"a comma list makes several runs in turn: not with {what}")
                return run_grid(size, given, out, HERE, run)
            *parts, record = start(size, given, out, resume, world, heading, bare)
            with closing(record):
                return train(*parts, record)
        except KeyboardInterrupt:  # before training: later ones are handled there
            print("interrupted before the first step: nothing to save", file=sys.stderr)
            return 130
        except (ValueError, OSError, MemoryError, RuntimeError) as e:
            if not (line := refusal(e, record)):
                raise
            if world.chief:
                print(f"train.py: error: {line}", file=sys.stderr)
            return 2


def main(argv=None):
    """The command. Returns the exit code."""
    open_streams()
    try:
        asked = parse(argv)
    except ValueError as e:
        print(f"train.py: error: {one_line(e)}", file=sys.stderr)
        return 2
    return run(*asked)


if __name__ == "__main__":
    raise SystemExit(main())
