"""The pixel encoder with dipole's message; its mathematics stands in `networks`, which an export copies."""

from typing import Any

from dipole.core.utils.errors import ConfigError
from dipole.rl import networks
from dipole.rl.networks import Maps, detached, initialise

__all__ = ["CentredEncoder", "Maps", "PixelEncoder", "detached", "initialise"]


class PixelEncoder(networks.PixelEncoder):
    """See `networks.PixelEncoder`; ConfigError for images that are too small for the convolutions."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        try:
            super().__init__(*arguments, **settings)
        except ValueError as error:
            raise ConfigError(str(error)) from None


class CentredEncoder(networks.CentredEncoder, PixelEncoder):
    """See `networks.CentredEncoder`."""
