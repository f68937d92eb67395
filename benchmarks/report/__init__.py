"""Records as tables, charts and verdicts. The printed numbers of the papers."""
