"""The suffix drafter: matches in what was written before, without a model."""
