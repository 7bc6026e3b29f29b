"""flashtile as the attention of servers, by whole engines: ``python -m tests.plugins`` where one is installed."""
