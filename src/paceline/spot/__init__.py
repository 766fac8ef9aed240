"""Training the drafter in spare time, on the answers that were just written."""
