"""How parameters are cut into blocks, and when the bases of blocks are refreshed. Imports neither torch nor JAX."""
