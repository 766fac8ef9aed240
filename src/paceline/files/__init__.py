"""Files from outside and of our own: bounded reading, writing aside, the lock of a run directory."""
