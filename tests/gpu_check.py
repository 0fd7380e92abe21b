"""What one GPU makes of it, in under eight minutes: `python tests/gpu_check.py [--out FILE]`.

The tests marked gpu; every variant's tokens/s at 71m against pre, GPAS among them; the share of the
card's own matrix products (MFU against a measured peak, not a data sheet's); steps of 32, 128 and
512 layers of `deep`; 300 updates of 71m on the shipped text with pre, gpas, lns and span. Writes a
JSON file (default data/results/gpu.json) as it goes, so that whatever was measured before a limit
is kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from bench import ours, where  # noqa: E402

from data.check import flops  # noqa: E402
from data.settings import resolve  # noqa: E402
from nanonorm import VARIANTS  # noqa: E402

BUDGET = 450  # seconds; later parts are left out when it is spent, and said to be


def seconds(step, n):
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(n):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / n


def settled(step, rounds=5, least=0.4):
    """Median seconds a step, after compiling and a few more."""
    first = seconds(step, 1)
    n = max(1, round(least / seconds(step, 3)))
    return first, statistics.median(seconds(step, n) for _ in range(rounds))


def matmul_peak(dtype):
    """The best FLOP/s of square products of this type on this card."""
    best = 0
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        best = max(best, 2 * n**3 / settled(lambda a=a, b=b: a @ b, least=0.2)[1])
    return best


def gpu_tests(table):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, timeout=120)
    table["tests marked gpu"] = {"result": done.stdout.strip().splitlines()[-1]}


def variants(table, left):
    s, config = resolve("71m", {"device": "cuda", "batch": 64, "accum": 1})
    tokens = s["batch"] * s["block"]
    peak = matmul_peak(getattr(torch, s["dtype"]))
    table["matmul peak, TFLOP/s"] = {s["dtype"]: round(peak / 1e12, 1)}
    base = {}
    for compiled in (True, False):
        how = "compiled" if compiled else "eager"
        names = (
            ["pre", "gpas", *(n for n in VARIANTS if n != "pre")] if compiled else ["pre", "gpas"]
        )
        for norm in names:
            if left() < 200:
                table[f"71m, {norm}, {how}"] = "left out: no time"
                continue
            model, step = ours(s, compiled, norm=norm)
            first, t = settled(step)
            base.setdefault(how, t)
            table[f"71m, {norm}, {how}"] = {
                "tokens_per_s": round(tokens / t), "over_pre": round(base[how] / t, 3),
                "mfu": round(flops(config, tokens) / t / peak, 3), "first_step_s": round(first, 1),
                "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            }  # fmt: skip
            print(norm, how, table[f"71m, {norm}, {how}"], flush=True)
            del model, step
            torch.cuda.reset_peak_memory_stats()


def depths(table, left):
    for layers in (32, 128, 512):
        s, _ = resolve("deep", {"device": "cuda", "layers": layers})
        for compiled in (True, False):
            name = f"deep, span, {layers} layers, {'compiled' if compiled else 'eager'}"
            if left() < 150:
                table[name] = "left out: no time"
                continue
            model, step = ours(s, compiled, norm="span")
            first, t = settled(step, rounds=3)
            table[name] = {"step_s": round(t, 4), "ms_per_layer": round(1e3 * t / layers, 4),
                           "first_step_s": round(first, 1)}  # fmt: skip
            print(name, table[name], flush=True)
            del model, step


def graphs(table, left):
    """A deep, narrow model's updates with and without `--cuda-graph`, through train.py itself."""
    for how in ("--no-cuda-graph", "--cuda-graph"):
        with tempfile.TemporaryDirectory() as out:
            flags = f"--size deep --layers 128 --norm span --steps 40 --compile off {how}"
            table[f"40 updates of deep, 128 layers, {how}"] = trained(flags, out, left())


def trained(flags, out, limit):
    """What train.py says of a run on the shipped text."""
    command = [sys.executable, str(ROOT / "train.py"), *flags.split(), "--out", f"{out}/run"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=limit)
    path = Path(out) / "run" / "status.json"
    status = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"exit": done.returncode, "seconds": status.get("seconds"), "best": status.get("best"),
            "errors": done.stderr[-300:]}  # fmt: skip


def runs(table, left):
    for norm in ("pre", "gpas", "lns", "span"):
        if left() < 40:
            table[f"300 updates of 71m, {norm}"] = "left out: no time"
            continue
        with tempfile.TemporaryDirectory() as out:
            flags = "--size 71m --steps 300 --batch 64 --accum 1 --eval-every 150 --save-every 300"
            done = trained(f"{flags} --norm {norm} --data shakespeare", out, left())
        table[f"300 updates of 71m, {norm}"] = done
        print(norm, table[f"300 updates of 71m, {norm}"], flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", default=str(ROOT / "data" / "results" / "gpu.json"), metavar="FILE"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_check.py: no CUDA device here: nothing measured", file=sys.stderr)
        return 2
    started, table = time.monotonic(), {}
    left = lambda: BUDGET - (time.monotonic() - started)
    table |= where(torch.cuda.get_device_name()) | {"command": "python tests/gpu_check.py"}
    torch.set_float32_matmul_precision("high")  # as train.py has it
    for part in (gpu_tests, graphs, variants, depths, runs):
        try:
            part(table) if part is gpu_tests else part(table, left)
        except Exception as e:  # what was measured is kept, and the rest tried
            table[f"{part.__name__} failed"] = f"{type(e).__name__}: {e}"[:500]
        table["seconds"] = round(time.monotonic() - started, 1)
        text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
        Path(args.out).write_text(text, encoding="utf-8")
    print(json.dumps(table, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
