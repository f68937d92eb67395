"""`dipole play`: arguments only. It stands here, as importing the rl package registers environments with gymnasium."""

import argparse
from collections.abc import Callable
from pathlib import Path

from dipole.core.cli.output import stdout_to_stderr

Runner = Callable[[argparse.Namespace], int]


def play(parser: argparse.ArgumentParser) -> Runner:
    """Play whole episodes with a trained agent and say what it reaches."""
    parser.add_argument(
        "agent",
        metavar="AGENT",
        help="folder of a finished run, the first digits of its hash, agent.zip, or its folder",
    )
    parser.add_argument(
        "--env", metavar="TASK", help="dot, a task of the suite, or an id of gymnasium (default: the agent's own task)"
    )
    parser.add_argument("--episodes", type=int, default=10, metavar="N", help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first episode (default: 0)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deterministic", action="store_true", default=True, help="the mean action (default)")
    how.add_argument("--stochastic", action="store_false", dest="deterministic", help="actions drawn from the policy")
    parser.add_argument("--video", type=Path, metavar="FILE", help="the first episode as .gif or .mp4")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="of the video, drawn at that size; at most 4096")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", help="auto, cpu, cuda, ... (default: that of the recipe, or auto)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where hashes are looked up")
    return _play


def _play(arguments: argparse.Namespace) -> int:
    from dipole.core.train.domains import adapter_class

    adapter_class("rl")  # a missing package is one message
    from dipole.rl.episodes.trial import trial

    with stdout_to_stderr(arguments.json):
        found = trial(
            arguments.agent,
            arguments.env,
            arguments.episodes,
            arguments.seed,
            deterministic=arguments.deterministic,
            video=arguments.video,
            device=arguments.device,
            runs=arguments.runs,
            size=arguments.size,
        )
    print(found.as_json() if arguments.json else found)
    return 0
