"""One run: its folder, its training, and the processes that share it."""
