"""What the passes have made, run against what it was made of."""
