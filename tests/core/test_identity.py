"""What identifies a run."""

import importlib.util
import json
import linecache
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest
from pydantic import create_model

from dipole.core.objectives.objective import Objective, objective
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Former
from dipole.core.record import read_record
from dipole.core.train.config import RunConfig, Settings, TrainConfig
from dipole.core.train.identity import written_out
from dipole.core.train.recipe import load, resolve, run_model
from dipole.core.train.run import train


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
    # The text itself stays as it was written.
    assert configure("infonce").objective == "infonce"
    found = configure("infonce + dp").determining()["objective"]
    assert [(weight, name) for weight, name, _ in found] == [(1, "infonce"), (0.1, "dp")]
    assert found[0][2]["temperature"] == 0.5
    assert configure("infonce + dp").determining()["sources"] == {}


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

    assert hash_with(1.0) == hash_with(1.0)
    assert hash_with(1.0) == hash_with(1)  # the number, not its spelling
    assert hash_with(1.0) != hash_with(2.0)


def test_a_new_setting_does_not_rename_old_runs():
    old, new = table(width=(int, 4)), table(width=(int, 4), depth=(int, 2))
    assert configure(model=old).hash == configure(model=new).hash
    assert configure(model=new, planet={"depth": 3}).hash != configure(model=old).hash
    wider = create_model("Train", __base__=TrainConfig, __module__=TrainConfig.__module__, momentum2=(float, 0.5))
    fields = {"train": (wider, ...), "colour": (str, "red")}
    later = create_model("Run", __base__=run_model("planet", old), __module__=RunConfig.__module__, **fields)
    text = json.dumps({"domain": "planet", "train": {"steps": 3}})
    assert later.model_validate_json(text).hash == configure(model=old).hash


def test_a_value_that_differs_counts_wherever_it_stands():
    inner = table(kind=(Literal["a"], "a"), size=(int, 1))
    other = table(kind=(Literal["b"], "b"), size=(int, 1))
    outer = table(part=(inner | other, inner()), parts=(tuple[inner, ...], ()), names=(dict[str, int], {}))  # type: ignore[valid-type]
    different = (
        {}, {"part": {"kind": "a", "size": 2}}, {"part": {"kind": "b"}}, {"parts": [{"kind": "a"}]},
        {"parts": [{"kind": "a", "size": 2}]}, {"names": {"x": 1}},
    )  # fmt: skip
    assert len({configure(model=outer, planet=values).hash for values in different}) == 6
    assert configure(model=outer, planet={"part": {"kind": "a", "size": 1}}).hash == configure(model=outer).hash


def test_a_changed_default_is_said_by_the_version_of_the_tables_defaults():
    class Later(table(width=(int, 5))):  # type: ignore[misc]
        __module__ = Settings.__module__
        defaults_version: ClassVar[int] = 2

    assert configure(model=Later).hash != configure(model=table(width=(int, 4))).hash


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        *(({name: value}, False) for name, value in (("name", "other"), ("description", "x"), ("device", "cpu"))),
        *(({"train": {"steps": 3, name: 1}}, False) for name in ("log_every", "checkpoint_every")),
        ({"train": {"steps": 3, "activation_checkpointing": True}}, False),
        ({"train": {"steps": 3, "batch_size": 256, "betas": [0.9, 0.999]}}, False),
        ({"seed": 1}, True),
        ({"deterministic": True}, True),
        ({"train": {"steps": 4}}, True),
        ({"train": {"epochs": 3}}, True),
        ({"train": {"steps": 3, "evaluate_every": 1}}, True),  # curves, and scores of an agent along the way
        ({"train": {"steps": 3, "betas": [0.9, 0.99]}}, True),
    ],
)
def test_what_does_not_determine_the_result_is_left_out(values, counts):
    assert (configure(**values).hash != configure().hash) == counts


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


def test_a_plugin_enters_with_its_version_and_source(plugin):
    config = configure("infonce + scaled")
    first = config.hash
    (name, (distribution, version, _)) = next(iter(config.determining()["sources"].items()))
    assert (name, distribution, version) == ("planets", "planets", "1.0")
    assert config.determining()["sources"].keys() == {"planets"}
    # A file that the term only imports.
    (plugin / "pull.py").write_text("FACTOR = 1000\n")
    assert config.hash != first
    (plugin / "pull.py").write_text("FACTOR = 1\n")
    assert config.hash == first
    metadata = plugin.parent / "planets-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    assert config.hash != first


def test_where_a_plugin_is_installed_does_not_matter(plugin, tmp_path):
    first = configure("scaled").hash
    moved = tmp_path / "elsewhere" / "planets"
    shutil.copytree(plugin, moved)
    sys.modules["planets"].__path__ = [str(moved)]
    assert configure("scaled").hash == first


def test_a_domain_of_another_package_enters_as_well(blobs):
    import blobs_domain

    assert load(blobs).config.determining()["sources"].keys() == {"blobs_domain"}
    # Also where it takes its table from dipole.
    model = run_model("planet", EMPTY, blobs_domain.BlobsAdapter)
    config = model.model_validate_json('{"domain": "planet", "train": {"steps": 3}}')
    assert config.determining()["sources"].keys() == {"blobs_domain"}


def of_a_script(number: int, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = folder / f"script{number}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("__main__", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    spec.loader.exec_module(module)
    return module


def of_a_notebook(number: int, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kernel's __main__ has no file; a cell's lines lie in linecache under a name of its own."""
    name, module = f"/tmp/ipykernel_1/{number}.py", ModuleType("__main__")
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("run", [of_a_script, of_a_notebook])
def test_a_class_of_a_script_or_a_notebook_enters_with_its_own_lines(run, tmp_path, monkeypatch):
    found = []
    for number, (more, factor) in enumerate((("", "1"), ("SEEDS = [1, 2, 3]", "1"), ("", "1000"))):
        with registry.temporary():
            run(number, TERM.format(more=more, factor=factor), tmp_path, monkeypatch)
            found.append(configure("scaled").hash)
    assert found[0] == found[1] != found[2]


def test_an_edited_loss_is_another_run(plugin, tmp_path):
    config = resolve({"domain": "toy", "objective": "infonce + scaled", "train": {"steps": 2}}).config
    first = train(config, tmp_path / "runs", quiet=True)
    assert read_record(tmp_path / "runs" / config.hash / "record.json") == first
    (plugin / "terms.py").write_text(TERM.format(more="", factor="1000"))
    assert config.hash != first.hash
