"""Device code that every portable kernel shares."""
