"""Records as tables, charts and verdicts; the printed numbers of the papers."""
