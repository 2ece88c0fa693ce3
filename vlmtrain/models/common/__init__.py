"""What model families share."""
