"""Helpers for other people's training code, one module for each library; nothing here imports one of them."""
