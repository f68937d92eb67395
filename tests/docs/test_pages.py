"""Pages of `start` and `how-to`: code runs, commands and settings exist. On all pages code and tables fit."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import dipole
from dipole.benchmarks.suite import read_suite
from dipole.core.cli import app, main
from dipole.core.cli.parser import Parser
from dipole.core.objectives.registry import registry
from dipole.core.train.recipe import load_recipe, resolve

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted([*(DOCS / "start").glob("*.md"), *(DOCS / "how-to").glob("*.md")])
PAGES = sorted(page for page in DOCS.rglob("*.md") if "templates" not in page.parts)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"how-to/own-losses.md"}  # tests/core/test_own_losses.py runs its blocks
NEEDS = {
    "start/agents.md": "stable_baselines3", "start/images.md": "dipole.vision.heads",
    "how-to/images.md": "dipole.vision.heads", "how-to/lightly.md": "dipole.vision.heads",
    "start/sentences.md": "sentence_transformers", "how-to/lightning.md": "lightning",
    "how-to/sentence-transformers.md": "sentence_transformers", "how-to/stable-baselines3.md": "stable_baselines3",
    "how-to/transformers.md": "transformers",
}  # fmt: skip
SMALLER = {
    "start/agents.md": [("n(600", "n(28"), ("n(300", "n(28"), ("=200,", "=20,"), ("episodes=2", "episodes=1")],
    "start/images.md": [("range(20)", "range(0)")],  # the program of the README, which is tested below
    "start/loop.md": [("randn(100", "randn(3")],
    "how-to/stable-baselines3.md": [("learn(300", "learn(120")],
    "how-to/embed.md": [('"train.epochs=1"', '"train.epochs=", "train.steps=2"')],
    "how-to/sentence-transformers.md": [("max_steps=2", "max_steps=1")],
}
"""What the tests shorten."""
RUN = {"start/sentences.md": ("train faq.toml", "embed", "export")}
"""Commands that run. Of the others the words, recipes and settings are checked."""
PLACEHOLDERS = {"RUN", "RECIPE", "my_domain-toy"}


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    return [(language, text) for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    """The words of each line that calls dipole."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dipole ")]


def check_command(words: list[str]) -> None:
    """The command and its options exist, and so do recipe and settings of a training."""
    configure = app._find(words[0])
    parser = Parser(f"dipole {words[0]}", configure.__doc__)
    configure(parser)
    given = parser.parse_args(words[1:])
    if words[0] == "train" and not Path(given.recipe).suffix and given.recipe not in PLACEHOLDERS:
        load_recipe(given.recipe, [each for each in words[1:] if "=" in each])


@pytest.mark.parametrize("page", [page for page in GUIDES if name(page) not in ELSEWHERE], ids=name)
def test_the_code_of_a_guide_runs(page, tmp_path, monkeypatch):
    if needed := NEEDS.get(name(page)):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    if name(page) == "how-to/sentence-transformers.md":
        from tests.text.tiny_sentences import tiny_model

        tiny_model(tmp_path / "written").save_pretrained("your-model")
    namespace = {"__name__": "page"}
    torch.manual_seed(0)
    with registry.temporary():
        for language, text in blocks(page):
            if language == "python":
                for old, new in SMALLER.get(name(page), ()):
                    text = text.replace(old, new)
                exec(compile(text, str(page), "exec"), namespace)
            elif language == "bash":
                for words in commands(text):
                    if " ".join(words).startswith(RUN.get(name(page), ("-",))):
                        assert main([*words]) == 0
                    else:
                        check_command(words)
            elif language == "toml":
                check_toml(text)


def assumed() -> dict:
    """The names that the fragments of README and background pages assume: encoders, batches, embeddings."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (32, 16)), generator=generator)

    encoder = torch.nn.Linear(20, 16)
    labels = torch.arange(32) % 4
    names = ("z1", "z2", "a", "p", "hard", "f", "g", "view1", "view2", "images", "queries", "documents")
    batches = {name: rows(32, 20) if name in names[-5:] else rows().requires_grad_() for name in names}
    return batches | {
        "__name__": "page", "torch": torch, "dipole": dipole, "encoder": encoder, "encode": encoder, "d": 16,
        "image_encoder": encoder, "text_encoder": torch.nn.Linear(20, 16), "labels": labels,
        "document": torch.arange(32) // 4, "classes": torch.arange(8), "z": rows(32, 128),
        "captioned": [(rows(32, 20), rows(32, 20))], "loader": [(rows(32, 20), labels)],
        "table": [(rows(32, 20), rows(32, 20), rows(32, 20))],
    }  # fmt: skip


def test_fragments_of_the_background_pages_run():
    namespace = assumed()
    for page, of in (("core.md", ""), ("conformance.md", "NTXent"), ("runs.md", "MyConfig")):
        for language, text in blocks(DOCS / "background" / page):
            if language == "python" and of in text and "lightly" not in text:
                text = text.replace('"temperature": 0.1})', '"temperature": 0.1}, only=["gradcheck"])')
                exec(compile(text, page, "exec"), namespace)
    assert namespace["report"].ok
    first, second = namespace["z1"].detach(), namespace["z2"].detach()
    wanted = 25 * (first - second).square().sum(1).mean()  # Bardes et al. 2022, Eqs. 1 to 6
    for z in (first, second):
        covariance = torch.cov(z.T)
        wanted += 25 * (1 - (z.var(0) + 1e-4).sqrt()).clamp_min(0).mean()
        wanted += (covariance - covariance.diag().diag()).square().sum() / 16
    found = dipole.Composite([namespace["VICReg"]()], [1.0])(first, second).loss
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / "background").glob("*.md")], ids=lambda page: page.stem)
def test_commands_of_readme_and_background_exist(page):
    text = "".join(text for _, text in blocks(page)).replace("$ dipole", "dipole")
    for words in commands(text):
        check_command(words)


def test_the_loop_of_the_readme_runs():
    wide = {name: torch.randn(32, 128) for name in ("queries", "keys", "queue")}
    text = next(text for _, text in blocks(ROOT / "README.md") if "Pairs.cross(queries, keys, queue)" in text)
    namespace = assumed() | wide
    exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["features"].shape == (32, 128)
    assert torch.isfinite(namespace["outcome"].loss)


def test_the_readme_leads_to_a_trained_embedded_and_exported_backbone(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("dipole.vision.heads")
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Train your own backbone")[1]
    program = BLOCK.search(text)[3]
    assert program.startswith(blocks(DOCS / "start" / "images.md")[0][1])
    program = program.replace("range(20)", "range(1)")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    exec(compile(program, "README.md", "exec"), namespace)
    from onnxruntime import InferenceSession

    session = InferenceSession("backbone.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: namespace["images"][:10].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), namespace["vectors"][:10], rtol=1e-3, atol=1e-4)
    saved = torch.load("backbone.pt")
    assert all(torch.equal(saved[name], value) for name, value in namespace["backbone"].state_dict().items())


def check_toml(text: str) -> None:
    """A recipe, a part of one, or a suite."""
    read = tomllib.loads(text)
    if "rows" in read:
        Path("suite.toml").write_text(text, encoding="utf-8")
        assert read_suite("suite.toml").rows
    elif "domain" in read:
        resolve(read)
    else:
        lines = [f"train.schedule.{key}={value}" for key, value in read.pop("train")["schedule"].items()]
        assert not read
        load_recipe("digits-simclr", ["objective=infonce + 0.1*dp", "train.schedule=", *lines])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_has_at_most_88_columns_and_tables_at_most_six(page):
    text = page.read_text(encoding="utf-8")
    assert [line for _, code in blocks(page) for line in code.splitlines() if len(line) > 88] == []
    heads = re.findall(r"^(\|.*\|)\n\|(?:\s*:?-+:?\s*\|)+$", BLOCK.sub("", text), re.MULTILINE)
    columns = {head: len(re.findall(r"(?<!\\)\|", head)) - 1 for head in heads}
    assert {head: count for head, count in columns.items() if count > 6} == {}


def test_a_guide_starts_with_its_code():
    """The first block of a page that does one task comes before its first table and second heading."""
    for page in (DOCS / "how-to").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "```" in text and page.name not in ("own-losses.md", "choosing.md"):
            assert text.index("```") < min(text.find(mark) % len(text) for mark in ("\n## ", "\n|")), page.name


ROWS = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(32) % 4


def ours(text: str, *rows: torch.Tensor | dipole.Pairs) -> float:
    return float(dipole.objective(text, dim=16)(*rows).loss)


def test_losses_of_other_libraries_by_their_names_here():
    """Of those with labels tests/examples compares whole trainings."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    labels = torch.tensor([0] * 20 + [1] * 8 + [2] * 4)
    theirs = float(losses.NTXentLoss(temperature=0.2)(ROWS, labels))
    assert ours("tuple(temperature=0.2)", dipole.Pairs.from_labels(ROWS, labels)) != pytest.approx(theirs, rel=1e-3)
    wrapped = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.3))
    assert ours("infonce(temperature=0.3)", ROWS, OTHER) == pytest.approx(float(wrapped(ROWS, OTHER)), rel=1e-5)
    theirs = float(losses.VICRegLoss()(ROWS, ref_emb=OTHER))
    assert ours("vicreg", ROWS, OTHER) == pytest.approx(theirs, rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(ROWS, OTHER).mean()
    assert ours("0.5*regression", dipole.Pairs.cross(ROWS, OTHER)) == pytest.approx(1 - float(cosine), rel=1e-5)
    # Its mean over anchors of -log(sum of positives / sum of all others) differs by log(number of positives).
    z = torch.nn.functional.normalize(ROWS.double(), dim=1)
    similar = (z @ z.T / 0.2).exp().fill_diagonal_(0)
    same = LABELS[:, None] == LABELS
    theirs = -(similar * same).sum(1).div(similar.sum(1)).log().mean()
    found = ours("supcon(temperature=0.2, variant=in)", dipole.Pairs.from_labels(ROWS, LABELS))
    assert found == pytest.approx(float(theirs) + torch.tensor(7.0).log().item(), rel=1e-5)
