"""`dipole play`: arguments only. It is not in dipole.rl, whose import registers environments with gymnasium."""

import argparse

from dipole.core.cli.output import stdout_to_stderr, write
from dipole.core.cli.parser import Runner, add_runs, to_path


def play(parser: argparse.ArgumentParser) -> Runner:
    """Play whole episodes with a trained agent and print its returns."""
    found = "folder of a finished run, the first digits of its hash, agent.zip, or its folder"
    parser.add_argument("agent", metavar="AGENT", help=found)
    tasks = "dot, a task of the suite, or an id of gymnasium (default: the agent's own task)"
    parser.add_argument("--env", metavar="TASK", help=tasks)
    parser.add_argument("--episodes", type=int, default=10, metavar="N", help="number of episodes (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the first episode (default: 0)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deterministic", action="store_true", default=True, help="the mean action (default)")
    how.add_argument("--stochastic", action="store_false", dest="deterministic", help="actions drawn from the policy")
    parser.add_argument(
        "-o", "--out", "--video", dest="video", type=to_path, metavar="FILE", help="the first episode as .gif or .mp4"
    )
    parser.add_argument("--size", type=int, metavar="PIXELS", help="size of the video, at most 4096")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", help="auto, cpu, cuda, ... (default: the recipe's, or auto)")
    add_runs(parser, "folder to look hashes up in")
    return _play


def _play(arguments: argparse.Namespace) -> int:
    from dipole.core.train.domains import adapter_class

    adapter_class("rl")  # reports a missing package
    from dipole.rl.episodes.trial import trial

    a = arguments
    how = {"deterministic": a.deterministic, "video": a.video, "device": a.device, "runs": a.runs, "size": a.size}
    with stdout_to_stderr(a.json):
        found = trial(a.agent, a.env, a.episodes, a.seed, **how)
    if a.json:
        print(found.as_json())
    else:
        write(found)
    return 0
