"""The same graph, in ops that rules split: each module finds one way of writing something."""
