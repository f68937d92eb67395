"""The papers' numbers and claims, and their verdicts: from the values of two sides to agrees, differs or undecided."""
