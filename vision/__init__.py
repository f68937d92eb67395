"""Contrastive learning on images: frameworks over any backbone, augmentations, heads, queues and schedules.

    SimCLR, MoCo, MoCoV3, BYOL, SimSiam, NNCLR, SwAV, CMC, SupCon, CLIP     loss = model(views); model.after_step()
    Augment                                                                 views of a PIL image, a tensor or a batch
    projection_head, prediction_head, Queue, momentum_update                parts
    cosine_schedule, warmup_cosine, LARS                                    schedules and an optimizer

Each name is imported when you first use it. Importing this package does not load torch.
"""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:  # an alias marks an export
    from dipole.core.train.update import LARS as LARS
    from dipole.core.train.update import warmup_cosine as warmup_cosine
    from dipole.vision.augmentations import Augment as Augment
    from dipole.vision.frameworks.clip import CLIP as CLIP
    from dipole.vision.frameworks.cmc import CMC as CMC
    from dipole.vision.frameworks.moco import MoCo as MoCo
    from dipole.vision.frameworks.predictor import BYOL as BYOL
    from dipole.vision.frameworks.predictor import NNCLR as NNCLR
    from dipole.vision.frameworks.predictor import MoCoV3 as MoCoV3
    from dipole.vision.frameworks.predictor import SimSiam as SimSiam
    from dipole.vision.frameworks.queue import Queue as Queue
    from dipole.vision.frameworks.queue import cosine_schedule as cosine_schedule
    from dipole.vision.frameworks.queue import momentum_update as momentum_update
    from dipole.vision.frameworks.simclr import SimCLR as SimCLR
    from dipole.vision.frameworks.simclr import SupCon as SupCon
    from dipole.vision.frameworks.swav import SwAV as SwAV
    from dipole.vision.heads import prediction_head as prediction_head
    from dipole.vision.heads import projection_head as projection_head

_HOME, __getattr__, __dir__ = lazy(__name__, __file__, "vision")
__all__ = sorted(_HOME)
