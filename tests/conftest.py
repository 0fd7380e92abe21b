"""Small helpers shared by the tests: tiny models, random weights and tokens, comparisons."""

import csv
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanonorm import VARIANTS, Config, Transformer

torch.set_num_threads(1)  # with tensors this small, a second thread only costs

NORMS = [*VARIANTS]  # the plain variants
ALL_NORMS = [*NORMS, *(f"{norm}+gpas" for norm in NORMS)]


def tiny(norm="pre", **settings):
    """The config of a model small enough to compute by hand."""
    shape = {"layers": 4, "dim": 16, "heads": 2, "ffn": 24, "vocab": 32, "block": 16}
    return Config(**(shape | {"norm": norm} | settings))


def fresh(config, seed=0):
    """The model of `config`, drawn under `seed`."""
    torch.manual_seed(seed)
    return Transformer(config)


@torch.no_grad()
def scramble(model, seed=0):
    """Random weights in place: a start (gains 1, gates 0, small matrices) hides wrong wiring.

    Matrices get the size 1/√fan_in, the embedding 1, gains are around 1, and learned gates have
    alternating signs and sizes in 0.2..0.7, so that none is near 0 and none scales by 0.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda p: torch.randn(p.shape, generator=g, dtype=torch.float64)
    for p in model.parameters():
        if p.ndim == 2:
            p.copy_(draw(p) / p.shape[1] ** 0.5)
        elif p.numel() > 1:
            p.copy_(1 + 0.3 * draw(p))
    model.embed.weight.mul_(model.config.dim**0.5)
    sign = 1
    for alpha in sum(model.gates(), []):
        if alpha.requires_grad:
            alpha.copy_(sign * (0.2 + 0.5 * torch.rand((1,), generator=g, dtype=torch.float64)))
            sign = -sign
    return model


def tokens(config, T=10, batch=2, seed=1):
    """Random token ids and targets, (batch, T) each."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (batch, T + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def gradients(model, ids, targets):
    """{name: gradient of the loss} of the trainable parameters; leaves .grad filled."""
    model.zero_grad(set_to_none=True)
    model(ids, targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def gain(slot):
    """The gain of the norm in a slot (norm_in, norm_out), or None where the slot has no norm."""
    gains = [p for p in slot.parameters() if p.numel() > 1]  # a gate has one number
    assert len(gains) <= 1
    return gains[0] if gains else None


def assert_close(got, want, tol, what=""):
    """The largest difference is at most `tol` of the largest value of `want`."""
    assert got is not None, f"{what}: missing"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    error = (got - want).abs().max().item()
    scale = want.abs().max().item()
    assert error <= tol * scale + 1e-30, (
        f"{what}: off by {error:.3g} where values reach {scale:.3g}"
    )


def assert_same(got, want):
    """Two {name: tensor} have the same names and bit-equal tensors."""
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


# ---- For the tests of the scripts ---------------------------------------------------------------

# A run that takes a tenth of a second; a flag given after these overrides one of them.
SMALL = (
    "--layers=2 --dim=16 --heads=2 --vocab=257 --block=16 --batch=2 --steps=6 --lr=0.01 "
    "--device=cpu --dtype=float32 --compile=off"
).split()
# Several documents and characters of two and three bytes, so that neither tokens nor characters are
# bytes: 257 tokens are the single bytes and the separator.
TEXT = "".join(
    f"line {i} of the text: {'la ' * (i % 5)}ünï — {i * i}\n"
    + ("<|endoftext|>\n" if i % 7 == 6 else "")
    for i in range(60)
)


class Run:
    """What a run left in its folder."""

    def __init__(self, folder, code=None):
        self.folder, self.code = folder, code

    def text(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def json(self, name):
        def refuse(constant):
            raise ValueError(f"{name} holds {constant}, which is not JSON")

        return json.loads(self.text(name), parse_constant=refuse)

    def rows(self, name="log.csv"):
        return list(csv.DictReader(self.text(name).splitlines()))

    def timeless(self):
        """The rows of log.csv without the two columns of time."""
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "tok_per_s")}
            for row in self.rows()
        ]

    @property
    def ckpt(self):
        return torch.load(self.folder / "ckpt.pt", weights_only=True)

    @property
    def weights(self):
        return self.ckpt["model"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small text.txt that also takes the runs/ and the data/bins of the scripts."""
    import train
    from data import prepare

    place = tmp_path_factory.mktemp("place")
    (place / "text.txt").write_bytes(TEXT.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "BINS", place / "bins")
        patch.setattr(train, "HERE", place)
        yield place


@pytest.fixture(scope="module")
def fit(place):
    """fit(flags…) trains as the command does, in this process, and returns the Run.

    resume=run goes on with that run. The pictures, and a sample of more than a few tokens, which
    take most of the time of so small a run, are made with whole=True only.
    """
    import sample
    import train
    from data import runs

    def short_sample(folder, **options):
        return sample.sample_run(folder, **options | {"tokens": 5})

    numbers = itertools.count()

    def fit(*flags, resume=None, whole=False):
        folder = resume.folder if resume else place / f"out{next(numbers)}"
        if resume:
            argv = ["--resume", folder, *flags]
        else:
            argv = [*SMALL, "--data", place / "text.txt", *flags, "--out", folder]
        with pytest.MonkeyPatch.context() as patch:
            if not whole:
                patch.setattr(runs, "plot", lambda folder: None)
                patch.setattr(train, "sample_run", short_sample, raising=False)
            return Run(folder, train.main([str(a) for a in argv]))

    return fit


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of the scripts, for commands that are run as such: they write beside themselves."""
    root, copy = Path(__file__).resolve().parents[1], tmp_path_factory.mktemp("checkout")
    (copy / "data").mkdir()
    for file in (*root.glob("*.py"), *root.glob("data/*.py"), root / "data" / "gpt2.tiktoken"):
        shutil.copy(file, copy / file.relative_to(root))
    (copy / "text.txt").write_bytes(TEXT.encode())
    return copy


def pytest_addoption(parser):
    text = "20 kills in every mode, 5,000 command lines, every text: half an hour"
    parser.addoption("--thorough", action="store_true", help=text)
    parser.addoption("--answer", metavar="FILE", help="your answers, for tests/test_exercises.py")
    text = "a variant of your own: every test that any variant must pass, for it alone"
    parser.addoption("--variant", metavar="FILE.py:CLASS", help=text)


def pytest_configure(config):
    """Before the tests are collected, so that a variant of one's own is in the lists they use."""
    config.own = None
    if text := config.getoption("--variant"):
        from data.settings import own_variant

        try:
            config.own = own_variant(text)
        except ValueError as e:
            raise pytest.UsageError(f"--variant {e}") from None
        NORMS.append(config.own)
        ALL_NORMS.extend([config.own, f"{config.own}+gpas"])


def pytest_collection_modifyitems(config, items):
    """With --variant only what is about it."""
    if config.own:
        mine = {config.own, f"{config.own}+gpas"}
        of = lambda item: getattr(item, "callspec", None) and item.callspec.params.values()
        kept = [i for i in items if any(v in mine for v in of(i) or () if isinstance(v, str))]
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept


def is_own(norm):
    """Is it a variant from a file of its author's, with --variant?"""
    return ":" in norm


@pytest.fixture(scope="session")
def thorough(request):
    """Whether to test at length (pytest --thorough)."""
    return request.config.getoption("--thorough")


class Killed(BaseException):
    """Stands for the end of the process: nothing in train.py may catch it."""


class At:
    """Does something just before update `step` (from 1) is made."""

    def __init__(self, step, what):
        self.count, self.step, self.what = 0, step, what

    def __call__(self, optimizer, args, kwargs):
        self.count += 1
        if self.count == self.step:
            self.what()

    def __enter__(self):
        self.handle = register_optimizer_step_pre_hook(self)

    def __exit__(self, *_):
        self.handle.remove()


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def kill():
    raise Killed


@pytest.fixture(scope="module")
def stopped(fit):
    with At(2, press_ctrl_c):
        return fit("--norm=gpas", whole=True)


def assert_refused(code, capsys, *words):
    """Exit code 2, and exactly one line on stderr that has the words."""
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err and err.startswith("train.py: error: ")
    for word in words:
        assert re.search(word, err), f"{word!r} is not in {err!r}"


def tensors(x):
    """Every tensor in nested dicts and lists."""
    if isinstance(x, torch.Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    return [t for part in parts for t in tensors(part)]


def is_picture(path):
    """A whole PNG with more than one colour in it."""
    import matplotlib.image

    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    return (
        data.startswith(b"\x89PNG\r\n\x1a\n")
        and data[-8:-4] == b"IEND"
        and min(width, height) >= 300
        and np.ptp(matplotlib.image.imread(path)) > 0.5
    )


def listing(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def server():
    """A multiprocessing context whose processes are forks of one that has imported train."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["train", "pytest", "torch._dynamo", "torch._inductor.compile_fx"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
        )
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        context.Process(target=os.getpid).start()
    return context
