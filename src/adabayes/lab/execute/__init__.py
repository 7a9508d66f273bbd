"""Many runs: here, in several processes, or on a Ray cluster."""
