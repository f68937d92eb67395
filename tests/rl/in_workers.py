"""Environments of tests that run in processes of their own: a module that is imported there in no time."""

import os
import time

import gymnasium

from dipole.rl.envs.dot import DotEnv


class Failing(gymnasium.Wrapper):
    """Fails at the third step of an episode: "never", in "some", which is told by where the dot starts, or "always"."""

    def __init__(self, fails="never"):
        super().__init__(DotEnv())
        self.when, self.count = fails, 0

    def fail(self, when):
        self.when = when

    def reset(self, **given):
        self.count = 0
        return self.env.reset(**given)

    def step(self, action):
        self.count += 1
        if self.count == 1:
            self.fails = self.when == "always" or (self.when == "some" and self.unwrapped._dot[0] > 0.5)
        if self.count == 3 and self.fails:
            raise OSError("lost")
        return self.env.step(action)


class Dying(DotEnv):
    """Ends its process in a step of its life, or does not answer, once. A file remembers it."""

    def __init__(self, marker, at, hangs=False):
        super().__init__()
        self.marker, self.at, self.hangs, self.life = marker, at, hangs, 0

    def step(self, action):
        self.life += 1
        if self.life == self.at and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            if self.hangs:
                time.sleep(600)
            os._exit(3)
        return super().step(action)


class FailingAt(DotEnv):
    """Raises at chosen steps of its life."""

    def __init__(self, at=(), resets=()):
        super().__init__()
        self.at, self.resets, self.life, self.starts = set(at), set(resets), 0, 0

    def step(self, action):
        self.life += 1
        if self.life in self.at:
            raise FloatingPointError("the cart left the universe")
        return super().step(action)

    def reset(self, **kwargs):
        self.starts += 1
        if self.starts in self.resets:
            raise OSError("no reset today")
        return super().reset(**kwargs)


def unmakeable():
    raise OSError("no such world")


def limited():
    return gymnasium.wrappers.NormalizeReward(gymnasium.wrappers.TimeLimit(DotEnv(), 5))
