"""Any command line is one line of error and exit code 2, with nothing written; or it works.

The lines are drawn from the flags' own table: values at, next to and far beyond the edges of each
range, of the wrong type, misspelt, doubled, in any combination.
"""

import collections
import contextlib
import io
import itertools
import shutil

import pytest
import torch
from conftest import SMALL, Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sample
import train
from data import runs
from data.settings import SIZES, TABLE, flag
from nanonorm import GATE_ACTS, INITS, NORM_KINDS, PLACEMENTS, VARIANTS, Transformer

NAMES = {  # what the names of these flags may be
    "norm": [*VARIANTS, "gpas", *(f"{n}+gpas" for n in VARIANTS)],
    "init": [*INITS],
    "norm_kind": [*NORM_KINDS],
    "gpas_act": [*GATE_ACTS],
    "gpas_gate": ["block", "sublayer"],
    "gpas_placement": ["auto", *PLACEMENTS],
    "lns_sites": ["both", "attn", "ffn"],
    "data": ["{text}", "c4", "{text}/x", "{place}", "nothing.txt", "\0", "~", "Shakespeare"],
    "size": [*SIZES],
}
WHOLE = [0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 64, 100, 257, 1000, 2**15, 2**31, 2**63, 10**30, -1]
REAL = ["0", "-0.0", "1", "0.5", "1e-3", "0.01", "0.999999", "2", "1e3", "1e-300", "1e300", "-1"]
STRANGE = ["", " ", "nan", "inf", "-inf", "1e999", "1.5", "1e2", "0x10", "1_0", "٣", "None", "true",
           "no", "é", "--", "-1", "=", "a b", "$(x)", "1,2", "\ud800", "9" * 5000]  # fmt: skip


@st.composite
def argument(draw):
    """One flag with a value, as one or two words."""
    name = draw(st.sampled_from([*TABLE, "size"]))
    kind, _, low, high = (*TABLE.get(name, (str, "")), None, None)[:4]
    if kind in (bool, bool | None):
        no = flag(name).replace("--", "--no-")
        return [draw(st.sampled_from([flag(name), no, flag(name) + "=true", no + "=1"]))]
    if isinstance(kind, tuple) or name in NAMES:
        good = st.sampled_from(NAMES.get(name) or [*kind])
        edge = st.one_of(good.map(str.upper), good.map(lambda s: s[:-1] + "x"))
    else:
        whole = kind in (int, int | None)
        good = st.sampled_from(["1", "2", "4", "8", "16"] if whole else REAL[2:6])
        step = 1 if whole else 1e-6
        edges = [v + d for v in (low, high) if v is not None for d in (-step, 0, step)]
        edge = st.sampled_from([str(e) for e in edges] + ([*map(str, WHOLE)] if whole else REAL))
    odds = draw(st.integers(0, 19))
    shown = draw(good if odds < 13 else edge if odds < 18 else st.sampled_from(STRANGE))
    if odds == 19:
        words = [flag(name), flag(name)[:-1], flag(name)[1:], flag(name) + "-x=" + shown]
        return [draw(st.sampled_from([*words, f"{flag(name)}={shown}".replace("-", "_")]))]
    return [flag(name), shown] if odds % 2 else [f"{flag(name)}={shown}"]


@pytest.fixture(scope="module")
def quick(place):
    """Runs that end soon: a small machine, no compiler, no pictures, at most so many forwards."""
    forward, left = Transformer.forward, [0]

    def ending(self, ids, targets=None):
        left[0] -= torch.is_grad_enabled()
        if left[0] < 0:  # 2^40 steps are allowed, and so are 2^20 forwards in one
            raise KeyboardInterrupt
        return forward(self, ids, targets)

    def short(folder, **options):
        return sample.sample_run(folder, **options | {"tokens": 2})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "plot", lambda folder: None)
        patch.setattr(train, "sample_run", short)
        patch.setattr(train, "memory_of", lambda device: 2**24)
        patch.setattr(torch, "compile", lambda f, **options: f)
        patch.setattr(Transformer, "compile_blocks", lambda self, **options: None)
        patch.setattr(Transformer, "forward", ending)
        yield left


def call(main, argv):
    """(exit code, lines on stderr) of a command in this process."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, err.getvalue()


def files(place):
    return {path: path.stat().st_mtime_ns for path in place.rglob("*")}


def check_refused(err, script):
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert err.startswith(f"{script}: error: ") and len(err) > len(script) + 15, err
    assert "Traceback" not in err and "Errno" not in err, err


def test_any_command_line_is_refused_in_one_line_or_works(place, quick, thorough):
    n, ends, numbers = 5000 if thorough else 300, collections.Counter(), itertools.count()

    @settings(max_examples=n, deadline=None, derandomize=not thorough, database=None,
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(st.lists(argument(), min_size=1, max_size=4))
    def check(arguments):
        out = place / f"drawn{next(numbers)}"
        words = [word for argument in arguments for word in argument]
        words = [w.replace("{text}", f"{place}/text.txt").replace("{place}", str(place))
                 for w in words]  # fmt: skip
        before = files(place)
        quick[0] = 30
        argv = [*SMALL, "--data", str(place / "text.txt"), "--out", str(out), *words]
        code, err = call(train.main, argv)
        ends[code] += 1
        if code == 2:
            check_refused(err, "train.py")
            assert files(place) == before
            return
        status = Run(out).json("status.json")["status"]
        assert status == {0: "finished", 3: "diverged", 130: "running"}[code]
        if code == 0:  # and what it wrote can be gone on with: nothing in it is out of range
            assert call(train.main, ["--resume", str(out)])[0] == 0
        shutil.rmtree(out)

    check()
    print(f"\n{sum(ends.values())} command lines: {dict(ends)}")
    assert ends[2] > n / 10 and ends[0] + ends[3] + ends[130] > n / 10


def test_any_sampling_command_is_refused_in_one_line_or_works(place, fit, thorough):
    run = fit("--steps=1")
    numbers = st.sampled_from([*map(str, WHOLE), *REAL, *STRANGE])
    words = st.one_of(
        st.tuples(st.sampled_from(["--temperature", "--top-k", "--seed", "--temp", "-x"]), numbers),
        st.tuples(st.just("--prompt"), st.text(max_size=40)),
        st.tuples(st.just("--prompt=\udcff\0é🙂\u202e" + "long " * 30)),
    )
    ends = collections.Counter()

    @settings(max_examples=2000 if thorough else 50, deadline=None, database=None,
              derandomize=not thorough)  # fmt: skip
    @given(st.lists(words, max_size=4))
    def check(arguments):
        argv = [str(run.folder), "--tokens=3", *itertools.chain(*arguments)]
        code, err = call(sample.main, argv)
        ends[code] += 1
        assert code in (0, 2)
        if code == 2:
            check_refused(err, "sample.py")

    check()
    assert ends[0] > 10 and ends[2] > 10
