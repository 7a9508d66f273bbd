"""The engine: everything about a step except its mathematics."""
