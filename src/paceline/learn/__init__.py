"""Learning: advantages and losses as short pure functions, and the learner that applies them to the policy."""
