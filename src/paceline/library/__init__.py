"""Paceline from Python: `Engine`, `Drafter` and `Trainer`, thin over the parts that the commands use."""
