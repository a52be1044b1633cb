"""The graph that passes work on: its sizes, its code as text, where it comes from."""
