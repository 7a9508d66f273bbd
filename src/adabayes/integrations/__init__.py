"""Helpers for other libraries, a module for each; importing this package imports none of them."""
