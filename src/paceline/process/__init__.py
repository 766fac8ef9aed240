"""Child processes: how rewards and local workers are started, talked to and ended. Nothing here waits for a child."""
