"""Several workers: who decodes what, who trains the drafter meanwhile, and what happens when one is lost."""
