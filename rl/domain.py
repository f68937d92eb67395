"""The domain of this package, for `dipole list domains` and `dipole doctor`. Nothing heavy is imported."""

from dipole.core.train.domains import Domain

RL = Domain(
    name="rl",
    summary="agents that see pixels: SAC (CURL) or DrQ-v2 with a contrastive objective",
    adapter="dipole.rl.adapter:RLAdapter",
    extra="rl",
    exported="dipole.rl.exported:open_folder",
    probes={
        "drawing without a display": "dipole.rl.envs.suite.rendering:drawing",
        "simulator": "dipole.rl.envs.suite.rendering:import_suite",
    },
)
