"""What holds on a CPU holds on a GPU, and a step makes the host wait for nothing."""

import pytest
import torch
from conftest import (
    ALL_NORMS,
    SMALL,
    At,
    Run,
    assert_close,
    fresh,
    press_ctrl_c,
    scramble,
    tiny,
    tokens,
)

import train
from data.settings import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = [f for f in SMALL if not f.startswith(("--device", "--dtype", "--compile"))]
CUDA += ["--device=cuda", "--steps=30", "--log-every=10", "--eval-every=15", "--save-every=10"]


@pytest.fixture
def on_gpu(place, tmp_path):
    def run(name, *flags, resume=False):
        argv = ["--resume", tmp_path / name] if resume else [
            *CUDA, "--data", place / "text.txt", "--out", tmp_path / name]  # fmt: skip
        return Run(tmp_path / name, train.main([*map(str, argv), *flags]))

    return run


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_logits_and_gradients_are_those_of_the_cpu(norm):
    config = tiny(norm)
    model, (ids, targets) = scramble(fresh(config)), tokens(config)
    model(ids, targets).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    logits = model(ids).detach()
    model.zero_grad()
    model.cuda()
    assert_close(model(ids.cuda()).detach().cpu(), logits, 1e-4)
    model(ids.cuda(), targets.cuda()).backward()
    for name, p in model.named_parameters():
        assert_close(p.grad.cpu(), want[name], 1e-3, name)


@pytest.mark.parametrize("flags", [[], ["--compile=on"], ["--dtype=float32"], ["--accum=2"],
                                   ["--norm=gpas", "--gate-clip=0.01"],
                                   ["--cuda-graph", "--accum=2"]], ids=str)  # fmt: skip
def test_a_run_finishes_and_learns(on_gpu, flags):
    run = on_gpu("run", *flags)
    assert run.code == 0
    losses = [float(row["loss"]) for row in run.rows()]
    assert losses[-1] < losses[0] - 0.5


def test_a_step_between_two_rows_makes_the_host_wait_for_nothing(on_gpu, monkeypatch):
    """Reading a number, or a copy from pageable memory, would be an error in steps 12 to 18."""
    with (
        At(12, lambda: torch.cuda.set_sync_debug_mode("error")),
        At(18, lambda: torch.cuda.set_sync_debug_mode("default")),
    ):
        assert on_gpu("run", "--norm=gpas", "--compile=off").code == 0


def test_a_captured_step_is_the_step(on_gpu):
    """Every gate and matrix learns the same with one graph a forward and backward as without."""
    flags = ["--norm=gpas", "--accum=2", "--compile=off", "--dtype=float32"]
    one, two = on_gpu("eager", *flags), on_gpu("captured", *flags, "--cuda-graph")
    for name, w in one.weights.items():
        assert_close(two.weights[name], w, 1e-4, name)


def test_an_interrupted_run_goes_on(on_gpu):
    whole = on_gpu("whole")
    with At(13, press_ctrl_c):
        assert on_gpu("run").code == 130
    assert on_gpu("run", resume=True).code == 0
    ends = [
        float(Run(r.folder).rows()[-1]["val_loss"]) for r in (whole, on_gpu("run", resume=True))
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_a_broken_step_changes_nothing_though_nobody_looks(on_gpu):
    """The first number that is not finite lies between two rows: no later update counts."""
    absurd = ["--norm=post", "--lr=1e6", "--clip=0", "--warmup=0", "--dtype=float32"]
    run = on_gpu("run", *absurd, "--log-every=25", "--save-every=5")
    status = run.json("status.json")
    assert (run.code, status["status"]) == (3, "diverged")
    for path in run.folder.glob("ckpt*.pt"):
        ckpt = torch.load(path, weights_only=True)
        assert ckpt["state"]["step"] <= status["step"]
        assert all(w.isfinite().all() for w in ckpt["model"].values())


def test_bfloat16_where_the_card_has_it():
    major, _ = torch.cuda.get_device_capability()
    s, _ = resolve("71m", {"device": "cuda"})
    assert s["dtype"] == ("bfloat16" if major >= 8 else "float32")
