"""Bridges to other packages. Each module imports its package lazily; nothing imports them."""
