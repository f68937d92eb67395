"""`dipole sweep`: search settings on the validation part, then train the winner's seeds for the test part.

Each module imports only those above it:

    space           the settings that vary
    study           the trials, shared by processes and restarts (Optuna on SQLite)
    summary         the state of a search as a file, which the report reads
    search          ask, train, prune and report trials, then train the winner
"""
