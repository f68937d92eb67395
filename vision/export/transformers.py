"""A trained encoder as a folder that transformers loads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.encoders.hub import HubEncoder

if TYPE_CHECKING:
    from dipole.core.contrast.objective import Composite
    from dipole.vision.adapter import VisionAdapter


class DipoleVisionConfig(PreTrainedConfig):
    """Which encoder, for which images, read at which tap."""

    model_type = "dipole-vision"

    encoder: dict[str, Any] | None = None
    channels: int = 3
    image_size: int = 32
    tap: str = "pooled"


class DipoleVisionModel(PreTrainedModel):
    """An encoder as a transformers model: `model(pixel_values)` with pixels in [0, 1] gives `pooler_output` (n, width).

    The mean and standard deviation of the training images are part of the weights; no image processor is needed.
    """

    config_class = DipoleVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        settings = EncoderConfig.model_validate(config.encoder or {})
        self.encoder = build_encoder(settings, config.channels, config.image_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The encoders initialise themselves."""

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        features = self.encoder(pixel_values, self.config.tap)
        return BaseModelOutputWithPooling(pooler_output=features)


def export(adapter: "VisionAdapter", folder: Path, record: Any, objective: "Composite | None") -> None:
    """Write config.json, model.safetensors and README.md; `DipoleVisionModel.from_pretrained(folder)` reads them.

    A hub encoder is written as the model of transformers that it is, with the settings of its image processor.
    """
    encoder = adapter.module.trained_encoder()
    settings = adapter.config.encoder
    if isinstance(encoder, HubEncoder):
        encoder.save_pretrained(folder)
        (folder / "README.md").write_text(hub_card(adapter, record, encoder), encoding="utf-8")
        return
    config = DipoleVisionConfig(
        encoder=settings.model_dump(mode="json", exclude_none=True),
        channels=adapter.parts.pretrain.channels,
        image_size=adapter.size,
        tap=encoder.check_tap(settings.tap),
    )
    model = DipoleVisionModel(config)
    model.encoder.load_state_dict(encoder.state_dict())
    model.eval()
    model.save_pretrained(folder)
    (folder / "README.md").write_text(model_card(adapter, record, config), encoding="utf-8")


def model_card(adapter: "VisionAdapter", record: Any, config: DipoleVisionConfig) -> str:
    """What the model is, how it was trained and measured, how to load it."""
    return _card(
        adapter,
        record,
        adapter.config.encoder.name,
        f"""from dipole.vision.export import DipoleVisionModel

model = DipoleVisionModel.from_pretrained("FOLDER").eval()
# pixels in [0, 1], shape (n, {config.channels}, {config.image_size}, {config.image_size})
features = model(pixel_values).pooler_output""",
    )


def hub_card(adapter: "VisionAdapter", record: Any, encoder: HubEncoder) -> str:
    """The same of a model that transformers loads by itself."""
    return _card(
        adapter,
        record,
        type(encoder.model).__name__,
        f"""from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("FOLDER"), AutoModel.from_pretrained("FOLDER").eval()
outputs = model(**processor(images, return_tensors="pt"))
features = {encoder.expression}""",
    )


def _card(adapter: "VisionAdapter", record: Any, name: str, use: str) -> str:
    info = adapter.data_info()
    results = "\n".join(f"| {name} | {value:.4f} |" for name, value in record.results.items() if value is not None)
    return f"""---
library_name: transformers
tags: [contrastive-learning, self-supervised, dipole]
---
# {record.name}

{name} trained with dipole on {info["name"]} ({info["sizes"]["pretrain"]} images),
objective `{record.objective}`, method {adapter.config.method}, seed {record.seed}, {record.epochs:g} epochs.

```python
{use}
```

| measured | value |
|---|---|
{results}

Data fingerprint (sha256): `{info["fingerprint"]}`. Versions: {json.dumps(record.versions)}. Run: `{record.hash}`.
"""
