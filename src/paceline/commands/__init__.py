"""What the commands do, beyond reading their arguments."""
