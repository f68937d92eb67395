"""`dipole sweep`: search settings on the validation part, then train the winner's seeds for the test part."""
