"""A variant of one's own, in a file: `train.py --norm my_norm.py:MyNorm`."""

import json
import sys

import pytest
import torch
from conftest import SMALL, At, Run, assert_refused, assert_same, press_ctrl_c

import train
from data import grid, runs, settings
from nanonorm import VARIANTS, Config, Transformer

# Rules that variants of nanonorm.py have too, and one that none has.
OWN = '''"""Variants of my own."""

from nanonorm import Block, Post


class MyNorm(Block):
    """As pre."""

    def rule(self, s, x, c, rope):
        return s.add(x, s.f(s.norm_in(x), rope))


class MyDeep(Post):
    """As deepnorm, with its constants and its init."""

    formula = "x <- N(ax + f(x))"
    paper = "mine"
    init = "deepnorm"

    @staticmethod
    def constants(config, l):
        return ((2 * config.layers) ** 0.25,), ((2 * config.layers) ** 0.25,)

    def rule(self, s, x, c, rope):
        return s.norm_out(s.add(x, s.f(x, rope), scale=c[0]))


class Halved(Block):
    """A rule of no other variant."""

    def rule(self, s, x, c, rope):
        return s.add(x, s.f(s.norm_in(x), rope) / 2)


class Raises(Block):
    def rule(self, s, x, c, rope):
        return x + a_slip


class Narrow(Block):
    def rule(self, s, x, c, rope):
        return x.mean(-1, keepdim=True)


class Short(Block):
    def rule(self, s, x, c, rope):
        return x[:, :1]


class Returns(Block):
    def rule(self, s, x, c, rope):
        s.add(x, s.f(s.norm_in(x), rope))


class Unfinished(Block):
    """Neither a rule nor a forward."""


class NoBlock:
    pass


a_function = len
'''


@pytest.fixture
def own(tmp_path):
    """The path of a file of one's own variants; FILE.py:CLASS is own:CLASS."""
    path = tmp_path / "my_norm.py"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def variants():
    """The variants of nanonorm.py alone, before each test and after it."""
    before = dict(VARIANTS)
    yield before
    VARIANTS.clear()
    VARIANTS.update(before)


@pytest.fixture
def new_process(variants):
    """new_process() forgets every variant of one's own, as another process knows none."""

    def forget():
        VARIANTS.clear()
        VARIANTS.update(variants)

    return forget


@pytest.fixture
def quick(monkeypatch):
    """No pictures, and a sample of a few tokens, of commands that are not given with `fit`."""
    import sample

    few = lambda folder, **options: sample.sample_run(folder, **options | {"tokens": 5})
    monkeypatch.setattr(train, "sample_run", few)
    monkeypatch.setattr(runs, "plot", lambda folder: None)
    monkeypatch.setattr(grid, "draw", lambda *_: None)


@pytest.fixture
def refused(place, capsys):
    """refused(norm, words…): the command gives one line with the words, and writes nothing."""

    def check(norm, *words):
        argv = [*SMALL, "--data", str(place / "text.txt"), "--out", str(place / "refused")]
        before, variants = {*place.rglob("*")}, dict(VARIANTS)
        assert_refused(train.main([*argv, "--norm", str(norm)]), capsys, *words)
        assert {*place.rglob("*")} == before
        assert VARIANTS == variants  # what does not run is no variant

    return check


# ---- It is a variant like another ---------------------------------------------------------------


@pytest.mark.parametrize("gpas", ["", "+gpas"])
@pytest.mark.parametrize("mine, same", [("MyNorm", "pre"), ("MyDeep", "deepnorm")])
def test_it_trains_as_the_variant_with_the_same_rule(fit, own, mine, same, gpas):
    """With its own constants and init, and with GPAS."""
    run = fit(f"--norm={own}:{mine}{gpas}")
    assert run.code == 0
    assert_same(run.weights, fit(f"--norm={same}{gpas}").weights)


def test_another_rule_is_another_model(fit, own):
    mine, pre = fit(f"--norm={own}:Halved").weights, fit("--norm=pre").weights
    assert [name for name in pre if torch.equal(pre[name], mine[name])] == []


def test_it_is_made_known_with_a_formula_and_a_paper(own):
    """Its own if it states them."""
    for mine, *said in (("MyNorm", "MyNorm", "–"), ("MyDeep", "x <- N(ax + f(x))", "mine")):
        name = settings.own_variant(f"{own}:{mine}+gpas")
        assert name == f"{own}:{mine}+gpas"
        found = VARIANTS[f"{own}:{mine}"]
        assert (found.__name__, found.formula, found.paper) == (mine, *said)
        assert Transformer(Config(norm=name, layers=2, dim=8, heads=2, vocab=9)).gates()[0]


def test_making_it_known_draws_no_random_numbers(own):
    """Else a run would depend on whether its variant was tried."""
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    settings.own_variant(f"{own}:MyNorm")
    assert torch.equal(torch.rand(2), want)


def test_the_folder_has_the_name_of_the_class(place, own, quick):
    argv = [*SMALL, "--data", str(place / "text.txt"), "--norm", f"{own}:MyNorm"]
    assert train.main(argv) == train.main([*argv[:-1], f"{own}:MyNorm+gpas"]) == 0
    names = [path.name for path in (place / "runs").iterdir()]
    assert {name.split("-")[0] for name in names} == {"MyNorm", "MyNorm+gpas"}
    assert own.stem not in "".join(names)


def test_config_says_where_it_is_from_wherever_the_command_was_given(fit, own, monkeypatch):
    monkeypatch.chdir(own.parent)
    for path in (own.name, f"./{own.name}", f"../{own.parent.name}/{own.name}", own):
        assert fit(f"--norm={path}:MyNorm").json("config.json")["norm"] == f"{own}:MyNorm"


# ---- Resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpas", ["", "+gpas"])
def test_it_is_resumed_in_another_process_and_folder(fit, own, new_process, monkeypatch, gpas):
    flags = [f"--norm=my_norm.py:Halved{gpas}", "--save-every=2"]
    monkeypatch.chdir(own.parent)
    unbroken = fit(*flags)
    with At(3, press_ctrl_c):
        run = fit(*flags)
    assert run.code == 130
    new_process()
    monkeypatch.chdir("/")
    assert fit(resume=run).code == 0
    assert_same(run.weights, unbroken.weights)


def test_a_run_whose_file_has_gone_cannot_be_resumed(fit, own, new_process, capsys):
    with At(3, press_ctrl_c):
        run = fit(f"--norm={own}:MyNorm")
    own.unlink()
    new_process()
    capsys.readouterr()
    before = run.weights
    assert_refused(train.main(["--resume", str(run.folder)]), capsys, "my_norm.py")
    assert_same(run.weights, before)


# ---- In a grid ----------------------------------------------------------------------------------


def test_a_grid_compares_it_with_the_others(place, own, new_process, tmp_path, quick):
    """The same command goes on in another process."""
    out = tmp_path / "grid"
    argv = [*SMALL, "--data", place / "text.txt", "--seed=0,1", "--out", out]
    argv += ["--norm", f"pre,{own}:MyNorm,{own}:Halved+gpas"]
    argv = [str(a) for a in argv]
    with At(15, press_ctrl_c):
        assert train.main(argv) == 130
    new_process()
    assert train.main(argv) == 0
    made = {}
    for path in out.glob("*/status.json"):
        run = Run(path.parent)
        assert run.json("status.json")["status"] == "finished"
        made[path.parent.name.split("-")[0], run.json("config.json")["seed"]] = run.weights
    assert made.keys() == {(n, s) for n in ("pre", "MyNorm", "Halved+gpas") for s in (0, 1)}
    for seed in (0, 1):
        assert_same(made["MyNorm", seed], made["pre", seed])
    rows = {row["name"]: row for row in Run(out).rows("summary.csv")}
    assert rows.keys() == {"pre", "MyNorm", "Halved+gpas"} and [*rows][0] == "pre"
    assert rows["MyNorm"]["val_bpb"] == rows["pre"]["val_bpb"] != rows["Halved+gpas"]["val_bpb"]
    assert float(rows["MyNorm"]["ahead"]) == 0


def test_one_that_fails_in_a_list_stops_the_grid_before_its_first_run(refused, own):
    refused(f"pre,{own}:Missing", "Missing", "MyNorm")
    refused(f"{own}:Raises,pre", "a_slip")


# ---- What cannot be -----------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_refused(refused, tmp_path):
    refused(tmp_path / "none.py:MyNorm", "none.py", "No such file")


def test_a_class_that_is_not_there_is_refused_with_those_that_are(refused, own):
    refused(f"{own}:mynorm", "'mynorm'", "MyNorm, MyDeep, Halved")
    refused(f"{own}:", "MyNorm")


@pytest.mark.parametrize("name", ["NoBlock", "a_function", "__doc__"])
def test_what_is_no_block_is_refused(refused, own, name):
    refused(f"{own}:{name}", f"'{name}'", "MyNorm")


def test_a_file_without_a_block_is_said_to_have_none(refused, tmp_path):
    """A class that it only imports is not listed as one of its own."""
    (tmp_path / "empty.py").write_text("from nanonorm import Post\n", encoding="utf-8")
    refused(tmp_path / "empty.py:MyNorm", "has: none")


BROKEN = {
    "syntax": ("x = 1\n\nclass MyNorm(:\n    pass\n", "SyntaxError", "line 3"),
    "raises": ("x = 1\n1 / 0\n", "ZeroDivisionError", "line 2"),
    "imports": ("import no_such_package\n", "no_such_package", "line 1"),
    "exits": ("raise SystemExit('bye')\n", "SystemExit", "bye"),
    "zeros": ("\0", "null bytes"),
    "says much": ("raise ValueError('one\\ntwo\\n\\nthree')\n", "one two three"),
}


@pytest.mark.parametrize("text, words", [(t, w) for t, *w in BROKEN.values()], ids=BROKEN)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_line(refused, tmp_path, text, words):
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    refused(tmp_path / "broken.py:MyNorm", "broken.py", *words)


SLIPS = {
    "Raises": ("NameError", "a_slip", rf"line {OWN[: OWN.index('a_slip')].count(chr(10)) + 1}\b"),
    "Narrow": ("shape|size",),
    "Short": ("[Ss]ize|shape",),
    "Returns": (),
    "Unfinished": ("rule",),
}


@pytest.mark.parametrize("name, words", SLIPS.items(), ids=SLIPS)
def test_a_block_that_does_not_run_is_refused(refused, own, name, words):
    """A rule that raises, with its line; a stream of another shape, or none; no rule at all."""
    refused(f"{own}:{name}", "my_norm.py", name, *words)
    refused(f"{own}:{name}+gpas", "my_norm.py", name, *words)


def test_a_block_that_was_refused_may_be_mended(refused, fit, own):
    """Nothing is kept of the file that failed."""
    refused(f"{own}:Raises", "a_slip")
    own.write_text(OWN.replace("x + a_slip", "s.add(x, s.f(s.norm_in(x), rope))"), encoding="utf-8")
    assert fit(f"--norm={own}:Raises").code == 0


def test_an_unknown_ending_is_refused(place, own, capsys):
    argv = [*SMALL, "--data", str(place / "text.txt"), "--out", str(place / "refused")]
    assert_refused(train.main([*argv, "--norm", f"{own}:MyNorm+gap"]), capsys, "gap", "gpas")
    assert not (place / "refused").exists()


def test_its_module_does_not_take_the_place_of_another(fit, tmp_path):
    """A file may be named as one of ours."""
    (tmp_path / "train.py").write_text(OWN, encoding="utf-8")
    assert fit(f"--norm={tmp_path / 'train.py'}:MyNorm").code == 0
    assert sys.modules["train"] is train


def test_two_files_may_have_a_class_of_the_same_name(fit, own, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OWN.replace("rope))", "rope) * 3)"), encoding="utf-8")
    one, two = fit(f"--norm={own}:MyNorm"), fit(f"--norm={other}:MyNorm")
    assert json.loads(two.text("config.json"))["norm"] == f"{other}:MyNorm"
    assert not torch.equal(one.weights["head.weight"], two.weights["head.weight"])


# ---- Slips that only show in training -----------------------------------------------------------

MORE = {
    "a norm that is not used": "x + s.f(x, rope)",
    "a sum without s.add": "x + s.f(s.norm_in(x), rope)",
    "sequences mixed up": "s.add(x, s.f(s.norm_in(x), rope)).mean(0, keepdim=True)",
    "not a number": "s.add(x, s.f(s.norm_in(x), rope)) * float('nan')",
}


@pytest.mark.parametrize("rule", MORE.values(), ids=MORE)
def test_a_rule_that_cannot_be_trained_is_refused(refused, tmp_path, rule):
    """Every parameter must get a gradient, the probes must run, for more sequences than one."""
    head = "from nanonorm import Block\nclass MyNorm(Block):\n def rule(self, s, x, c, rope):\n"
    (tmp_path / "slip.py").write_text(f"{head}  return {rule}\n", encoding="utf-8")
    refused(tmp_path / "slip.py:MyNorm", "slip.py", "MyNorm")


def test_a_second_colon_is_refused(refused, own):
    refused(f"{own}:MyNorm:MyNorm", "my_norm.py")


def test_a_sample_can_be_drawn_in_another_process(fit, own, new_process, capsys):
    import sample

    run = fit(f"--norm={own}:MyNorm")
    new_process()
    assert sample.main([str(run.folder), "--tokens=3"]) == 2  # no file runs unasked
    assert f"--norm {own}:MyNorm" in capsys.readouterr().err
    assert sample.main([str(run.folder), "--tokens=3", f"--norm={own}:MyNorm"]) == 0
