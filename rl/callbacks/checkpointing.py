"""Checkpoints while an agent learns."""

import shutil
from pathlib import Path

from stable_baselines3.common.callbacks import BaseCallback

from dipole.core.utils.files import remove_scratch
from dipole.rl.arguments import check_whole
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.snapshots import KEEP, checkpoints, save


class CheckpointCallback(BaseCallback):
    """Saves `folder/agent-<agent steps>` every `every` agent steps, between rollouts, and keeps the newest two.

    Unfinished files of a killed process are removed when training begins.

    Args:
        folder: where to. It is created.
        every: agent steps between checkpoints, >= 1.

    Raises:
        ConfigError: `every` is no whole number >= 1.
        CheckpointError: from training, a checkpoint cannot be written.
    """

    def __init__(self, folder: str | Path, every: int = 10_000) -> None:
        super().__init__()
        check_whole(every=every)
        self.folder = Path(folder)
        self.every = every

    def _on_training_start(self) -> None:
        self._saved = self.num_timesteps // self.every
        remove_scratch(self.folder, "agent-*")

    def _on_rollout_start(self) -> None:
        assert isinstance(self.model, PixelAgent)
        if self.model.num_timesteps // self.every > self._saved:
            self._saved = self.model.num_timesteps // self.every
            save(self.model, self.folder / f"agent-{self.model.num_timesteps:09d}")
            for old in checkpoints(self.folder)[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)

    def _on_step(self) -> bool:
        return True
