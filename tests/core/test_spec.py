"""The grammar and the registry: what is read and written back, where carets point, and who registers what."""

import sys
from collections import Counter
from functools import lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import dipole
from dipole import Composite, Objective, OptionError, RegistryError, SpecError
from dipole.core.objectives import losses, regularizers
from dipole.core.objectives.losses.infonce import InfoNCE
from dipole.core.objectives.registry import Registry, registry
from dipole.core.objectives.spec import Term, format_terms, parse
from dipole.core.utils import plugins
from tests.ranks import run_python
from tests.runs import refused

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.one_of(st.integers(-(10**9), 10**9), FLOATS, st.booleans(), st.none(), st.text(max_size=12))
TERMS = st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), st.none() | st.floats(0, 1e6))


@given(st.lists(TERMS, min_size=1, max_size=4))
@example([("a", {"b": "x²", "c": "naïve"}, None)])
def test_what_is_written_is_read_back(raw):
    terms = [Term(name, tuple(options.items()), weight) for name, options, weight in raw]
    again = parse(format_terms(terms))
    for term, read in zip(terms, again, strict=True):
        assert (read.name, read.weight) == (term.name, term.weight)
        assert term.options == read.options
        assert [type(value) for _, value in term.options] == [type(value) for _, value in read.options]


def test_spelling_weights_values_and_nonsense():
    assert dipole.objective("infonce+dp+cllr").weights == [1.0, 0.1, 0.1]
    assert str(dipole.objective("infonce+dp")) == "infonce + 0.1*dp"
    several = "infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5) + 0.1*cllr(dim=256, norm=nuclear)"
    sums = "0.5*infonce + 0.5*cacr(k=4, detach_weights=true)"
    for text in ("infonce", "infonce(similarity=bilinear)", sums, several):
        assert str(dipole.objective(text)) == text
    odd = dipole.objective(" nt-xent( temperature = 5e-1 ,similarity='cosine' )+.1*dp")
    assert str(odd) == "infonce(temperature=0.5, similarity=cosine) + 0.1*dp"
    assert [InfoNCE(1).temperature, InfoNCE(np.float32(0.25)).temperature] == [1.0, 0.25]
    nonsense = ("", "   ", "infonce(", "infonce)", "+", "infonce +", "*", "__import__('os')", "a.b")
    for text in (*nonsense, "infonce(temperature=2*3)"):
        refused(SpecError, None, dipole.objective, text)


OF_RELEASED = ("rank=512", "variant=printed, rank=512")
OF_PRINTED = ("norm=l21", "alpha=10", "solver=subgradient", "features=raw", "tolerance=0.01")


@pytest.mark.parametrize(("text", "word", "under"), [
    ("infonec", "Did you mean 'infonce'", "infonec"), ("MoCo-v2", "its loss is 'infonce'", "MoCo-v2"),
    ("infonce + 0.1*dpp", "Did you mean 'dp'", "dpp"), ("-1*infonce", "weight of infonce must be >= 0", "-1*"),
    ("infonce(temprature=1)", "Did you mean 'temperature'", "temprature=1"),
    ("infonce(temperature=0)", "> 0", "temperature=0"), ("infonce(temperature=-1)", "> 0", "temperature=-1"),
    ("infonce(temperature=cold)", "a number > 0 or learned", "temperature=cold"),
    ("infonce(temperature=true)", "a number > 0", "temperature=true"),
    ("infonce(similarity=cosin)", "cosine, dot, bilinear", "similarity=cosin"),
    ("infonce(joint=1)", "true or false", "joint=1"), ("cacr(k=2.5)", "an integer >= 1", "k=2.5"),
    ("dcl(rho=1)", "< 1", "rho=1"), ("infonce + dp(delta_pos=0.6)", "delta_pos must be < delta_neg", "delta_pos=0.6"),
    ("infonce $ dp", "cannot read '$'", "$"), ("infonce dp", "expected '+' or the end", "dp"),
    ("infonce - 0.1*dp", "Terms are added", "-"), ("infonce*0.5", "a weight comes before its term", "*"),
    ("infonce(temperature=)", "expected a value", ")"), ("infonce(temperature 1)", "expected '='", "1"),
    ("infonce(temperature=1, temperature=2)", "given twice", "temperature"), ("0.1 dp", "expected '*'", "dp"),
    ("infonce(temperature=1e-320)", "> 0 or learned, of a size from 1e-30 to 1e30, got 1e-320", "temperature=1e-320"),
    ("1e300*infonce", "weight of infonce must be >= 0 and at most 1e+30, got 1e+300", "1e300*"),
    ("infonce(temperature=1e999)", "too large", "1e999"), ("infonce + alignment", "diagnostic", "alignment"),
    ("infonce + dp(self=none)", "dp has no option 'self'. Its options: delta_pos", "self=none"),
    ("infonce(init=0.1)", "Write temperature=learned, init=0.1, or temperature=0.1 alone", "init=0.1"),
    ("dcl(temperature=0.3, init=0.1)", "temperature is 0.3", "init=0.1"),
    ("infonce(temperature=learned, init=0.001)", "init must be a number >= 0.01 or none, got 0.001", "init=0.001"),
    ("swav(temperature=learned)", "swav: temperature must be a number > 0, got 'learned'", "temperature=learned"),
    ("cacr(t_neg=learned)", "t_neg must be a number >= 0, got 'learned'", "t_neg=learned"),
    ("siglip(bias=-3, bias_init=-2)", "Write bias=learned, bias_init=-2, or bias=-2 alone", "bias_init=-2"),
    *((f"infonce + cllr({wrong})", "cllr: rank is of variant=released", "rank=5") for wrong in OF_RELEASED),
    *((f"infonce + cllr(variant=released, {wrong})", "is of variant=printed", wrong) for wrong in OF_PRINTED),
])  # fmt: skip
def test_errors_point_at_the_culprit(text, word, under):
    with pytest.raises(SpecError) as caught:
        dipole.objective(text)
    message = str(caught.value)
    assert word in message
    line, carets = message.split("\n")[-2:]
    assert line[carets.index("^") :].startswith(under)
    assert carets.count("^") >= len(under.split("=")[0]) or under in (")", "1")


ODD = type("Odd", (Objective,), {"__init__": lambda this, weight=1.0: Objective.__init__(this, "cosine")})


@pytest.mark.parametrize(("make", "said"), [
    *((lambda t=t: InfoNCE(t), f"temperature must .* > 0 or learned, got {str(t)[:4]}") for t in (-1, True, 10**400)),
    *((lambda n=n: InfoNCE(**{n: 1}), f"infonce has no option '{n}'") for n in ("temprature", "self")),
    (lambda: Objective("foo"), "must be one of cosine, dot, bilinear or none, got 'foo'"),
    (lambda: Objective(simil="dot"), "no option 'simil'. Did you mean 'similarity'"),
    (lambda: ODD("x"), "Odd: weight must be a number"),
    (lambda: Composite([]), "needs one term at least"), (lambda: Composite(["dp"]), r"an Objective .*got \['dp'\]"),
    (lambda: Composite([InfoNCE()], [1.0, 2.0]), "a weight for each of 1 terms, got 2"),
    *((lambda d=d: dipole.objective("infonce", dim=d), f"a whole number >= 1, got {d}") for d in (0, 2.5, True)),
])  # fmt: skip
def test_constructors_check_like_the_grammar(make, said):
    refused(OptionError, said, make)


def test_everything_is_registered():
    assert len(registry.entries("diagnostic")) >= 8
    for package, kind in ((losses, "objective"), (regularizers, "regularizer")):
        files = {path.stem for path in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
        homes = {entry.target.__module__ for entry in registry.entries(kind)}
        own = {home for home in homes if home.startswith("dipole.")}
        assert own == {f"{package.__name__}.{name}" for name in files}


@pytest.mark.parametrize(("name", "settings", "said"), [
    ("infonce", {"source": "none", "formula": "0"}, "already registered by dipole"),
    ("other", {"kind": "loss"}, "'other' .*be one of 'objective', 'regularizer', 'diagnostic', got 'loss'"),
    ("other", {"weight": -1.0}, r"cannot register 'other' .*weight must be a finite number >= 0, got -1\.0"),
    ("other", {"weight": float("nan")}, "weight must be a finite number >= 0, got nan"),
    ("other", {"weight": "1"}, "number >= 0, got '1'"), ("other", {"aliases": "abc"}, "tuple of names, got 'abc'"),
    ("other", {"deviations": ["one"]}, r"deviations must be a dictionary by paper, got \['one'\]"),
    (Counter, {}, r"register takes a name first, as in @dipole.register\('mine'\), got <class"),
])  # fmt: skip
def test_what_is_unusable_or_taken_is_not_registered(name, settings, said):
    with registry.temporary(), pytest.raises(RegistryError, match=said):

        @registry.register(name, **settings)
        class Other(Objective):
            """Another."""


def test_a_name_of_dipoles_own_stays_whoever_came_first():
    with registry.temporary():
        registry.register("counted")(Counter)
        refused(SpecError, r"'counted' is no subclass of dipole.Objective(.|\n)*\^", dipole.objective, "dp + counted")
        registry.register("made")(lru_cache(lambda temperature=0.1: temperature < 1 and InfoNCE(temperature)))
        assert dipole.objective("made(temperature=0.2)").terms[0].given == {"temperature": 0.2}
        refused(SpecError, "'made' returns no dipole.Objective", dipole.objective, "made(temperature=1)")
    fresh = Registry()
    fresh.register("infonce")(Counter)
    with pytest.raises(RegistryError, match=r"registered by dipole\..*\.InfoNCE; .*Counter needs another name"):
        fresh.register("infonce")(InfoNCE)


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is(entry):
    assert entry.summary.endswith(".")
    assert all((entry.formula, entry.source))
    assert not [option.name for option in entry.options if not (option.help and option.allowed)]
    assert all(f"{entry.target.first_temperature} when none" in o.help for o in entry.options if o.name == "init")


REGISTER = """
from functools import partial
from dipole.core.objectives import registry as home
register = partial(getattr(home, "current", home.registry).register, formula="0", source="none")
"""


def write_modules(folder: Path, **texts: str) -> None:
    """Write modules that may register something."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(REGISTER + text if "@register" in text else text)


BROKEN_ONCE = """
import sys
from importlib.abc import MetaPathFinder

class Fails(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "dipole.core.objectives.losses.dcl":
            raise RuntimeError("no memory")

sys.meta_path.insert(0, fails := Fails())
from dipole.core.objectives.registry import registry
for call in (registry.entries, lambda: registry.get("infonce"), lambda: registry.broken):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "no memory"
    else:
        raise SystemExit("a partial registry was handed out")
sys.meta_path.remove(fails)
print(*sorted(entry.name for entry in registry.entries()))
"""


def test_an_import_that_fails_once_is_said_and_tried_again():
    done = run_python("-c", BROKEN_ONCE)
    assert set(done.stdout.split()) == {entry.name for entry in registry.entries()}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A registry that finds the modules of a folder, as plug-ins of these names."""

    def declare(**modules: str) -> Registry:
        monkeypatch.syspath_prepend(tmp_path)
        found = [EntryPoint(name, module, "dipole.objectives") for name, module in modules.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        made = Registry()
        monkeypatch.setattr("dipole.core.objectives.registry.current", made, raising=False)
        return made

    return declare


def test_a_broken_plug_in_leaves_nothing_behind_and_takes_nothing_with_it(tmp_path, fresh):
    """One package imports another's module and then fails: the other's entries are there all the same."""
    half = "import whole_plugin\n@register('half')\ndef half():\n    'Half.'\n1 / 0\n"
    write_modules(tmp_path, whole_plugin="@register('whole')\ndef whole():\n    'Whole.'\n", broken_plugin=half)
    found = fresh(broken="broken_plugin", whole="whole_plugin")
    assert [entry.name for entry in found.entries()] == ["whole"]
    assert list(found.broken) == ["broken"]
    refused(SpecError, "ZeroDivisionError: division by zero", found.get, "broken")
    refused(SpecError, r"unknown name 'half'(.|\n)*A plug-in that cannot be used: 'broken'", found.get, "half")


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise BaseException('away')", "raise GeneratorExit()"])
def test_whatever_ends_an_import_ends_nothing_else(end, tmp_path, fresh):
    """The entries of its first module are removed, and that module can be imported, and so register, once more."""
    package = tmp_path / "half_package"
    package.mkdir()
    write_modules(
        package, __init__="", first="@register('first')\ndef first():\n    'First.'\n",
        whole=f"import sys\nfrom half_package import first\n{end}\n", again="from half_package import first\n",
    )  # fmt: skip
    found = fresh(whole="half_package.whole")
    assert found.entries() == []
    refused(SpecError, r"unknown name 'first'\.\nA plug-in that cannot be used: 'whole'", found.get, "first")
    __import__("half_package.again")
    assert [entry.name for entry in found.entries()] == ["first"]
    for name in [name for name in sys.modules if name.startswith("half_package")]:
        del sys.modules[name]


def test_what_any_plug_in_registers_is_undone_where_it_fails(tmp_path, monkeypatch):
    """A domain's module that registers an objective and then fails. An interruption is no broken plug-in."""
    half = "@register('of_a_domain')\ndef half():\n    'Half.'\n"
    write_modules(tmp_path, failing_domain=half, interrupted_plugin="raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.entries()
    absent = EntryPoint("theirs", "failing_domain:ABSENT", "dipole.domains")
    refused(plugins.PluginError, "ABSENT", plugins.load, absent)
    assert "of_a_domain" not in [entry.name for entry in registry.entries()]
    assert "failing_domain" not in sys.modules
    refused(KeyboardInterrupt, None, plugins.load, EntryPoint("interrupted", "interrupted_plugin", "dipole.objectives"))
