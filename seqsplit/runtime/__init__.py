"""The runtime: executes segments chunk by chunk. It decides nothing."""
