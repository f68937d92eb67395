"""A third-party package: an objective, a domain, a command and a recipe, each a file and a line in pyproject.toml."""
