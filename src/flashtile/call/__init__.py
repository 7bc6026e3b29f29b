"""A call as records: its arguments, its problem, a backend's interface."""
