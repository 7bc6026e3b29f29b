"""The Hopper backward."""
