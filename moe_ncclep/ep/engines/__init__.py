"""One module per engine; ``select`` picks one for a group."""
