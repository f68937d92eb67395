"""Models of transformers as encoders: small random checkpoints that the library wrote itself, offline."""

import copy
import json
import shutil

import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn
from transformers import AutoModel, CLIPVisionModel, ViTConfig, ViTMAEConfig, ViTMAEModel, ViTModel

from dipole import objective
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders
from dipole.core.train.recipe import resolve
from dipole.core.train.update import build_optimizer
from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import seed_everything
from dipole.text.exported import open_folder as open_sentences
from dipole.vision.adapter import VisionAdapter
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.encoders.hub import HubEncoder, Processor, from_settings
from dipole.vision.exported import open_folder
from dipole.vision.frameworks.base import Setup
from dipole.vision.image_set import ImageSet
from tests.runs import refused
from tests.vision.made import configured, make_adapter, random_framework
from tests.vision.made import step as one_step

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SIDE, IMAGES = 16, 6
ARCHITECTURES = ("resnet", "vit", "dinov2", "convnext", "swin")
TOKENS_BEFORE = {"vit": 1, "dinov2": 1, "swin": 0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = {"image_size": SIDE, "patch_size": 4}


def configs():
    text = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    dinov2 = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    swin = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 2, "window_size": 2}
    return {
        "resnet": transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        "vit": transformers.ViTConfig(**SMALL, **IMAGE),
        "dinov2": transformers.Dinov2Config(**dinov2, drop_path_rate=0.1, **IMAGE),
        "convnext": transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2),
        "swin": transformers.SwinConfig(**swin, image_size=SIDE, drop_path_rate=0.0),
        "clip": transformers.CLIPConfig(vision_config=SMALL | IMAGE, text_config=SMALL | text),
        "bert": transformers.BertConfig(**SMALL, vocab_size=50),
    }


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs().items():
        torch.manual_seed(4)
        model = AutoModel.from_config(config)
        for module in model.modules():  # statistics as of a network that was trained
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        model.save_pretrained(folder / name)
        said = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
        said |= {"image_mean": MEAN, "image_std": STD, "do_normalize": True, "do_rescale": True}
        if name != "bert":
            (folder / name / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def encoder(folder, channels=3, size=SIDE, **settings):
    seed_everything(0)
    config = EncoderConfig.model_validate_json(json.dumps({"name": f"hub:{folder}", **settings}))
    return build_encoder(config, channels, size)


def reference(folder, images, kind=AutoModel):
    """transformers' own forward pass of the same pixels, as its processor normalises them."""
    model = kind.from_pretrained(folder).eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        return model(pixel_values=(images - mean) / std, output_hidden_states=True)


@pytest.fixture(scope="module")
def mae(tmp_path_factory):
    """A masked autoencoder that hides three quarters of its 16 patches, also in evaluation."""
    folder = tmp_path_factory.mktemp("mae")
    ViTMAEModel(ViTMAEConfig(**SMALL | {"num_hidden_layers": 1}, **IMAGE)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_masked_autoencoder_reads_all_patches(mae, channels):
    own = encoder(mae, channels).eval()
    image, others = torch.rand(1, channels, SIDE, SIDE), torch.rand(3, channels, SIDE, SIDE)
    alone = own(image)
    torch.testing.assert_close(own(torch.cat([others, image]))[3:], alone)
    assert own._run(image).last_hidden_state.shape[1] == 17
    assert any("reads all patches" in line for line in own.remarks)


def test_its_vectors_are_those_of_a_plain_vit_and_of_its_export(mae, tmp_path):
    own = encoder(mae, pooling="mean").eval()
    plain = ViTModel.from_pretrained(mae, config=ViTConfig.from_pretrained(mae), add_pooling_layer=False).eval()
    images = torch.rand(2, 3, SIDE, SIDE)
    expected = plain(pixel_values=own.normalize(images)).last_hidden_state[:, 1:].mean(1)
    own.save_pretrained(tmp_path)
    for each in (own, encoder(tmp_path, pooling="mean").eval()):
        torch.testing.assert_close(each(images), expected, atol=1e-5, rtol=1e-4)
    shutil.copy(mae / "config.json", tmp_path)  # as another program wrote it
    foreign = open_folder(tmp_path, torch.device("cpu"), None)
    torch.testing.assert_close(*(foreign.vectors(list((255 * images).byte())) for _ in range(2)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_are_those_of_transformers(models, name):
    images = torch.rand(3, 3, SIDE, SIDE)
    found = reference(models / name, images)
    last, before = found.last_hidden_state, TOKENS_BEFORE.get(name, 0)
    flat = last.flatten(2).transpose(1, 2) if last.ndim == 4 else last[:, before:]
    expected = {"pooler": found.pooler_output.flatten(1), "mean": flat.mean(1), "max": flat.amax(1)}
    if before:
        expected["cls"] = last[:, 0]
    for pooling, features in expected.items():
        own = encoder(models / name, pooling=pooling).eval()
        assert torch.allclose(own(images), features, atol=1e-6), pooling
        assert own.taps["pooled"] == features.shape[1]
        for tap, state in zip(own.taps, found.hidden_states, strict=False):
            assert own(images, tap).shape == (3, own.taps[tap])
            if pooling == "mean":
                flat = state.flatten(2).mean(2) if state.ndim == 4 else state[:, before:].mean(1)
                assert torch.allclose(own(images, tap), flat, atol=1e-6), tap
    default = encoder(models / name).eval()
    assert torch.allclose(default(images), expected["pooler"], atol=1e-6)
    assert list(default.taps) == ["embeddings", "layer1", "layer2", "pooled"]


def test_images_of_other_channels_and_models_of_text(models, tmp_path):
    images = torch.rand(2, 3, SIDE, SIDE)
    theirs = reference(models / "clip", images, CLIPVisionModel)
    assert torch.allclose(encoder(models / "clip").eval()(images), theirs.pooler_output, atol=1e-6)
    folder = shutil.copytree(models / "clip", tmp_path / "clip")
    said = (folder / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(f'{{"image_processor": {said}}}')  # by transformers 5
    (folder / "tokenizer.json").write_text("{}")
    assert open_sentences(folder, torch.device("cpu"), None) is None
    pixels = (255 * images).byte()
    theirs = reference(folder, pixels / 255, CLIPVisionModel)
    found = open_folder(folder, torch.device("cpu"), None).vectors(list(pixels))
    assert torch.allclose(found, theirs.pooler_output, atol=1e-5)
    grey = torch.rand(2, 1, SIDE, SIDE)
    own = encoder(models / "resnet", channels=1).eval()
    expected = reference(models / "resnet", grey.expand(-1, 3, -1, -1)).pooler_output.flatten(1)
    assert torch.allclose(own(grey), expected, atol=1e-6)
    two, three = encoder(models / "vit", channels=2).eval(), encoder(models / "vit").eval()
    three.set_statistics([0.0] * 3, [1.0] * 3)
    assert torch.allclose(two(grey.expand(-1, 2, -1, -1)), three(grey.expand(-1, 3, -1, -1)), atol=1e-5)
    assert not two.own_statistics


def test_what_no_file_holds_starts_at_random_and_is_said(models, tmp_path):
    shutil.copy(models / "vit" / "config.json", tmp_path)
    anew, trained = encoder(tmp_path), encoder(models / "vit")
    assert "random" in anew.remarks[0]
    assert "with the weights" in trained.remarks[0]
    assert (anew.described["weights"], trained.described["weights"]) == ("random", "pretrained")
    weight = "model.layers.0.mlp.fc1.weight"
    assert not torch.equal(anew.state_dict()[weight], trained.state_dict()[weight])
    ignored = encoder(models / "vit", weights="random")
    assert torch.equal(ignored.state_dict()[weight], anew.state_dict()[weight])  # of one seed
    assert not anew.own_statistics  # no processor: the training set's
    refused(ConfigError, "no weights", encoder, tmp_path, weights="pretrained")
    AutoModel.from_pretrained(models / "vit", add_pooling_layer=False).save_pretrained(tmp_path)
    own = encoder(tmp_path)
    assert own.pooling == "cls"
    assert any("2 tensors are not among its weights" in line for line in own.remarks)
    fixed = [name for name, each in own.named_parameters() if not each.requires_grad]
    assert fixed == ["model.pooler.dense.weight", "model.pooler.dense.bias"]
    assert any("starts at random" in line for line in encoder(tmp_path, pooling="pooler").remarks)


@pytest.mark.parametrize(("said", "expected"), [
    ({"size": 24, "image_mean": [0.5], "image_std": [0.25]}, Processor(24, (0.5,), (0.25,))),
    ({"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}}, Processor(28)),
    ({"size": {"shortest_edge": 32}, "crop_size": 28, "do_center_crop": False}, Processor(32)),
    ({"size": {"height": 8, "width": 8}, "do_normalize": False}, Processor(8, (0.0,), (1.0,))),
    ({"image_mean": 127.5, "image_std": 255.0, "do_rescale": False}, Processor(None, (0.5,), (1.0,))),
    ({"image_mean": [0.0], "image_std": [1.0], "rescale_factor": 2 / 255, "rescale_offset": True},
     Processor(None, (0.5,), (0.5,))),
    ({"image_processor": {"size": 12}}, Processor(12)),
])  # fmt: skip
def test_what_a_processor_says(said, expected):
    found = from_settings(said, backbone.NetworkSource("x", "vision.encoder.name"))
    assert found.size == expected.size
    assert (found.mean or ()) == pytest.approx(expected.mean or ())
    assert (found.std or ()) == pytest.approx(expected.std or ())


def test_the_processor_gives_size_and_statistics_unless_they_are_set(models):
    config = configured(table(models / "vit"))
    assert config.augment.size == SIDE
    assert configured(table(models / "vit", augment={"size": 24})).augment.size == 24
    pixels = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    branch = Setup(ImageSet("random", pixels), SIDE, 4, config.encoder).branch().encoder
    assert branch.get_buffer("mean").tolist() == pytest.approx(MEAN)
    own = encoder(models / "vit", mean=[0.1, 0.2, 0.3])
    assert own.get_buffer("mean").tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert own.get_buffer("std").tolist() == pytest.approx(STD)
    assert any("mean" in line and "0.6" in line for line in own.remarks)
    small = build_encoder(EncoderConfig(name="small-conv", mean=(0.5,), std=(0.1,)), 3, 16)
    assert small.own_statistics
    assert small.get_buffer("mean").tolist() == [0.5] * 3
    refused(ConfigError, "2 values for 3 channels", encoder, models / "vit", mean=[0.1, 0.2])
    own = encoder(models / "vit", size=24).eval()
    images = torch.rand(2, 3, 24, 24)
    model = own.model
    expected = model(pixel_values=own.normalize(images), interpolate_pos_encoding=True).pooler_output
    assert torch.equal(own(images), expected)
    assert any("24 pixels wide" in line and "16" in line for line in own.remarks)
    assert not any("pixels" in line for line in encoder(models / "vit").remarks)


FRAMEWORKS = {
    "simclr": {"method": "simclr"}, "moco": {"method": "moco", "negatives": 9},
    "cmc": {"method": "cmc", "cmc": {"width": 1.0}},
    "swav": {"method": "swav", "swav": {"small_views": 1, "small_size": 8}},
    "blocks": {"method": "blocks", "blocks": {"size": 1}},
}  # fmt: skip


def table(folder, **settings):
    return {"encoder": {"name": f"hub:{folder}", "dim": 5, **settings.pop("encoder", {})}, **settings}


def framework(folder, **settings):
    return random_framework(table(folder, **settings), IMAGES, SIDE, 20, torch.float32)


def step(folder, settings, **train):
    """A module after a step, its gradients and its buffers."""
    module, batch = framework(folder, **settings)
    module.train()
    torch.manual_seed(5)
    found = one_step(module, batch, **train)
    return module, found["gradients"], {name: each.clone() for name, each in found["buffers"].items()}


@pytest.mark.parametrize(("name", "method"), [
    *((name, method) for name in ARCHITECTURES for method in ("simclr", "cmc")),
    *(("vit", method) for method in ("moco", "swav", "blocks")),
])  # fmt: skip
def test_every_framework_trains_them(models, name, method):
    module, grads, _ = step(models / name, FRAMEWORKS[method])
    learning = {n for n, each in module.named_parameters() if each.requires_grad}
    # Several ranks wait for the gradient of everything that learns.
    assert learning == {n for n, grad in grads.items() if grad is not None}
    assert all(bool(torch.isfinite(grads[n]).all()) for n in learning)
    images = torch.rand(2, 3, SIDE, SIDE)
    with torch.no_grad():
        assert module.eval().features(images).shape[0] == module.embedding(images).shape[0] == 2


@pytest.mark.parametrize("name", [*ARCHITECTURES, "dinov2, all paths"])
def test_less_memory_changes_nothing(models, tmp_path, name):
    settings, folder = {"encoder": {"freeze": 1}}, models / name
    if name == "dinov2, all paths":
        folder = shutil.copytree(models / "dinov2", tmp_path / "dinov2")
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | {"drop_path_rate": 0.0}))
    _, whole, buffers = step(folder, settings)
    for train in ({"activation_checkpointing": True}, {"microbatch": 4}):
        if name in ("resnet", "dinov2") and "microbatch" in train:
            continue  # batch norm sees one microbatch, and each microbatch drops its own paths
        _, grads, left = step(folder, settings, **train)
        for parameter, grad in whole.items():
            assert (grad is None) == (grads[parameter] is None)
            assert grad is None or torch.allclose(grad, grads[parameter], atol=1e-6), (train, parameter)
        assert all(torch.allclose(buffers[key], left[key]) for key in buffers)


def test_a_plan_reads_no_weights(models, tmp_path):
    shutil.copytree(models / "swin", tmp_path / "swin")
    config = configured(table(tmp_path / "swin", encoder={"lora": {"rank": 2}, "freeze": 1}))
    (tmp_path / "swin" / "model.safetensors").write_bytes(b"damaged")
    assert VisionAdapter.sketch(config, 32).width == 5
    config = configured(table(models / "swin", encoder={"freeze": 9}))
    refused(ConfigError, r"vision\.encoder\.freeze: 9 layers", VisionAdapter.sketch, config, 32)
    refused(ConfigError, r"vision\.cmc\.width = 1\.0", framework, models / "vit", method="cmc")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_compiling_changes_nothing(models, name):
    module, batch = framework(models / name)
    plain = copy.deepcopy(module)
    found = []
    for each, compiles in ((plain, False), (module, True)):
        with PatchedEncoders([each.branch], TrainConfig(steps=1), compiles=compiles)():
            loss = objective("infonce")(each.embed(batch)).loss
        loss.backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("how", [1, 2, "backbone"])
def test_what_is_frozen_stays_as_it_is(models, name, how):
    module, batch = framework(models / name, encoder={"freeze": how}, method="moco", negatives=9)
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    parameters = list(module.parameters())
    config = TrainConfig(steps=1, learning_rate=0.1, weight_decay=0.1, optimizer="adamw")
    optimizer = build_optimizer(config, parameters)
    objective("infonce")(module.embed(batch)).loss.backward()
    optimizer.step()
    module.after_step()
    changed = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    inside = {key.removeprefix("branch.encoder.model.") for key in changed if key.startswith("branch.encoder.model.")}
    first = ("embedd", "encoder.stages.0", "layers.0", "encoder.layer.0", "encoder.layers.0")
    second = ("encoder.stages.1", "layers.1", "encoder.layer.1", "encoder.layers.1")
    assert not any(key.startswith(first) for key in inside)
    assert any(key.startswith(second) for key in inside) == (how == 1)
    assert not inside if how == "backbone" else inside or name == "resnet"
    assert any(key.startswith("branch.projector") for key in changed)
    for branch in (module.branch, module.key):  # frozen layers of the momentum copy evaluate as well
        parts = list(branch.encoder.model.modules())
        frozen = [each for each in parts if isinstance(each, nn.BatchNorm2d | nn.Dropout) and not each.training]
        assert how != "backbone" or all(not part.training for part in parts)
        assert frozen or name != "resnet"
    learning = {id(p) for p in parameters if p.requires_grad}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == learning


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_learn_alone_are_kept_and_merged_where_they_are_exported(models, name, tmp_path):
    images = torch.rand(3, 3, SIDE, SIDE)
    own = encoder(models / name, lora={"rank": 2, "alpha": 4}).eval()
    before = own(images)
    expected = reference(models / name, images).pooler_output.flatten(1)
    assert torch.allclose(before, expected, atol=1e-6)  # B starts at 0
    assert {parameter.requires_grad for parameter in own.parameters()} == {True, False}
    assert all("lora_" in each for each, parameter in own.named_parameters() if parameter.requires_grad)
    for each, parameter in own.named_parameters():
        if "lora_B" in each:
            nn.init.normal_(parameter)
    trained = own(images)
    assert name == "convnext" or not torch.allclose(before, trained, atol=1e-3)  # its layers are scaled by 1e-6
    again = encoder(models / name, lora={"rank": 2, "alpha": 4}).eval()
    again.load_state_dict(own.state_dict())
    assert torch.equal(again(images), trained)
    own.save_pretrained(tmp_path)
    assert torch.allclose(reference(tmp_path, images).pooler_output.flatten(1), trained, atol=1e-4)
    assert torch.equal(own(images), trained)  # the encoder itself keeps its adapters
    said = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert said["image_mean"] == pytest.approx(MEAN)
    assert (said["size"], said["crop_size"]) == ({"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE})
    module, grads, _ = step(models / name, {"encoder": {"lora": {"rank": 2}}, "method": "moco", "negatives": 9})
    inside = {each for each, grad in grads.items() if grad is not None and each.startswith("branch.encoder")}
    assert all("lora_" in each for each in inside)
    key = {each for each in module.state_dict() if each.startswith("key.encoder") and "lora_B" in each}
    assert len(key) == len([each for each in inside if "lora_B" in each])


def test_adapters_and_frozen_layers_are_chosen_where_they_have_an_effect(models):
    own = encoder(models / "vit", lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    learning = {name for name, each in own.model.named_parameters() if each.requires_grad}
    assert len(learning) == 2 * 2 * 2
    said = "no linear map or convolution called 'query_proj'.*q_proj"
    refused(ConfigError, said, encoder, models / "vit", lora={"targets": ["query_proj"]})
    refused(ConfigError, "nothing to learn", encoder, models / "vit", lora={}, freeze="backbone")
    partly = encoder(models / "vit", lora={}, freeze=1)
    assert {name.split(".")[1] for name, each in partly.model.named_parameters() if each.requires_grad} == {"1"}
    own = encoder(models / "vit", freeze=1)
    fixed = {name for name, each in own.model.named_parameters() if not each.requires_grad}
    assert {"embeddings.cls_token", "embeddings.position_embeddings"} < fixed
    assert all(name.startswith(("embeddings.", "layers.0.")) for name in fixed)
    for settings in ({"freeze": 1}, {"lora": {}}, {"pooling": "mean"}, {"weights": "random"}):
        refused(ValidationError, "no effect with encoder 'small-conv'", EncoderConfig.model_validate, settings)
    for wrong in ({"name": "hub:"}, {"name": "resnet19"}, {"name": "hub:a/b", "freeze": 0}):
        refused(ValidationError, "validation error", EncoderConfig.model_validate, wrong)
    refused(ConfigError, r"Did you mean 'resnet18'\? Allowed: .*hub:ID-or-folder", resolved, "resnet19")


def resolved(name, **encoder):
    return resolve({"domain": "vision", "train": {"steps": 1}, "vision": {"encoder": {"name": name, **encoder}}}).config


def test_a_folder_counts_by_its_content(models, tmp_path):
    for copy_of in ("a", "b"):
        shutil.copytree(models / "vit", tmp_path / copy_of)
    first = resolved(f"hub:{tmp_path}/a")
    assert resolved(f"hub:{tmp_path}/b").hash == first.hash
    assert str(tmp_path) not in json.dumps(first.determining())
    assert str(tmp_path) in first.to_toml()
    shutil.copy(models / "resnet" / "preprocessor_config.json", tmp_path / "b")
    assert resolved(f"hub:{tmp_path}/b").hash == first.hash  # the same text
    weights = tmp_path / "b" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert resolved(f"hub:{tmp_path}/b").hash != first.hash
    assert resolved(f"hub:{tmp_path}/b", weights="random").hash == resolved(f"hub:{tmp_path}/a", weights="random").hash
    for settings in ({"freeze": 1}, {"pooling": "mean"}, {"lora": {}}, {"weights": "random"}):
        assert resolved(f"hub:{tmp_path}/a", **settings).hash != first.hash, settings


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("bert", {}, r"it is a bert model, which reads text; give one that reads images"),
    ("nowhere", {}, r"there is no such folder"), ("empty", {}, r"the folder has no config\.json"),
    ("unknown", {}, r"no-such-model"), ("damaged", {}, r"cannot be loaded"),
    ("vit", {"freeze": 3}, r"vision\.encoder\.freeze: 3 layers cannot be frozen, ViTModel has 2\. Allowed: 1 to 2, or"),
    ("resnet", {"pooling": "cls"}, r"'cls' is not possible, ResNetModel has no class token\. Allowed: pooler, mean"),
    ("swin", {"pooling": "cls"}, r"Allowed: pooler, mean, max"),
    ("vit", {"size": 2}, r"cannot read images of 2 x 2 pixels .*vision\.augment\.size = 16"),
    ("nobody/no-such-model-here", {}, r"vision\.encoder\.name: 'nobody/no-such-model-here' cannot be loaded"),
])  # fmt: skip
def test_one_message_for_what_is_wrong(models, tmp_path, monkeypatch, name, settings, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True, raising=False)
    (tmp_path / "empty").mkdir()
    shutil.copytree(models / "vit", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no-such-model"}')
    folder = models / name if (models / name).is_dir() else tmp_path / name
    with pytest.raises(ConfigError, match=message) as error:
        encoder(name if name.startswith("nobody/") else folder, **settings)
    assert "\n" not in str(error.value) or name.startswith("nobody/")


def test_the_adapter_says_and_records_what_it_starts_from(models):
    settings = table(models / "vit", method="moco", negatives=9, data={"limit": 40}, probe={"probes": ["knn"]})
    adapter = make_adapter(settings, 8)
    assert [line for line in adapter.remarks() if "with the weights" in line] == [adapter.remarks()[0]]
    described = adapter.data_info()["encoder"]
    assert (described["weights"], described["pooling"], len(described["sha256"])) == ("pretrained", "pooler", 64)
    assert isinstance(adapter.module.trained_encoder(), HubEncoder)
    batch = next(adapter.batches(0))
    assert batch.views[0].shape == (8, 1, SIDE, SIDE)
    assert bool(torch.isfinite(adapter.embed(batch).rows["query0"]).all())
