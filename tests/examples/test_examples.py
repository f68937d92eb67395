"""Every example runs on a small model, offline."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"byol", "lightning_module", "metric_learning", "moco", "plain_loop", "sb3_agent", "simclr", "swav"}
TESTED |= {"sentence_transformers_trainer", "transformers_trainer"}


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == TESTED


def test_sentence_transformers_trainer(tmp_path):
    from sentence_transformers import SentenceTransformer

    from tests.text.tiny_sentences import tiny_model

    tiny_model(tmp_path / "written").save_pretrained(str(tmp_path / "model"))
    module = example("sentence_transformers_trainer")
    trained = module.main(str(tmp_path / "model"), str(tmp_path / "out"), steps=2, use_cpu=True)
    again = SentenceTransformer(str(tmp_path / "out" / "final"), device="cpu")
    assert len(again) == 3  # a transformer, its pooling, and L
    texts = module.DATA["anchor"]
    found, wanted = (each.encode(texts, convert_to_tensor=True) for each in (again, trained))
    torch.testing.assert_close(found, wanted)


def test_transformers_trainer(tmp_path):
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**small, image_size=16, patch_size=8)
    model = ViTModel(config, add_pooling_layer=False)
    trainer = example("transformers_trainer").main(model, str(tmp_path), steps=3, size=16, use_cpu=True)
    trainer.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final" / "model.safetensors")
    L = saved["objective.terms.1.L"]
    assert bool((torch.eye(16) != L).any())
    assert torch.isfinite(L).all()


def test_lightning_module(tmp_path):
    module = example("lightning_module").main(str(tmp_path), steps=6, size=8)
    kept = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]["objective.terms.2.L"]
    torch.testing.assert_close(kept, module.objective.terms[2].L.detach().cpu())
    assert bool((kept != torch.eye(32)).any())


@pytest.mark.slow
def test_plain_loop_on_two_processes(capsys):
    losses = example("plain_loop").main(steps=4)
    assert losses[-1] < losses[0]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(FOLDER / "plain_loop.py"), "--steps", "4"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert [float(each) for each in found.stdout.split()] == pytest.approx(losses, abs=2e-5)


def test_sb3_agent():
    agent = example("sb3_agent").main(steps=150, batch_size=16)
    assert agent.num_timesteps >= 150
