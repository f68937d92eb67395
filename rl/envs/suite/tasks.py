"""The tasks by name and the papers' settings for them.

The list is written out, so that naming a task does not load MuJoCo. A test compares it with dm_control's.
"""

from dipole.core.utils.errors import ConfigError, nearest

SUITE = {
    "acrobot": ("swingup", "swingup_sparse"),
    "ball_in_cup": ("catch",),
    "cartpole": ("balance", "balance_sparse", "swingup", "swingup_sparse", "two_poles", "three_poles"),
    "cheetah": ("run",),
    "dog": ("stand", "walk", "trot", "run", "fetch"),
    "finger": ("spin", "turn_easy", "turn_hard"),
    "fish": ("upright", "swim"),
    "hopper": ("stand", "hop"),
    "humanoid": ("stand", "walk", "run", "run_pure_state"),
    "humanoid_CMU": ("stand", "walk", "run"),
    "lqr": ("lqr_2_1", "lqr_6_2"),
    "manipulator": ("bring_ball", "bring_peg", "insert_ball", "insert_peg"),
    "pendulum": ("swingup",),
    "point_mass": ("easy", "hard"),
    "quadruped": ("walk", "run", "escape", "fetch"),
    "reacher": ("easy", "hard"),
    "stacker": ("stack_2", "stack_4"),
    "swimmer": ("swimmer6", "swimmer15"),
    "walker": ("stand", "walk", "run"),
}

# The six tasks of the papers, in the order of their tables (Spin, Swingup, Easy, Run, Walk, Catch).
PAPER_TASKS = ("finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk", "ball_in_cup-catch")

# Control steps per agent step (CURL, appendix): 2 for finger and walker, 8 for cartpole, 4 otherwise.
ACTION_REPEAT = {"finger": 2, "walker": 2, "cartpole": 8}
DEFAULT_ACTION_REPEAT = 4
# Camera 0 of the quadruped is fixed to the world, and 2 follows the body.
CAMERA = {"quadruped": 2}


def split(task: str) -> tuple[str, str]:
    """Split "cheetah-run" (or "cheetah/run", "ball-in-cup-catch") into dm_control's domain and task name."""
    known = names()
    key = str(task).replace("/", "-").replace("-", "_").lower()
    found = {name.replace("-", "_").lower(): name for name in known}.get(key)
    if found is None:
        raise ConfigError(f"unknown task {task!r}.{nearest(str(task), known)} Allowed: {', '.join(known)}.")
    domain, _, rest = found.partition("-")
    return domain, rest


def names() -> list[str]:
    """All suite tasks as "domain-task"."""
    return [f"{domain}-{task}" for domain, tasks in SUITE.items() for task in tasks]
