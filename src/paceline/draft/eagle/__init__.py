"""The EAGLE-3 drafter: its model, its cache, its checkpoints and how it is trained."""
