"""The portable backward."""
