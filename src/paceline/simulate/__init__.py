"""What a run would take on other workers: a discrete-event simulation from costs that the run itself has measured."""
