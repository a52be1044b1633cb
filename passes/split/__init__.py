"""From a graph with rules to chunk bodies, and the outer graph around them."""
