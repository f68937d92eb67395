"""Recipes, overrides, error messages, hashes, and what identifies a run."""

import importlib.util
import json
import linecache
import shutil
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, create_model

from dipole import ConfigError, Objective, objective
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Former
from dipole.core.record import read_record
from dipole.core.train.config import RunConfig, Settings, TrainConfig, toml_text
from dipole.core.train.identity import written_out
from dipole.core.train.recipe import UNSET, describe, load_recipe, parse_override, read_recipe, resolve, run_model
from dipole.core.train.run import train

scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
tables = st.recursive(
    st.dictionaries(st.text(), scalars | st.lists(scalars | st.lists(scalars, max_size=2), max_size=3), max_size=4),
    lambda inner: st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
TERM = """
from dipole.core.objectives.objective import Objective
from dipole.core.objectives.registry import register
{more}

@register("scaled")
class Scaled(Objective):
    "The similarity of the positives."

    needs_negatives = False

    def __init__(self) -> None:
        super().__init__("cosine")

    def loss(self, positive, rows):
        return -{factor} * positive.mean(1)
"""


def problems(*overrides: str, recipe: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value)


def test_precedence_and_origins(blobs):
    resolved = load_recipe(blobs, ["train.learning_rate=0.5", "blobs.noise=0.1"])
    train = resolved.config.train
    assert (train.learning_rate, resolved.config.settings.noise) == (0.5, 0.1)
    assert (train.batch_size, train.optimizer) == (16, "adam")
    names = ("train.learning_rate", "train.batch_size", "train.optimizer", "blobs.points")
    assert [resolved.origins[name] for name in names] == ["--set", "recipe", "default", "default"]
    # An empty override takes the recipe's value away.
    empty = ["train.steps=", "train.epochs=2", "train.best_by=null", "train.batch_size= ", "blobs.noise="]
    resolved = load_recipe(blobs, empty)
    assert (resolved.config.train.steps, resolved.config.train.epochs) == (None, 2)
    assert (resolved.config.train.batch_size, resolved.origins["train.batch_size"]) == (256, "default")
    assert resolved.config.settings.noise == 0.3


@pytest.mark.parametrize(("text", "value"), [
    *(("3", 3), ("1e-3", 1e-3), ("true", True), ("[1, 2]", [1, 2]), ('"3"', "3"), ("1\nc=2", "1\nc=2")),
    *(("", UNSET), (" null", None), ("None", None), ('"null"', "null"), ('""', "")),
    *((text, text) for text in ("cosine", "infonce(temperature=0.5) + 0.1*dp", "x=y")),
])  # fmt: skip
def test_override_values_are_toml_and_else_text(text, value):
    assert parse_override(f"a.b={text}") == (("a", "b"), value)


@pytest.mark.parametrize("overrides", ["train.steps=5", {"train.steps": 5}, [("train.steps", 5)], 5])
def test_overrides_are_a_list_of_texts(blobs, overrides):
    with pytest.raises(ConfigError, match=r"train\.steps=5"):
        load_recipe(blobs, overrides)


def test_every_problem_is_in_one_message(blobs):
    wrong = {
        "train.learning_rte=0.1": "train.learning_rte: no such setting. Did you mean 'learning_rate'?",
        "train.optimizer=adan": "train.optimizer: 'adan' is not allowed. Did you mean 'adam'? Allowed: adam,",
        "train.batch_size=16.5": "train.batch_size: should be a valid integer, got 16.5.",
        "train.clip=-1": "train.clip: should be greater than 0, got -1.",
        "blobs.nois=1": "blobs.nois: no such setting. Did you mean 'noise'? Allowed: points, classes",
        "blobs.dropout=1": "blobs.dropout: should be less than 1, got 1.",
        "objective=infonse": "Did you mean 'infonce'?", "oops": "'oops' is not of the form key=value",
    }  # fmt: skip
    message = problems(*wrong, recipe=blobs)
    assert "8 problems" in message
    assert all(said in message for said in wrong.values())
    # Carets stay under their place.
    lines = problems("objective=infonce + dp(delta_pos=2)", recipe=blobs).splitlines()
    place = next(number for number, line in enumerate(lines) if "^" in line)
    assert lines[place - 1].index("delta_pos") == lines[place].index("^")
    assert lines[place].strip("^ ") == ""


@pytest.mark.parametrize(("override", "message"), [
    ("train.momentum=0.9", "momentum has no effect with optimizer 'adam'"),
    ("train.milestones=[1,2]", "no effect with schedule 'constant'"), ("train.schedule=step", "needs milestones"),
    ("train.epochs=3", "give either epochs or steps, not both"), ("train.warmup=11", "longer than the run"),
    ("domain=visoin", "Did you mean 'vision'?"), ("device=gpu", "device: "),
    ("objective=none", "'none' is not possible in the domain 'blobs'"),
    ("objective=infonce(temperature=0)", "temperature"), ("train.steps.lr=3", "is a value, not a table"),
    ('train.batch_size="16"', "should be a valid integer"), ("deterministic=1", "should be a valid boolean"),
    ("train.learning_rate=nan", "finite"), ("train.betas=[a", """got "[a". In a shell, write KEY='["a", "b"]'."""),
    ("learning_rate=1", "learning_rate: no such setting at the top level; did you mean train.learning_rate?"),
])  # fmt: skip
def test_settings_that_are_wrong_or_do_not_go_together(blobs, override, message):
    assert message in problems(override, recipe=blobs)


def test_dependent_defaults_are_filled_in_and_frozen(blobs):
    config = load_recipe(blobs).config
    assert (config.train.betas, config.train.momentum, config.train.decay) == ((0.9, 0.999), None, None)
    sgd = load_recipe(blobs, ["train.optimizer=sgd", "train.schedule=step", "train.milestones=[1.0]"]).config.train
    assert (sgd.momentum, sgd.betas, sgd.decay) == (0.9, None, 0.1)
    assert load_recipe(blobs, ["train.precision=32"]).config.train.precision == "32"
    assert load_recipe(blobs, ["train.learning_rate=1"]).config.train.learning_rate == 1.0
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("overrides", [
    [], ["train.optimizer=lars", "train.schedule=step", "train.milestones=[2, 5.5]", "blobs.scales=[1, 2.5e-9]"],
    ["train.learning_rate=1e-7", "objective=infonce(temperature=0.07)+dp+0.25*cllr(norm=nuclear)"],
    ['name="quo\\"te \\\\ back\\nslash \\u007f \\u00e9"', "train.clip=1e22"],
])  # fmt: skip
def test_stored_text_reads_back_to_the_same_configuration(blobs, overrides):
    config = load_recipe(blobs, overrides).config
    again = resolve(tomllib.loads(config.to_toml())).config
    assert (again, again.hash) == (config, config.hash)
    # Written down once: a change means that finished runs are run again, and needs a line in the change log.
    assert resolve({"domain": "toy", "train": {"steps": 3}}).config.hash == "e9af96d7ce17"


def test_unknown_recipe_and_broken_file(tmp_path):
    broken = tmp_path / "broken.toml"
    for name, content, said in (
        ("nothing-here", b"", r"unknown recipe 'nothing-here'.*dipole|Shipped"),
        (tmp_path / "absent.toml", b"", "no recipe file"),
        (broken, b"a = = 3", r"broken.toml is not valid TOML.*line 1"),
        (broken, b"\xff\xfe\x00", r"broken.toml is UTF-16.*save it as UTF-8"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_recipe(name)
    broken.write_bytes(b'\xef\xbb\xbfname = "x"')  # as Windows saves UTF-8
    assert read_recipe(broken)["name"] == "x"


def test_nested_tables_are_named_by_their_path():
    inner = create_model("Inner", __base__=Settings, kind=(str, Field("a", pattern="^[ab]$")))
    outer = create_model("Outer", __base__=Settings, inner=(inner, inner()))
    with pytest.raises(ValueError, match="1 validation error") as caught:
        outer.model_validate_json('{"inner": {"knd": "a"}}')
    assert describe(caught.value, outer) == ["inner.knd: no such setting. Did you mean 'kind'? Allowed: kind."]


@given(tables)
def test_any_table_survives_toml(table):
    with suppress(UnicodeEncodeError):
        assert tomllib.loads(toml_text(table).encode().decode()) == table


def table(base: type[Settings] = Settings, **fields: Any) -> type[Settings]:
    """A table of dipole's own (its source is none of a plug-in)."""
    return create_model("Table", __base__=base, __module__=Settings.__module__, **fields)


EMPTY = table()


def configure(objective: str = "infonce", model: type[Settings] = EMPTY, **values: Any) -> RunConfig:
    text = json.dumps({"domain": "planet", "objective": objective, "train": {"steps": 3}} | values)
    return run_model("planet", model).model_validate_json(text)


def test_objectives_are_identified_by_what_they_compute():
    assert configure("infonce").hash == configure("infonce(temperature=0.5)").hash
    assert configure("infonce").hash != configure("infonce(temperature=0.4)").hash
    assert configure("infonce + dp").hash == configure("infonce + 0.1*dp(delta_pos=0.1)").hash
    assert configure("align-uniform").hash == configure("align_uniform").hash
    assert configure("barlow_twins").hash == configure("barlow_twins(redundancy=0.0051)").hash  # as its authors ran it
    config = configure("infonce + dp")
    assert configure("infonce").objective == "infonce"  # the text itself stays as it was written
    found = config.determining()
    assert [(weight, name) for weight, name, _ in found["objective"]] == [(1, "infonce"), (0.1, "dp")]
    assert (found["objective"][0][2]["temperature"], found["sources"]) == (0.5, {})


@pytest.mark.parametrize(
    ("text", "former"), [("vicreg", "vicreg(reduction=sum)"), ("align_uniform", "align_uniform(uniform_over=pairs)")]
)
def test_runs_before_an_option_keep_their_names(text, former):
    """The former meaning, written out, has the id that the text alone had before. The new default has another."""
    ((_, name, options),) = written_out(objective(former))
    (added,) = [each for each in registry.get(name).options if each.former is not None]
    assert added.name not in options
    ((_, _, changed),) = written_out(objective(text))
    assert changed == options | {added.name: added.default}
    assert isinstance(added.former, Former)


def test_a_changed_default_is_another_run():
    def hash_with(default: float) -> str:
        with registry.temporary() as names:

            @names.register("planetary")
            class Planetary(Objective):
                """A term."""

                def __init__(self, pull: float = default) -> None:
                    super().__init__("cosine")

            return configure("planetary").hash

    assert hash_with(1.0) == hash_with(1.0) == hash_with(1)  # the number, not its spelling
    assert hash_with(1.0) != hash_with(2.0)


def test_a_new_setting_does_not_rename_old_runs():
    old, new = table(width=(int, 4)), table(width=(int, 4), depth=(int, 2))
    assert configure(model=old).hash == configure(model=new).hash
    assert configure(model=new, planet={"depth": 3}).hash != configure(model=old).hash
    wider = create_model("Train", __base__=TrainConfig, __module__=TrainConfig.__module__, momentum2=(float, 0.5))

    class Later(table(width=(int, 5))):  # type: ignore[misc]
        __module__ = Settings.__module__
        defaults_version: ClassVar[int] = 2

    assert configure(model=Later).hash != configure(model=old).hash  # a changed default
    fields = {"train": (wider, ...), "colour": (str, "red")}
    later = create_model("Run", __base__=run_model("planet", old), __module__=RunConfig.__module__, **fields)
    text = json.dumps({"domain": "planet", "train": {"steps": 3}})
    assert later.model_validate_json(text).hash == configure(model=old).hash


def test_a_value_that_differs_counts_wherever_it_stands():
    inner = table(kind=(Literal["a"], "a"), size=(int, 1))
    other = table(kind=(Literal["b"], "b"), size=(int, 1))
    outer = table(part=(inner | other, inner()), parts=(tuple[inner, ...], ()), names=(dict[str, int], {}))  # type: ignore[valid-type]
    different = [{}, {"part": {"kind": "a", "size": 2}}, {"part": {"kind": "b"}}, {"names": {"x": 1}}]
    different += [{"parts": [{"kind": "a"}]}, {"parts": [{"kind": "a", "size": 2}]}]
    assert len({configure(model=outer, planet=values).hash for values in different}) == 6
    assert configure(model=outer, planet={"part": {"kind": "a", "size": 1}}).hash == configure(model=outer).hash


def test_what_does_not_determine_the_result_is_left_out():
    same = [{"name": "other"}, {"description": "x"}, {"device": "cpu"}]
    more = {"log_every": 1}, {"checkpoint_every": 1}, {"activation_checkpointing": True}, {"betas": [0.9, 0.999]}
    same += [{"train": {"steps": 3} | each} for each in (*more, {"batch_size": 256})]
    assert {configure(**values).hash for values in same} == {configure().hash}
    others = [{"seed": 1}, {"deterministic": True}, {"train": {"steps": 4}}, {"train": {"epochs": 3}}]
    others += [{"train": {"steps": 3, "evaluate_every": 1}}]  # curves, and scores of an agent along the way
    others += [{"train": {"steps": 3, "betas": [0.9, 0.99]}}]
    assert len({configure(**values).hash for values in [{}, *others]}) == 7


def test_a_preset_is_what_it_stands_for():
    values = {"small": {"width": 4}, "large": {"width": 8}}

    class Preset(table(preset=(Literal["small", "large"], "small"), width=(int | None, None))):  # type: ignore[misc]
        __module__ = Settings.__module__
        incidental: ClassVar[frozenset[str]] = frozenset({"preset"})

        def determining(self) -> dict[str, Any]:
            return values[self.preset] | super().determining()

    small = configure(model=Preset).hash
    assert configure(model=Preset, planet={"preset": "large", "width": 4}).hash == small
    assert configure(model=Preset, planet={"preset": "large"}).hash != small
    values["small"] = {"width": 5}
    assert configure(model=Preset).hash != small


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed distribution `planets 1.0` with a package that registers a term."""
    site = tmp_path / "site"
    package, info = site / "planets", site / "planets-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pull.py").write_text("FACTOR = 1\n")
    (package / "terms.py").write_text(TERM.format(more="from planets.pull import FACTOR", factor="FACTOR"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planets\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("planets\n")
    (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(site))
    with registry.temporary():
        importlib.import_module("planets.terms")
        yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "planets"]:
        del sys.modules[name]


def test_a_plugin_enters_with_its_version_and_source(plugin, tmp_path, monkeypatch):
    config = configure("infonce + scaled")
    first = config.hash
    ((name, (*distribution, _)),) = config.determining()["sources"].items()
    assert (name, distribution) == ("planets", ["planets", "1.0"])
    # A file that the term only imports.
    (plugin / "pull.py").write_text("FACTOR = 1000\n")
    assert config.hash != first
    (plugin / "pull.py").write_text("FACTOR = 1\n")
    assert config.hash == first
    moved = tmp_path / "elsewhere" / "planets"  # where it is installed does not matter
    shutil.copytree(plugin, moved)
    monkeypatch.setattr(sys.modules["planets"], "__path__", [str(moved)])
    assert configure("infonce + scaled").hash == first
    monkeypatch.setattr(sys.modules["planets"], "__path__", [str(plugin)])
    metadata = plugin.parent / "planets-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    assert config.hash != first


def test_a_domain_of_another_package_enters_as_well_and_an_edited_loss_is_another_run(blobs, plugin, tmp_path):
    import blobs_domain

    assert load_recipe(blobs).config.determining()["sources"].keys() == {"blobs_domain"}
    # Also where it takes its table from dipole.
    model = run_model("planet", EMPTY, blobs_domain.BlobsAdapter)
    config = model.model_validate_json('{"domain": "planet", "train": {"steps": 3}}')
    assert config.determining()["sources"].keys() == {"blobs_domain"}
    config = resolve({"domain": "toy", "objective": "infonce + scaled", "train": {"steps": 2}}).config
    first = train(config, tmp_path / "runs", quiet=True)
    assert read_record(tmp_path / "runs" / config.hash / "record.json") == first
    (plugin / "terms.py").write_text(TERM.format(more="", factor="1000"))
    assert config.hash != first.hash


def of_a_script(number: int, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = folder / f"script{number}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("__main__", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    spec.loader.exec_module(module)
    return module


def of_a_notebook(number: int, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kernel's __main__ has no file. A cell's lines lie in linecache under a name of its own."""
    name = f"/tmp/ipykernel_1/{number}.py"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    return of_standard_input(number, text, folder, monkeypatch, name)


def of_standard_input(number: int, text: str, folder: Path, monkeypatch, name: str = "<stdin>") -> ModuleType:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("run", [of_a_script, of_a_notebook, of_standard_input])
def test_a_class_of_a_notebook_enters_with_its_own_lines_and_that_of_a_script_with_its_file(run, tmp_path, monkeypatch):
    found = []
    for number, (more, factor) in enumerate((("", "1"), ("SEEDS = [1, 2, 3]", "1"), ("", "1000"))):
        with registry.temporary():
            run(number, TERM.format(more=more, factor=factor), tmp_path, monkeypatch)
            found.append(configure("scaled").hash)
    assert (len(set(found)), found[0] == found[1]) == ((3, False) if run == of_a_script else (2, True))
