"""What a run shows: metrics on disk, a live view in the terminal, what the machine has."""
