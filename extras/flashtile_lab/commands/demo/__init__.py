"""``flashtile-lab demo``: exactness, memory, time and training on the machine it runs on, and a report of them."""
