"""Comma lists: `train.py --norm pre,gpas --lr 1e-3,3e-3 --seed 0,1` makes every combination."""

import math

import numpy as np
import pytest
from conftest import (
    SMALL,
    TEXT,
    At,
    Killed,
    Run,
    assert_refused,
    assert_same,
    is_picture,
    kill,
    listing,
    press_ctrl_c,
)

import sample
import train
from data import grid as grids
from data import runs
from data.runs import lock

FILES = "config.json log.csv layers.csv status.json ckpt.pt loss.png layers.png sample.txt".split()
SUMMARY = {"summary.csv", "runs.csv", "compare.png"}
# At this learning rate the second update breaks every variant, at that of SMALL none.
ABSURD = "--clip=0 --warmup=0 --log-every=1 --save-every=1".split()


class Grid(Run):
    """What a grid left in its folder: `runs` has the Run of each, in the order they were begun."""

    @property
    def runs(self):
        made = [Run(path.parent) for path in self.folder.glob("*/config.json")]
        return sorted(made, key=lambda run: (run.folder / ".lock").stat().st_mtime_ns)

    def by(self, *keys):
        """{the values of these settings: Run}, all different."""
        found = {}
        for run in self.runs:
            key = tuple(run.json("config.json")[k] for k in keys)
            assert key not in found
            found[key if len(keys) > 1 else key[0]] = run
        return found


def without_pictures(patch):
    """Leave out what takes most of the time of so small a run."""
    few = lambda folder, **options: sample.sample_run(folder, **options | {"tokens": 5})
    patch.setattr(runs, "plot", lambda folder: None)
    patch.setattr(grids, "draw", lambda *_: None)
    patch.setattr(train, "sample_run", few)


@pytest.fixture(scope="module")
def grid(place, tmp_path_factory):
    """grid(flags…, out=Grid or folder) gives the command and returns the Grid; whole: pictures."""

    def make(*flags, out=None, whole=False):
        folder = getattr(out, "folder", out) or tmp_path_factory.mktemp("grid") / "grid"
        argv = [*SMALL, "--data", place / "text.txt", *flags, "--out", folder]
        with pytest.MonkeyPatch.context() as patch:
            if not whole:
                without_pictures(patch)
            return Grid(folder, train.main([str(a) for a in argv]))

    return make


MADE = "--norm=pre,gpas --lr=0.01,0.03 --seed=0,1".split()


@pytest.fixture(scope="module")
def made(grid):
    """Two variants, two learning rates, two seeds."""
    made = grid(*MADE)
    assert made.code == 0
    return made


# ---- What is made -------------------------------------------------------------------------------


def test_every_combination_is_made_once_in_a_folder_of_its_own(made):
    found = made.by("norm", "lr", "seed")
    assert found.keys() == {
        (n, lr, s) for n in ("pre", "pre+gpas") for lr in (0.01, 0.03) for s in (0, 1)
    }
    for run in found.values():
        assert run.json("status.json")["status"] == "finished"
        assert run.json("status.json")["step"] == 6


def test_each_folder_has_the_usual_files(grid):
    """Nor are the pictures and the sample of each run left out."""
    made = grid("--seed=0,1", "--steps=2", whole=True)
    assert {path.name for path in made.folder.iterdir() if path.is_file()} == SUMMARY
    for run in made.runs:
        assert {path.name for path in run.folder.iterdir()}.issuperset(FILES)
        assert is_picture(run.folder / "loss.png")
        assert run.text("sample.txt")


def test_the_seeds_come_last(made):
    """Every variant is seen once before any is seen twice."""
    order = [run.json("config.json") for run in made.runs]
    assert [s["seed"] for s in order] == [0] * 4 + [1] * 4
    once = [(s["norm"], s["lr"]) for s in order]
    assert once[:4] == once[4:]


@pytest.mark.parametrize("norm, lr, seed", [("pre", 0.03, 1), ("pre+gpas", 0.01, 0)])
def test_a_run_of_a_grid_is_the_run_made_alone(made, fit, norm, lr, seed):
    alone = fit(f"--norm={norm}", f"--lr={lr}", f"--seed={seed}")
    run = made.by("norm", "lr", "seed")[norm, lr, seed]
    assert_same(run.weights, alone.weights)
    assert run.timeless() == alone.timeless()
    assert run.text("layers.csv") == alone.text("layers.csv")
    assert run.text("sample.txt") == alone.text("sample.txt")


def test_the_default_folder_is_beside_the_script(place, monkeypatch):
    """With a name that tells two grids apart, and is the same when the command is."""
    without_pictures(monkeypatch)
    argv = [*SMALL, "--data", str(place / "text.txt"), "--steps=1", "--warmup=0"]
    for seeds, folders in (("0,1", 1), ("0,1", 1), ("1,2", 2)):
        assert train.main([*argv, "--seed", seeds]) == 0
        found = [*(place / "runs").iterdir()]
        assert len(found) == folders and all((f / "summary.csv").exists() for f in found)


LISTS = {  # a flag, its values and what else the run needs
    "warmup": [0, 2],
    "min_lr": [0.0, 0.001, 0.002],
    "dtype": ["float32", "bfloat16"],
    "save_every": [1, 2],
    "batch": [1, 2],
    "gpas_gate": ["block", "sublayer"],
    "layers": [1, 2, 3],
}


@pytest.mark.parametrize("key, values", LISTS.items(), ids=LISTS)
def test_any_flag_may_be_a_list(grid, key, values):
    """Also one that is not in the name of a run made alone."""
    flag = f"--{key.replace('_', '-')}={','.join(map(str, values))}"
    made = grid(flag, "--norm=gpas", "--steps=3")
    assert made.code == 0
    assert {*made.by(key)} == {*values}


def test_texts_may_be_a_list(grid, place):
    """The same text under another name is another run."""
    other = place / "other.txt"
    other.write_bytes(TEXT[::-1].encode())
    made = grid("--data", f"{place / 'text.txt'},{other}")
    assert made.code == 0
    assert {*made.by("data")} == {str(place / "text.txt"), str(other)}


def test_a_file_whose_name_has_a_comma_is_one_file(place, fit):
    (place / "a,b.txt").write_bytes(TEXT.encode())
    run = fit("--data", place / "a,b.txt")
    assert run.code == 0
    assert run.json("config.json")["data"] == str(place / "a,b.txt")


# ---- One init for all ---------------------------------------------------------------------------


def test_variants_whose_own_inits_differ_share_one(grid, capsys):
    """Else their inits are compared, not their wiring; it is said."""
    made = grid("--norm=pre,span,deepnorm")
    assert {norm: run.json("config.json")["init"] for norm, run in made.by("norm").items()} == {
        "pre": "scale_init", "span": "scale_init", "deepnorm": "scale_init"
    }  # fmt: skip
    assert "scale_init for all" in capsys.readouterr().out
    assert "init" not in made.rows("summary.csv")[0]


def test_variants_whose_own_inits_are_the_same_keep_it(grid, capsys):
    made = grid("--norm=pre,lns")
    assert {run.json("config.json")["init"] for run in made.runs} == {"normal"}
    assert "scale_init" not in capsys.readouterr().out


def test_each_has_its_own_init_if_asked_for(grid, capsys):
    made = grid("--norm=pre,span,deepnorm", "--init=own")
    assert {norm: run.json("config.json")["init"] for norm, run in made.by("norm").items()} == {
        "pre": "normal", "span": "scale_init", "deepnorm": "deepnorm"
    }  # fmt: skip
    assert "for all" not in capsys.readouterr().out


def test_an_init_given_is_that_of_all(grid, capsys):
    made = grid("--norm=pre,span", "--init=fan_in")
    assert {run.json("config.json")["init"] for run in made.runs} == {"fan_in"}
    assert "for all" not in capsys.readouterr().out


def test_inits_may_be_compared(grid):
    made = grid("--norm=pre,span", "--init=normal,scale_init")
    both = {(n, i) for n in ("pre", "span") for i in ("normal", "scale_init")}
    assert made.by("norm", "init").keys() == both
    rows = made.rows("summary.csv")
    assert {(row["norm"], row["init"]) for row in rows} == both
    assert len({row["name"] for row in rows}) == 4
    assert all(row["best"] == "1" for row in rows)


# ---- Going on -----------------------------------------------------------------------------------


def results(made):
    """Everything in the folder but the locks."""
    return {path: data for path, data in listing(made.folder).items() if path.name != ".lock"}


def assert_same_grid(made, want):
    """The same runs, bit by bit, and the same summary."""
    assert made.code == 0
    keys = "norm", "lr", "seed"
    found, wanted = made.by(*keys), want.by(*keys)
    assert found.keys() == wanted.keys()
    for key, run in found.items():
        assert run.json("status.json")["status"] == "finished"
        assert_same(run.weights, wanted[key].weights)
        assert run.timeless() == wanted[key].timeless()
    assert made.text("summary.csv") == want.text("summary.csv")


def test_the_same_command_again_makes_nothing_new(grid, made):
    before, no_update = results(made), At(1, lambda: pytest.fail("an update was made"))
    with no_update:
        again = grid(*MADE, out=made)
    assert again.code == 0
    assert results(made) == before


@pytest.mark.parametrize("update", [3, 44])
def test_a_grid_that_is_interrupted_goes_on_with_the_same_command(grid, made, update):
    """In the first run, in the last."""
    with At(update, press_ctrl_c):
        broken = grid(*MADE)
    assert broken.code == 130
    begun = -(-update // 6)
    assert len(broken.runs) == begun
    count = At(1000, None)
    with count:
        assert_same_grid(grid(*MADE, out=broken), made)
    assert count.count == 48 - update  # none is made twice


def test_a_grid_that_is_interrupted_in_the_last_update_of_a_run_stops_there(grid):
    with At(6, press_ctrl_c):
        broken = grid("--seed=0,1,2")
    assert (broken.code, len(broken.runs)) == (130, 1)


def test_a_grid_that_is_interrupted_between_two_runs_goes_on_too(grid, monkeypatch):
    """While the summary is made."""
    flags = ["--seed=0,1"]
    with monkeypatch.context() as patch:
        patch.setattr(grids, "summarize", lambda runs: press_ctrl_c())
        broken = grid(*flags)
    assert (broken.code, len(broken.runs)) == (130, 1)
    again = grid(*flags, out=broken)
    assert again.code == 0 and again.rows("summary.csv")[0]["n"] == "2"


def test_a_grid_that_is_killed_goes_on_with_the_same_command(grid, made, tmp_path):
    flags = [*MADE, "--save-every=2"]
    with pytest.raises(Killed), At(12 + 5, kill):
        grid(*flags, out=tmp_path / "grid")
    assert_same_grid(grid(*flags, out=tmp_path / "grid"), made)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(grid, made, tmp_path):
    with pytest.raises(Killed), At(12 + 2, kill):
        grid(*MADE, out=tmp_path / "grid")
    assert_same_grid(grid(*MADE, out=tmp_path / "grid"), made)


def test_a_run_killed_before_its_first_status_begins_anew(grid, tmp_path, monkeypatch):
    def die(record, d):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(runs.Record, "status", die)
        grid("--seed=0,1", out=tmp_path / "grid")
    assert grid("--seed=0,1", out=tmp_path / "grid").code == 0


def test_a_folder_deleted_is_made_again(grid):
    made = grid("--seed=0,1,2")
    before = {seed: run.weights for seed, run in made.by("seed").items()}
    for path in made.by("seed")[1].folder.iterdir():
        path.unlink()
    count = At(1000, None)
    with count:
        assert grid("--seed=0,1,2", out=made).code == 0
    assert count.count == 6
    for seed, run in made.by("seed").items():
        assert_same(run.weights, before[seed])


def test_another_command_adds_to_the_grid(grid):
    """What is there already is not made again; the summary has all."""
    made = grid("--norm=pre", "--seed=0,1")
    count = At(1000, None)
    with count:
        again = grid("--norm=lns,pre", "--seed=1,2", out=made)
    assert again.code == 0 and count.count == 6 * 3
    assert made.by("norm", "seed").keys() == {
        ("pre", 0), ("pre", 1), ("pre", 2), ("lns", 1), ("lns", 2)
    }  # fmt: skip
    rows = {row["norm"]: row for row in made.rows("summary.csv")}
    assert (rows["pre"]["n"], rows["lns"]["n"]) == ("3", "2")
    assert len(made.rows("runs.csv")) == 5


def test_a_run_made_by_another_process_is_left_alone(grid, capsys):
    """It holds the lock of the run's folder; all others are made."""
    made = grid("--seed=0,1,2")
    busy = made.by("seed")[1]
    (busy.folder / "status.json").write_text('{"status": "running"}', encoding="utf-8")
    before = listing(busy.folder)
    for path in made.by("seed")[2].folder.iterdir():
        path.unlink()
    held = lock(busy.folder)
    capsys.readouterr()
    try:
        code = grid("--seed=0,1,2", out=made).code
    finally:
        held.close()
    assert code == 0
    assert listing(busy.folder) == before
    assert made.by("seed")[2].json("status.json")["status"] == "finished"
    assert "another process" in capsys.readouterr().out
    assert made.rows("summary.csv")[0]["n"] == "2"
    assert grid("--seed=0,1,2", out=made).code == 0  # it has let go: its run goes on
    assert made.rows("summary.csv")[0]["n"] == "3"


# ---- Divergence ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diverged(grid):
    """One variant of two learning rates, the larger of which diverges; and one that always does."""
    made = grid("--norm=pre", "--lr=0.01,1e6", "--seed=0,1", *ABSURD)
    assert made.code == 0
    return grid("--norm=post", "--lr=1e6", "--seed=0,1", *ABSURD, out=made)


def test_a_divergence_is_a_result_and_the_grid_goes_on(diverged):
    assert diverged.code == 0
    status = {}
    for run in diverged.runs:
        s = run.json("config.json")
        status.setdefault((s["norm"], s["lr"]), set()).add(run.json("status.json")["status"])
    assert status == {
        ("pre", 0.01): {"finished"}, ("pre", 1e6): {"diverged"}, ("post", 1e6): {"diverged"}
    }  # fmt: skip


def test_a_divergence_is_not_tried_again(grid, diverged):
    before = results(diverged)
    with At(1, lambda: pytest.fail("an update was made")):
        again = grid("--norm=pre", "--lr=0.01,1e6", "--seed=0,1", *ABSURD, out=diverged)
    assert again.code == 0
    assert results(diverged) == before


def test_divergences_are_counted_and_have_no_loss(diverged):
    rows = {(row["norm"], float(row["lr"])): row for row in diverged.rows("summary.csv")}
    good, bad, never = rows["pre", 0.01], rows["pre", 1e6], rows["post", 1e6]
    assert (good["n"], good["diverged"], good["best"]) == ("2", "0", "1")
    for row in (bad, never):
        assert (row["n"], row["diverged"], row["best"]) == ("0", "2", "0")
        assert row["val_bpb"] == row["se"] == row["ahead"] == row["ahead_se"] == row["edge"] == ""
    lost = [row for row in diverged.rows("runs.csv") if row["status"] == "diverged"]
    assert len(lost) == 4 and {row["val_bpb"] for row in lost} == {""}


def test_a_variant_that_always_diverged_is_said_to(grid, diverged, capsys):
    capsys.readouterr()
    grid("--norm=post", "--lr=1e6", "--seed=0,1", *ABSURD, out=diverged)
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("post")]
    assert "diverged" in line


# ---- What the runs say --------------------------------------------------------------------------


def last(run, column="val_bpb"):
    return float(run.rows()[-1][column])


def test_the_summary_is_that_of_the_logs(made):
    """Mean and standard error over the seeds; the best rate; ahead of pre, seed by seed."""
    found = made.by("norm", "lr", "seed")
    loss = {key: last(run) for key, run in found.items()}
    rows = made.rows("summary.csv")
    assert [(r["norm"], float(r["lr"])) for r in rows] == [
        (n, lr) for n in ("pre", "pre+gpas") for lr in (0.01, 0.03)
    ]
    best = {}
    for norm in ("pre", "pre+gpas"):
        best[norm] = min((0.01, 0.03), key=lambda lr: loss[norm, lr, 0] + loss[norm, lr, 1])
    for row in rows:
        norm, lr = row["norm"], float(row["lr"])
        a, b = loss[norm, lr, 0], loss[norm, lr, 1]
        assert (row["n"], row["diverged"]) == ("2", "0")
        assert float(row["val_bpb"]) == pytest.approx((a + b) / 2, rel=1e-5)
        assert float(row["se"]) == pytest.approx(abs(a - b) / 2, rel=1e-3)
        assert row["best"] == str(int(lr == best[norm]))
        if lr != best[norm]:
            assert row["edge"] == row["ahead"] == row["ahead_se"] == ""
            continue
        assert row["edge"] == ("lowest" if lr == 0.01 else "highest")
        ahead = [loss["pre", best["pre"], s] - loss[norm, lr, s] for s in (0, 1)]
        assert float(row["ahead"]) == pytest.approx(sum(ahead) / 2, rel=1e-3, abs=1e-6)
        assert float(row["ahead_se"]) == pytest.approx(
            abs(ahead[0] - ahead[1]) / 2, rel=1e-2, abs=1e-6
        )


def test_runs_csv_has_a_row_of_every_run(made):
    rows = made.rows("runs.csv")
    assert len(rows) == 8
    for row in rows:
        run = Run(made.folder / row["folder"])
        s = run.json("config.json")
        assert (row["norm"], float(row["lr"]), int(row["seed"])) == (s["norm"], s["lr"], s["seed"])
        assert row["status"] == "finished"
        for column in ("val_bpb", "val_loss", "seconds"):
            assert float(row[column]) == pytest.approx(last(run, column), rel=1e-5)


def test_the_training_loss_is_the_mean_of_the_last_tenth(grid):
    made = grid("--seed=0,1", "--steps=21", "--log-every=1")
    for row in made.rows("runs.csv"):
        log = Run(made.folder / row["folder"]).rows()
        want = np.mean([float(r["loss"]) for r in log if int(r["step"]) in (19, 20, 21)])
        assert float(row["loss"]) == pytest.approx(want, rel=1e-5)


def run_of(norm, lr, seed, bpb=None, **settings):
    """What is read of a run, by hand; one that diverged has no loss."""
    return {
        "norm": norm, "lr": lr, "seed": seed, "status": "diverged" if bpb is None else "finished",
        "val_bpb": math.nan if bpb is None else bpb, "layers": 8,
    } | settings  # fmt: skip


def best_of(rows):
    return {row["name"]: row for row in rows if row["best"]}


def test_the_standard_error_is_that_of_the_mean():
    """With one degree of freedom less than there are seeds."""
    loss = [2.0, 2.1, 2.4, 2.3]
    [row] = grids.summarize([run_of("pre", 0.1, i, x) for i, x in enumerate(loss)])
    assert row["val_bpb"] == pytest.approx(2.2)
    spread = math.sqrt((0.04 + 0.01 + 0.04 + 0.01) / 3)
    assert row["se"] == pytest.approx(spread / 2)
    assert (row["n"], row["diverged"], row["edge"]) == (4, 0, "")


def test_one_seed_has_no_standard_error():
    rows = grids.summarize([run_of("pre", 0.1, 0, 2.0), run_of("lns", 0.1, 0, 1.5)])
    assert [row["se"] for row in rows] == [None, None]
    assert [row["ahead"] for row in rows] == [0.0, 0.5]
    assert [row["ahead_se"] for row in rows] == [None, None]
    assert "±" not in grids.as_text(rows).split("\n", 1)[1]


def test_the_best_rate_has_the_lowest_mean_where_fewest_diverge():
    """A rate at which one of the seeds diverged is no better for the loss of the others."""
    runs = [run_of("pre", lr, s, 2.0 + lr) for lr in (0.1, 0.2) for s in (0, 1)]
    runs += [run_of("pre", 0.4, 0, 1.0), run_of("pre", 0.4, 1)]
    rows = grids.summarize(runs)
    assert [(r["lr"], r["best"], r["n"], r["diverged"]) for r in rows] == [
        (0.1, 1, 2, 0), (0.2, 0, 2, 0), (0.4, 0, 1, 1)
    ]  # fmt: skip
    assert rows[2]["val_bpb"] == 1.0 and rows[2]["se"] is None


@pytest.mark.parametrize("at, edge", [(0, "lowest"), (1, ""), (2, "highest")])
def test_a_best_rate_at_the_edge_of_those_tried_is_marked(at, edge):
    rows = grids.summarize([run_of("pre", lr, 0, 2 - (i == at)) for i, lr in
                            enumerate((0.1, 0.2, 0.3))])  # fmt: skip
    assert [row["edge"] for row in rows] == [edge if i == at else "" for i in range(3)]
    assert ("tried" in grids.as_text(rows)) == bool(edge)


def test_variants_are_ahead_of_pre_seed_by_seed_each_at_its_best_rate():
    """The seeds' own differences cancel; a seed that one of the two lacks does not count."""
    pre = [run_of("pre", lr, s, 3 + s + (lr == 0.1)) for lr in (0.1, 0.2) for s in (0, 1, 2)]
    lns = [run_of("lns", lr, s, 2.5 + s + (lr == 0.2)) for lr in (0.1, 0.2) for s in (0, 1, 2)]
    lns[1]["val_bpb"] -= 0.3  # seed 1 at its best rate
    best = best_of(grids.summarize([*lns, *pre]))
    assert [*best] == ["pre", "lns"]  # the baseline is first, whatever the order
    assert (best["pre"]["lr"], best["lns"]["lr"]) == (0.2, 0.1)
    assert (best["pre"]["ahead"], best["pre"]["ahead_se"]) == (0, 0)
    ahead = np.array([0.5, 0.8, 0.5])
    assert best["lns"]["ahead"] == pytest.approx(ahead.mean())
    assert best["lns"]["ahead_se"] == pytest.approx(ahead.std(ddof=1) / 3**0.5)
    fewer = best_of(grids.summarize([*lns, *pre[:-1]]))  # pre has no seed 2 at its best rate
    assert fewer["lns"]["ahead"] == pytest.approx((0.5 + 0.8) / 2)


def test_a_variant_that_always_diverged_has_rows_and_no_best():
    rows = grids.summarize(
        [run_of("post", lr, 0) for lr in (0.1, 0.2)] + [run_of("pre", 0.1, 0, 2.0)]
    )
    assert [(row["norm"], row["best"]) for row in rows] == [("pre", 1), ("post", 0), ("post", 0)]
    assert all(math.isnan(row["val_bpb"]) for row in rows[1:])
    text = grids.as_text(rows)
    assert "post" in text and "nan" not in text


def test_all_may_have_diverged():
    rows = grids.summarize([run_of(norm, 0.1, 0) for norm in ("pre", "post")])
    assert [(row["best"], row["diverged"], row["n"]) for row in rows] == [(0, 1, 0)] * 2
    assert "nan" not in grids.as_text(rows)


def test_where_pre_always_diverged_nobody_is_ahead_of_it():
    best = best_of(grids.summarize([run_of("pre", 0.1, 0), run_of("lns", 0.1, 0, 2.0),
                                    run_of("span", 0.1, 0, 1.5)]))  # fmt: skip
    assert [*best] == ["lns", "span"]
    for row in best.values():
        assert row["ahead"] is None or math.isnan(row["ahead"])
        assert row["ahead_se"] is None


@pytest.mark.parametrize("pre", [(0, None), (1, 2.0)], ids=["pre diverged", "other seeds"])
def test_where_there_is_nothing_to_compare_none_is_said_to_be_ahead(pre):
    rows = grids.summarize([run_of("pre", 0.1, *pre), run_of("lns", 0.1, 0, 1.5)])
    assert "nan" not in grids.as_text(rows)


def test_what_differs_besides_the_variant_is_compared_too():
    """Each depth has rows, a best rate and a name of its own."""
    runs = [
        run_of(norm, lr, 0, 2 + lr / layers, layers=layers)
        for norm in ("pre", "lns") for layers in (2, 16) for lr in (0.1, 0.2)
    ]  # fmt: skip
    rows = grids.summarize(runs)
    assert len(rows) == 8 and len(best_of(rows)) == 4
    assert [(row["norm"], row["layers"]) for row in rows if row["best"]] == [
        ("pre", 2), ("pre", 16), ("lns", 2), ("lns", 16)
    ]  # fmt: skip
    assert all(row["norm"] in row["name"] and str(row["layers"]) in row["name"] for row in rows)
    for row in rows:
        assert row["val_bpb"] == pytest.approx(2 + row["lr"] / row["layers"])


def test_gpas_is_named_as_people_say():
    assert [*best_of(grids.summarize([run_of("pre+gpas", 0.1, 0, 2.0)]))] == ["gpas"]


@pytest.mark.parametrize("flag", ["--warmup=0,2", "--min-lr=0,0.005", "--dtype=float32,bfloat16"])
def test_values_that_are_swept_are_compared_and_not_taken_for_seeds(grid, flag):
    rows = grid(flag).rows("summary.csv")
    assert [row["n"] for row in rows] == ["1", "1"]


# ---- The picture --------------------------------------------------------------------------------


PICTURES = {
    "two variants": [run_of(n, lr, s, 2 + lr + s / 9) for n in ("pre", "lns") for lr in (0.1, 0.2)
                     for s in (0, 1)],
    "one run": [run_of("pre", 0.1, 0, 2.0)],
    "a variant that always diverged": [run_of("pre", 0.1, 0, 2.0), run_of("post", 0.1, 0),
                                       run_of("post", 0.2, 0)],
    "nothing but divergences": [run_of("pre", 0.1, 0), run_of("post", 0.2, 0)],
    "depths": [run_of(n, 0.1, s, 2 + k / 9 + s, layers=k) for n in ("pre", "pre+gpas")
               for k in (2, 4, 8) for s in (0, 1)],
    "depths and rates, one diverged": [
        run_of("pre", lr, 0, None if lr == k == 0.3 else 2 + k / 9, layers=k)
        for k in (2, 4) for lr in (0.1, 0.3)],
    "inits": [run_of(n, 0.1, 0, 2.0 + len(i), init=i) for n in ("pre", "span")
              for i in ("normal", "fan_in")],
    "one's own": [run_of(f"/some $where_/my_norm.py:My{n}", 0.1, 0, 2.0) for n in ("A", "B+gpas")],
}  # fmt: skip


@pytest.mark.parametrize("of", PICTURES.values(), ids=PICTURES)
def test_a_picture_is_drawn_of_any_grid(of, tmp_path, recwarn):
    grids.draw(of, grids.summarize(of), tmp_path / "compare.png")
    assert is_picture(tmp_path / "compare.png")
    assert [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)] == []


def test_the_picture_of_a_grid_is_drawn(grid, diverged):
    grid("--norm=post", "--lr=1e6", "--seed=0,1", *ABSURD, out=diverged, whole=True)
    assert is_picture(diverged.folder / "compare.png")


def test_a_picture_that_cannot_be_drawn_does_not_lose_the_numbers(grid, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no fonts")

    made = grid("--seed=0,1", "--steps=2")
    (made.folder / "summary.csv").unlink()
    monkeypatch.setattr(grids, "draw", fail)
    assert grid("--seed=0,1", "--steps=2", out=made, whole=True).code == 0
    assert made.rows("summary.csv")[0]["n"] == "2"
    assert "no fonts" in capsys.readouterr().out


# ---- What is said -------------------------------------------------------------------------------


def test_each_run_is_announced_with_the_time_that_is_left(grid, capsys):
    grid("--norm=pre,gpas", "--seed=0,1")
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.startswith("run ")]
    assert [line.split()[1] for line in heads] == ["1/4", "2/4", "3/4", "4/4"]
    want = [(n, s) for s in (0, 1) for n in ("pre", "pre+gpas")]
    for line, (norm, seed) in zip(heads, want, strict=True):
        assert f"norm={norm} " in line and f"seed={seed}" in line
        assert "left" in line and line.count(":") == 2
    assert "gpas" in out.splitlines()[-2] and "summary.csv" in out.splitlines()[-1]
    assert "tokens/s" not in out  # the runs themselves say little


def test_the_time_left_is_learned_from_the_runs_made():
    assert [grids.clock(s) for s in (0, 59.9, 61, 3600, 360_000)] == [
        "0:00:00", "0:00:59", "0:01:01", "1:00:00", "100:00:00"
    ]  # fmt: skip


# ---- What cannot be -----------------------------------------------------------------------------


@pytest.fixture
def refused(place, capsys):
    """refused(flags, words…): one line with the words, exit code 2, nothing written."""

    def check(flags, *words, data=True):
        given = flags.replace("{place}", str(place)).split(" ")
        argv = [*SMALL, *(["--data", str(place / "text.txt")] if data else [])]
        if not any(flag in given for flag in ("--out", "--resume")):
            argv += ["--out", str(place / "refused")]
        argv = [] if "--resume" in given else argv
        before = listing(place)
        assert_refused(train.main([*argv, *given]), capsys, *words)
        assert listing(place) == before

    return check


BAD = [  # (what is given, words that the line must have)
    ("--lr 1e-3,1e-3", "--lr", "twice"),
    ("--lr 1e-3,0.001", "--lr", "twice"),
    ("--norm pre,lns,pre", "--norm", "twice"),
    ("--norm gpas,pre+gpas", "same"),
    ("--norm pre --init own,normal", "same"),
    ("--seed 1,01", "--seed", "twice"),
    ("--lr 1e-3,,3e-3", "--lr", "''"),
    ("--lr 1e-3,", "--lr", "''"),
    ("--lr ,", "--lr", "''"),
    ("--norm pre,,gpas", "norm", "''"),
    ("--lr 1e-3,fast", "--lr", "fast"),
    ("--lr 1e-3,0", "--lr"),
    ("--lr 1e-3,-1", "--lr"),
    ("--norm pre,LNS", "LNS", "lns"),
    ("--layers 2,0", "layers 0"),
    ("--layers 2,two", "--layers", "two"),
    ("--dim 16,17", "dim 17"),
    ("--warmup 2,6", "--warmup 6", "--steps 6"),
    ("--dtype float32,fp16", "fp16"),
    ("--init normal,xavier", "xavier"),
    ("--seed 0,1,2.5", "--seed", "2.5"),
    ("--seed 0,1 --size huge", "huge"),
    ("--seed 0,1 --out {place}/text.txt", "text.txt"),
    ("--data nothing.txt,none.txt", "no(thing|ne)\\.txt"),
]


@pytest.mark.parametrize("flags, words", [(f, w) for f, *w in BAD], ids=[f for f, *_ in BAD])
def test_bad_lists_are_one_line_and_nothing_is_written(refused, flags, words):
    refused(flags, *words, data="--data" not in flags)


@pytest.mark.parametrize("second", ["", "nothing.txt"])
def test_a_text_that_is_not_there_is_found_before_the_first_run(refused, tmp_path, second):
    refused(f"--data {{place}}/text.txt,{second} --out {tmp_path / 'grid'}", data=False)
    assert not (tmp_path / "grid").exists()


def test_a_list_is_refused_on_resume(refused, fit):
    run = fit()
    refused(f"--resume {run.folder} --log-every 1,2", "--resume", "list")


def test_a_list_is_refused_under_torchrun(refused, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    refused("--seed 0,1", "torchrun", "list")


def test_a_folder_that_holds_a_run_is_no_grid(refused, fit):
    run = fit()
    refused(f"--seed 0,1 --out {run.folder}", "holds a run", "--out")


def test_a_folder_of_a_run_with_other_settings_is_not_taken_for_done(grid, capsys):
    """As if a name told too little: one line names the setting that differs."""
    made = grid("--seed=0,1", "--steps=2")
    one, two = made.runs
    for name in ("config.json", "status.json"):
        (two.folder / name).write_bytes((one.folder / name).read_bytes())
    before = listing(made.folder)
    capsys.readouterr()
    assert_refused(
        grid("--seed=0,1", "--steps=2", out=made).code, capsys, "--seed", two.folder.name
    )
    assert listing(made.folder) == before


def test_a_setting_that_no_name_tells_is_not_taken_for_done_either(grid, capsys):
    made = grid("--seed=0,1", "--min-lr=0.001")
    before = listing(made.folder)
    capsys.readouterr()
    assert_refused(grid("--seed=0,1", "--min-lr=0.002", out=made).code, capsys, "--min-lr")
    assert listing(made.folder) == before


@pytest.mark.parametrize("damage", [b"", b"{", b"[]"])
def test_a_damaged_run_is_refused(grid, capsys, damage):
    made = grid("--seed=0,1", "--steps=1", "--warmup=0")
    (made.runs[1].folder / "status.json").write_bytes(damage)
    capsys.readouterr()
    again = grid("--seed=0,1", "--steps=1", "--warmup=0", out=made)
    assert_refused(again.code, capsys, "damaged", made.runs[1].folder.name)
