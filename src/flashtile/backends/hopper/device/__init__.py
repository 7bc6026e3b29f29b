"""Device code of both Hopper directions: channels, tiles of any width, WGMMA fragments, inline PTX."""
