"""`dipole sweep`: search a space of settings on a validation part, then the winner's seeds on the test part.

Each module imports only what stands above it:

    space           what may vary, and the settings that a choice of values stands for
    study           the trials so far, shared by processes and restarts (Optuna on SQLite)
    summary         what is known of a search, as the file that the report reads
    search          ask, train, prune, tell. Then the winner
"""
