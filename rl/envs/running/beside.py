"""Environments that take their step while this process does something else."""

from collections.abc import Callable
from typing import Any

from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper


class Beside(VecEnvWrapper):
    """Does some work between sending the actions and waiting for what comes of them.

    What the work raises is kept in `failed` until the step has come back: nobody is left with a step under way.

    Args:
        venv: environments whose `step_async` returns before the step is taken, as that of processes does.
        work: called in every step, with the step under way.
    """

    def __init__(self, venv: VecEnv, work: Callable[[], None]) -> None:
        super().__init__(venv)
        self.work = work
        self.failed: BaseException | None = None

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        try:
            self.work()
        except BaseException as error:
            self.failed = error
            return self.venv.step_wait()  # in here: should this raise as well, both are told
        return self.venv.step_wait()


def steps_elsewhere(env: VecEnv) -> bool:
    """Whether other processes may take the steps; those of a DummyVecEnv wait until they are asked for."""
    return not isinstance(env.unwrapped, DummyVecEnv)
