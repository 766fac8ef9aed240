"""The report page of a run, and the drawings on it."""
