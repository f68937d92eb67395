"""The package's URLs, from the one setting in pyproject.toml, which may be empty."""

import tomllib
from pathlib import Path

from setuptools import setup

settings = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))
repository = settings["tool"]["dipole"]["repository"]
project_urls = {}
if repository:
    project_urls["Repository"] = repository
setup(project_urls=project_urls)
